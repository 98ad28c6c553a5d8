//! A model of a user's own: GPT with one product for queries, keys and values, against what was
//! published of its training.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    cost::CostModel,
    ops::{AttentionOptions, NormOptions},
};
use anymesh_layout::{Block, Layout, Matrix, Middle, Model, Search};

/// Layers of GPT with biases, without dropout.
#[derive(Clone, Debug)]
struct Gpt {
    heads: usize,
    width: usize,
    layers: usize,
    length: usize,
    /// Attention as four kernels over `heads * length` scores of each token, as in 2022.
    scores: Scores,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    /// One kernel keeps none.
    Fused,
    /// Kept for the backward pass.
    Kept,
    /// Computed again in the backward pass: selective recompute.
    Again,
}

impl Gpt {
    fn new(heads: usize, width: usize, layers: usize, scores: Scores) -> Self {
        Self {
            heads,
            width,
            layers,
            length: 2048,
            scores,
        }
    }

    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let h = self.width;
        vec![
            ("ln_1.weight", vec![h]),
            ("ln_1.bias", vec![h]),
            ("attn.qkv.weight", vec![3 * h, h]),
            ("attn.out.weight", vec![h, h]),
            ("ln_2.weight", vec![h]),
            ("ln_2.bias", vec![h]),
            ("mlp.up.weight", vec![4 * h, h]),
            ("mlp.down.weight", vec![h, 4 * h]),
        ]
    }
}

impl Model for Gpt {
    fn dtype(&self) -> DType {
        DType::BF16
    }

    fn width(&self) -> usize {
        self.width
    }

    fn length(&self) -> usize {
        self.length
    }

    fn blocks(&self) -> Vec<Block> {
        let (h, s) = (self.width as f64, self.length as f64);
        let matrix = |name: &str, n, k| Matrix::new(&format!("h.*.{name}.weight"), n, k);
        let vectors = |name: &str| {
            ["weight", "bias"]
                .map(|part| (format!("h.*.{name}.{part}"), self.width))
                .into()
        };
        // Elements of scores for each token, in 16 bits.
        let scores = (self.heads * self.length) as f64;
        let (pairs, kept, passes) = match self.scores {
            // Half of the pairs, none of them in memory.
            Scores::Fused => (0.5, 0.0, 0.0),
            // All pairs; softmax, its dropout with a mask of one byte and both products' operands;
            // forward written and read three times, backward four.
            Scores::Kept => (1.0, 2.5, 11.0),
            Scores::Again => (1.0 + 1.0 / 3.5, 0.0, 15.0),
        };
        // A mask of dropout has a byte for each element of the stream; `step` has none.
        let masks = if self.scores == Scores::Fused {
            0.0
        } else {
            0.5
        };
        vec![
            Block {
                name: "attention".into(),
                count: self.layers,
                reads: vec![matrix("attn.qkv", 3 * self.width, self.width)],
                middle: Middle {
                    units: self.heads,
                    mixes_tokens: true,
                    products: 4.0 * s * h * pairs,
                    kept: 4.0 * h + kept * scores,
                    touched: 12.0 * h + passes * scores,
                    statistics: 0.0,
                },
                writes: Some(matrix("attn.out", self.width, self.width)),
                vectors: vectors("ln_1"),
                touched: 14.0,
                kept: 1.0 + masks,
            },
            Block {
                name: "mlp".into(),
                count: self.layers,
                reads: vec![matrix("mlp.up", 4 * self.width, self.width)],
                middle: Middle {
                    units: 4 * self.width,
                    kept: 8.0 * h,
                    touched: 20.0 * h,
                    ..Middle::default()
                },
                writes: Some(matrix("mlp.down", self.width, 4 * self.width)),
                vectors: vectors("ln_2"),
                touched: 14.0,
                kept: 1.0 + masks,
            },
        ]
    }

    fn step(&self, mesh: &Mesh, layout: &Layout, sequences: usize) -> Result<()> {
        let dims = [sequences, self.length, self.width];
        let x = Tensor::zeros(dims, self.dtype(), (mesh, &layout.stream))?.require_grad()?;
        let (mut y, mut parameters) = (x.clone(), vec![]);
        for i in 0..self.layers {
            let mut p = std::collections::BTreeMap::new();
            for (name, shape) in self.shapes() {
                let sharding = layout.sharding_of(&format!("h.{i}.{name}"), shape.len());
                let value =
                    Tensor::zeros(shape, self.dtype(), (mesh, &sharding))?.require_grad()?;
                parameters.push(value.clone());
                p.insert(name, value);
            }
            let norm = |x: &Tensor, name: &str| {
                let (weight, bias) = (&p[&*format!("{name}.weight")], &p[&*format!("{name}.bias")]);
                x.layer_norm(&NormOptions::new().weight(weight).bias(bias))
            };
            let heads = [
                sequences,
                self.length,
                self.heads,
                3,
                self.width / self.heads,
            ];
            let qkv = norm(&y, "ln_1")?
                .linear(&p["attn.qkv.weight"], None)?
                .reshape(heads)?
                .unbind(3)?;
            let [q, k, v] = [0, 1, 2].map(|i| qkv[i].transpose(1, 2));
            let seen = q?.attention(&k?, &v?, &AttentionOptions::causal())?.out;
            let seen = seen.transpose(1, 2)?.reshape(dims)?;
            y = y
                .add(&seen.linear(&p["attn.out.weight"], None)?)?
                .reshard(&layout.stream)?;
            let wide = norm(&y, "ln_2")?
                .linear(&p["mlp.up.weight"], None)?
                .gelu()?;
            y = y
                .add(&wide.linear(&p["mlp.down.weight"], None)?)?
                .reshard(&layout.stream)?;
        }
        let seed = Tensor::zeros(dims, self.dtype(), (mesh, &layout.stream))?;
        let gradients = y.backward_with(&seed)?;
        gradients.of(&x)?;
        parameters
            .iter()
            .try_for_each(|p| gradients.of(p).map(|_| ()))
    }
}

const MEGATRON: &str = "
mesh tp=8
stream STREAM
h.*.attn.qkv.weight = [@tp, _]
h.*.attn.out.weight = [_, @tp]
h.*.mlp.up.weight = [@tp, _]
h.*.mlp.down.weight = [_, @tp]
";

fn megatron(stream: &str) -> Layout {
    let text = MEGATRON.replace("STREAM", stream);
    text.parse().expect("a layout")
}

#[test]
fn the_closed_form_is_what_the_model_sends() {
    let model = Gpt {
        length: 4096,
        ..Gpt::new(64, 8192, 1, Scores::Fused)
    };
    let cost = CostModel::preset("h100").expect("a preset");
    let search = Search {
        model: &model,
        cost: &cost,
        ranks: 8,
        sequences: 1,
        optimizer: 12.0,
    };
    let u = 58_720_256.0;
    // The gradients of weights and biases of norms are sums over tokens: 4 * 8192 elements.
    let norms = 4.0 * 8192.0 * 2.0 * 2.0 * 7.0 / 8.0;
    for stream in ["[_, _, _]", "[_, @tp, _]"] {
        let candidate = search.price(&megatron(stream)).expect("a price");
        assert_eq!(candidate.price.received.tp, 8.0 * u + norms, "{stream}");
        let check = search.verify(&candidate).expect("a run");
        assert_eq!(
            check.ledger, check.closed,
            "{stream}\n{check}{}",
            check.run.ledger
        );
    }
}

/// (name, heads, width, layers, stages, chunks, micro-batch, micro-batches, seconds with full recompute
/// and with a cut stream and selective recompute): Korthikanti et al., arXiv 2205.05198, tables 3 and 5.
type Published = (
    &'static str,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    f64,
    f64,
);
const PUBLISHED: [Published; 4] = [
    ("22B", 64, 6144, 48, 1, 1, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 1, 280, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 1, 512, 94.42, 71.49),
];
const VOCABULARY: f64 = 51_200.0;

/// Seconds of an iteration with a pipeline: stages that run one micro-batch after the other, a bubble
/// that chunks make smaller, the head on the last stage, and the optimizer.
fn iteration(p: &Published, cost: &CostModel, full_recompute: bool) -> f64 {
    let &(_, heads, width, layers, stages, chunks, batch, microbatches, ..) = p;
    let scores = if full_recompute {
        Scores::Kept
    } else {
        Scores::Again
    };
    let model = Gpt::new(heads, width, layers / stages, scores);
    let search = Search {
        model: &model,
        cost,
        ranks: 8,
        sequences: batch,
        optimizer: 12.0,
    };
    let mut layout = megatron(if full_recompute {
        "[_, _, _]"
    } else {
        "[_, @tp, _]"
    });
    layout.recompute = full_recompute;
    let stage = search.price(&layout).expect("a price").seconds;
    let tokens = (batch * model.length) as f64;
    let h = width as f64;
    // Logits cut over eight ranks, forward and backward, and what the loss touches of them in f32.
    let head = 3.0 * cost.kernel_seconds(DType::BF16, 2.0 * tokens * h * VOCABULARY / 8.0, 0.0)
        + cost.kernel_seconds(DType::F32, 0.0, tokens * VOCABULARY / 8.0 * 4.0 * 5.0);
    // Adam reads a gradient, a master and two moments, and writes all but the gradient, and the
    // parameter in 16 bits.
    let parameters = 12.0 * h * h * layers as f64 / (8 * stages) as f64;
    let optimizer = cost.kernel_seconds(DType::F32, 0.0, parameters * 30.0);
    // A border of the pipeline: each rank sends its part of the stream, once for each chunk.
    let border = match stages {
        1 => 0.0,
        _ => 2.0 * chunks as f64 * cost.ring_seconds(cost.link, 1, (tokens * h * 2.0 / 8.0) as u64),
    };
    let waiting = (stages - 1) as f64 / chunks as f64;
    (microbatches as f64 + waiting) * (stage + border) + microbatches as f64 * head + optimizer
}

/// Two numbers of the preset are fitted to these eight times: see its file. What a layer takes alone
/// was not part of the fit.
#[test]
fn iteration_times_of_published_models_are_within_ten_percent() {
    let cost = CostModel::preset("a100-80").expect("a preset");
    let mut report = String::new();
    let mut worst = 0f64;
    for p in &PUBLISHED {
        for (full, published) in [(true, p.8), (false, p.9)] {
            let modelled = iteration(p, &cost, full);
            let error = modelled / published - 1.0;
            worst = worst.max(error.abs());
            report += &format!(
                "{:5} {:10} {published:7.2} s, modelled {modelled:7.2} s, {:+.1}%\n",
                p.0,
                if full { "full" } else { "selective" },
                error * 100.0
            );
        }
    }
    println!("{report}");
    assert!(worst <= 0.10, "{report}");
}

#[test]
fn a_published_layer_takes_as_long_as_modelled() {
    let cost = CostModel::preset("a100-80").expect("a preset");
    let model = Gpt::new(64, 6144, 1, Scores::Kept);
    let search = Search {
        model: &model,
        cost: &cost,
        ranks: 8,
        sequences: 4,
        optimizer: 12.0,
    };
    // Forward and backward in ms: table 4 of the same paper, 22B.
    for (stream, published) in [("[_, _, _]", 7.7 + 11.9), ("[_, @tp, _]", 7.2 + 11.8)] {
        let modelled = search.price(&megatron(stream)).expect("a price").seconds * 1e3;
        let error = modelled / published - 1.0;
        assert!(
            error.abs() < 0.1,
            "{stream}: {modelled:.1} ms, published {published:.1}"
        );
    }
}

/// Activations of the first stage in GiB, nothing recomputed and with a cut stream and scores
/// computed again: figure 1 of the same paper. Chunks of a pipeline hold more than the layers of all
/// stages together.
#[test]
fn activations_are_those_of_the_published_formula() {
    let published = [
        (59.25, 9.5625),
        (66.84375, 12.3515625),
        (114.0234375, 23.076171875),
        (131.25, 26.5625),
    ];
    let cost = CostModel::preset("a100-80").expect("a preset");
    for (p, (none, selective)) in PUBLISHED.iter().zip(published) {
        let &(name, heads, width, layers, stages, chunks, batch, ..) = p;
        let (stages, chunks) = (stages as f64, chunks as f64);
        let more = match chunks {
            1.0 => 1.0,
            _ => 1.0 + (stages - 1.0) / (stages * chunks),
        };
        let activations = |scores, stream| {
            let model = Gpt::new(heads, width, layers, scores);
            let search = Search {
                model: &model,
                cost: &cost,
                ranks: 8,
                sequences: batch,
                optimizer: 12.0,
            };
            let price = search.price(&megatron(stream)).expect("a price").price;
            price.activations * more / f64::from(1 << 30)
        };
        assert_eq!(activations(Scores::Kept, "[_, _, _]"), none, "{name}");
        // The paper gathers the inputs of products again; here they are kept: 4 bytes for each
        // element of the stream, of which an eighth is part of the 34.
        let stream = (2048 * batch * width * layers) as f64 / f64::from(1 << 30);
        let gathered = 4.0 * stream * (1.0 - 1.0 / 8.0) * more;
        let held = activations(Scores::Again, "[_, @tp, _]");
        assert!(
            (held - gathered - selective).abs() < 1e-9,
            "{name}: {held} {gathered}"
        );
    }
}
