//! Layers beyond the usual two, each with a plan by hand.
//!
//! `u` of a stream is what a rank receives for one gather or reduce-scatter of it, so an all-reduce
//! is `2u`. By hand a pair of products cut as Megatron does costs an all-reduce forward and one
//! backward, `4u`; where the stream is cut, two gathers and two reduce-scatters, also `4u`, and `u`
//! more where the gathered input is not kept but gathered again.

use crate::{
    layers::{
        Layer, Layout, Llama, LlamaEach, MEGATRON, Parameters, Settle, Sizes, UnevenHeads,
        heads_of, joined,
    },
    measure::{Flow, Program, Traffic},
    table::sizes,
};
use anymesh_core::{
    DType, Mesh, Result, Tensor, meta,
    ops::{AttentionOptions, Conv, CrossEntropyOptions, NormOptions},
};

/// What a rank receives for one gather of `elements` of bf16 over `ranks`.
fn unit(elements: usize, ranks: usize) -> u64 {
    (elements * 2 / ranks * (ranks - 1)) as u64
}

/// One run of a layer on a mesh without values.
#[derive(Clone, Copy)]
struct Run<'a> {
    layer: &'a dyn Layer,
    layout: &'a Layout,
    mesh: &'a str,
    stream: &'a str,
    input: &'a [usize],
}

impl Run<'_> {
    fn measure(&self, flow: Flow) -> Result<Traffic> {
        let mesh = Mesh::new(self.mesh, &meta())?;
        let program = Program {
            layer: self.layer,
            layout: self.layout,
            mesh: &mesh,
            stream: self.stream,
            flow,
            layers: 1,
            norms: true,
        };
        program.measure(self.input, DType::BF16)
    }

    /// However the stream is brought back to its sharding, no more is sent than by hand:
    /// `activations` in the passes and `parameters` for the gradients of parameters.
    #[track_caller]
    fn hold(&self, activations: u64, parameters: u64) -> Result<()> {
        let mut report = format!(
            "{} on {}: by hand {activations} + {parameters}\n",
            self.stream, self.mesh
        );
        let mut failed = false;
        for flow in [Flow::EachAdd, Flow::AtEnd] {
            let t = self.measure(flow)?;
            let (sent, settled) = (t.activations(), t.parameters.bytes());
            // The gradients of parameters that are cut are scattered in the pass.
            failed |= settled > parameters || sent + settled > activations + parameters;
            let ratio = sent as f64 / activations as f64;
            println!("{} on {} {flow:?}: {ratio:.3}", self.stream, self.mesh);
            report += &format!(
                " {flow:?}: {sent} ({ratio:.3}) + {settled}\n{}",
                t.explain()
            );
        }
        assert!(!failed, "{report}");
        Ok(())
    }
}

/// Queries from the stream, keys and values from the result of an encoder.
pub(crate) struct CrossAttention {
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Batch and positions of the encoder's result.
    pub(crate) memory: [usize; 2],
}

impl Layer for CrossAttention {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let w = self.width;
        let square = |name| (name, vec![w, w]);
        vec![
            ("norm", vec![w]),
            // A leaf like the others, so that its gradient is counted.
            ("memory", vec![self.memory[0], self.memory[1], w]),
            square("wq"),
            square("wk"),
            square("wv"),
            square("wo"),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let h = x.rms_norm(&NormOptions::new().weight(p.get("norm")))?;
        let from = |x: &Tensor, w: &str| heads_of(&x.linear(p.get(w), None)?, self.heads);
        let memory = p.get("memory");
        let (k, v) = (from(memory, "wk")?, from(memory, "wv")?);
        let seen = from(&h, "wq")?.attention(&k, &v, &AttentionOptions::default())?;
        settle(x.add(&joined(&seen.out)?.linear(p.get("wo"), None)?)?)
    }
}

/// 4096 positions look at 1024 of an encoder.
#[test]
fn cross_attention_adds_the_gradient_of_the_memory() -> Result<()> {
    let layer = CrossAttention {
        width: 8192,
        heads: 64,
        memory: [8, 1024],
    };
    let layout: Vec<_> = MEGATRON
        .iter()
        .copied()
        .chain([("memory", "[@dp, _, _]")])
        .collect();
    let (u, memory) = (unit(4096 * 8192, 8), unit(1024 * 8192, 8));
    // Summed over dp: four matrices of which a rank has an eighth, and the norm.
    let over_dp = 2 * (unit(4 * 8192 * 8192 / 8, 8) + unit(8192, 8));
    let run = |stream| Run {
        layer: &layer,
        layout: &layout,
        mesh: "dp=8, tp=8",
        stream,
        input: &[8, 4096, 8192],
    };
    // The gradient of the memory is asked for with those of the parameters. The norm's is summed
    // over tp where the stream or its gradient is cut.
    let settled = over_dp + 2 * memory + 2 * unit(8192, 8);
    run("[@dp, _, _]").hold(4 * u, settled)?;
    run("[@dp, @tp, _]").hold(5 * u, settled)
}

/// Each token goes to the expert that its router likes best, at most `capacity` of a group to each.
pub(crate) struct Experts {
    pub(crate) width: usize,
    pub(crate) ffn: usize,
    pub(crate) experts: usize,
    pub(crate) capacity: usize,
    /// Where rows go between their groups and their experts, where the program says it.
    pub(crate) turn: Option<[&'static str; 2]>,
}

impl Layer for Experts {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Self {
            width,
            ffn,
            experts,
            ..
        } = *self;
        vec![
            ("router", vec![experts, width]),
            ("up", vec![experts, ffn, width]),
            ("down", vec![experts, width, ffn]),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let dtype = x.dtype();
        let odds = x.linear(p.get("router"), None)?.softmax(-1)?;
        let chosen = odds.argmax(Some(-1), false)?.one_hot(self.experts)?;
        // The how-manieth of its expert a token is; those past the capacity have no slot.
        let slot = chosen.cumsum(1)?.mul(&chosen)?.sum(&[-1], false)?.sub(1)?;
        let slot = slot.one_hot(self.capacity)?.cast(dtype)?;
        let chosen = chosen.cast(dtype)?;
        let gate = odds.mul(&chosen)?.sum(&[-1], false)?;
        let dispatch = Tensor::einsum("gse,gsc->gsec", &[&chosen, &slot])?;
        let combine = Tensor::einsum("gsec,gs->gsec", &[&dispatch, &gate])?;
        let turn = |x: Tensor, to: usize| match self.turn {
            Some(shardings) if !x.is_plain() => x.reshard(shardings[to]),
            _ => Ok(x),
        };
        let rows = turn(Tensor::einsum("gsec,gsh->egch", &[&dispatch, x])?, 0)?;
        let wide = Tensor::einsum("egch,efh->egcf", &[&rows, p.get("up")])?.gelu()?;
        let rows = Tensor::einsum("egcf,ehf->egch", &[&wide, p.get("down")])?;
        let rows = turn(rows, 1)?;
        settle(x.add(&Tensor::einsum("gsec,egch->gsh", &[&combine, &rows])?)?)
    }
}

/// Groups and experts over the same ranks: rows go to their experts and back in both passes, four
/// all-to-alls of `experts * capacity` rows of a rank's group.
#[test]
fn experts_with_capacity_cost_four_turns_of_their_rows() -> Result<()> {
    let layout: &Layout = &[("up", "[@ep, _, _]"), ("down", "[@ep, _, _]")];
    for turn in [Some(["[@ep, _, _, _]", "[_, @ep, _, _]"]), None] {
        let layer = Experts {
            width: 2048,
            ffn: 8192,
            experts: 16,
            capacity: 320,
            turn,
        };
        let run = Run {
            layer: &layer,
            layout,
            mesh: "ep=8",
            stream: "[@ep, _, _]",
            input: &[8, 4096, 2048],
        };
        run.hold(4 * unit(16 * 320 * 2048, 8), 2 * unit(16 * 2048, 8))?;
    }
    Ok(())
}

/// From tokens to the loss, with nothing between but a norm.
#[test]
fn a_cut_vocabulary_costs_two_reductions_of_the_stream_and_three_numbers_a_token() -> Result<()> {
    let (tokens, words, width) = (4096, 128_256, 8192);
    let mesh = Mesh::new("tp=8", &meta())?;
    let make = |shape: &[usize], sharding: &str| {
        Tensor::zeros(shape, DType::BF16, (&mesh, sharding))?.require_grad()
    };
    let (table, head) = (
        make(&[words, width], "[@tp, _]")?,
        make(&[words, width], "[@tp, _]")?,
    );
    let norm = make(&[width], "[_]")?;
    let ids = Tensor::zeros([tokens], DType::I32, &mesh)?;
    let u = unit(tokens * width, 8);
    // Cut: the stream is reduce-scattered and gathered, and so is its gradient.
    for stream in [Some("[_, _]"), Some("[@tp, _]"), None] {
        let loss = || {
            let x = table.embedding(&ids)?;
            let x = match stream {
                Some(stream) => x.reshard(stream)?,
                None => x,
            };
            let x = x.rms_norm(&NormOptions::new().weight(&norm))?;
            let logits = x.linear(&head, None)?;
            logits.cross_entropy(&ids, &CrossEntropyOptions::default())
        };
        let t = crate::measure::traffic(&[], &[&table, &head, &norm], None, loss)?;
        assert!(
            t.activations() <= 4 * u + 86_016,
            "{stream:?}\n{}",
            t.explain()
        );
        // The norm's gradient, where its input was cut.
        assert!(
            t.parameters.bytes() <= 2 * unit(width, 8),
            "{stream:?}\n{}",
            t.explain()
        );
    }
    Ok(())
}

/// Two key heads and eight ranks.
mod few_key_heads {
    use super::*;

    const SIZES: Sizes = Sizes {
        width: 8192,
        heads: 64,
        kv_heads: 2,
        d: 128,
        ffn: 3 * 8192,
    };
    const INPUT: &[usize] = &[1, 4096, 8192];

    /// Four ranks hold the same part of the weights of a key head: they compute it each, and what
    /// they get for its weights is added.
    #[test]
    fn shared_by_ranks_of_an_axis_of_their_own() -> Result<()> {
        let layout: &Layout = &[
            ("wq", "[@kv@g, _]"),
            ("wk", "[@kv, _]"),
            ("wv", "[@kv, _]"),
            ("wo", "[_, @kv@g]"),
            ("gate", "[@kv@g, _]"),
            ("up", "[@kv@g, _]"),
            ("down", "[_, @kv@g]"),
        ];
        let run = Run {
            layer: &Llama(SIZES),
            layout,
            mesh: "kv=2, g=4",
            stream: "[_, _, _]",
            input: INPUT,
        };
        let shared = 2 * 2 * unit(128 * 8192, 4);
        // The gradients of the norms are added up along one axis after the other, which takes less
        // time.
        let norms = 2 * 2 * (unit(8192, 2) + unit(8192, 4));
        run.hold(8 * unit(4096 * 8192, 8), shared + norms)
    }

    /// Every rank has all key heads.
    #[test]
    fn whole_on_every_rank() -> Result<()> {
        let layout: Vec<_> = MEGATRON
            .iter()
            .copied()
            .filter(|(name, _)| !["wk", "wv"].contains(name))
            .collect();
        let run = Run {
            layer: &Llama(SIZES),
            layout: &layout,
            mesh: "tp=8",
            stream: "[_, _, _]",
            input: INPUT,
        };
        let shared = 2 * 2 * unit(2 * 128 * 8192, 8);
        run.hold(8 * unit(4096 * 8192, 8), shared + 2 * 2 * unit(8192, 8))
    }

    /// A quarter of a head on each rank: by hand keys and values are gathered and their gradients
    /// reduce-scattered, four times `keys`. Op by op it takes 2.4 % more than the layer by hand: taking
    /// them apart into heads turns them first, which is cheapest for that op alone, and the weights
    /// are gathered for gradients that need not be whole (their sum with that of the queries is
    /// partial anyway, which one pull cannot know).
    #[test]
    fn cut_finer_than_heads() -> Result<()> {
        let run = Run {
            layer: &Llama(SIZES),
            layout: MEGATRON,
            mesh: "tp=8",
            stream: "[_, _, _]",
            input: INPUT,
        };
        let keys = unit(4096 * 2 * 128, 8);
        let (turned, weights) = (2 * keys / 8, 2 * unit(2 * 128 * 8192, 8));
        run.hold(
            8 * unit(4096 * 8192, 8) + 2 * 2 * keys + turned + weights + 2 * keys,
            2 * 2 * unit(8192, 8),
        )
    }
}

/// Two convolutions around a relu, added to what came in.
pub(crate) struct ConvBlock {
    pub(crate) channels: usize,
    pub(crate) hidden: usize,
}

impl Layer for ConvBlock {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Self { channels, hidden } = *self;
        vec![
            ("norm", vec![channels]),
            ("shift", vec![channels]),
            ("first", vec![hidden, channels, 3, 3]),
            ("first_bias", vec![hidden]),
            ("second", vec![channels, hidden, 3, 3]),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let conv = Conv {
            padding: [1, 1],
            ..Default::default()
        };
        let options = NormOptions::new()
            .weight(p.get("norm"))
            .bias(p.get("shift"));
        let h = x.group_norm(4, &options)?.relu()?;
        let h = h.conv2d(p.get("first"), Some(p.get("first_bias")), &conv)?;
        settle(x.add(&h.relu()?.conv2d(p.get("second"), None, &conv)?)?)
    }
}

/// How a convolutional block lies.
pub(crate) const CONV: &Layout = &[
    ("first", "[@tp, _, _, _]"),
    ("first_bias", "[@tp]"),
    ("second", "[_, @tp, _, _]"),
];

/// Channels between the convolutions are cut: the pair costs what a pair of products does.
#[test]
fn a_convolutional_block_costs_two_all_reduces() -> Result<()> {
    let layer = ConvBlock {
        channels: 256,
        hidden: 1024,
    };
    let run = Run {
        layer: &layer,
        layout: CONV,
        mesh: "dp=4, tp=8",
        stream: "[@dp, _, _, _]",
        input: &[32, 256, 56, 56],
    };
    // Over dp: an eighth of the kernels and of the bias, the norm. Over tp: the norm, where its
    // input was cut.
    let kernels = 2 * 256 * 1024 * 9 / 8 + 1024 / 8 + 2 * 256;
    run.hold(
        4 * unit(8 * 256 * 56 * 56, 8),
        2 * unit(kernels, 4) + 2 * unit(2 * 256, 8),
    )
}

/// One dimension cut by two axes.
mod two_axes {
    use super::*;
    use crate::table::{llama, over_dp};

    /// Both axes are one tensor-parallel group of eight. With a cut stream each of the three products
    /// of its first input is cheapest by itself along one axis for the rows and the other for the sum;
    /// `linear_each` gathers it once for all three, which takes 8 units.
    #[test]
    fn cost_what_one_of_their_product_does() -> Result<()> {
        let layout: &Layout = &[
            ("wq", "[@a@b, _]"),
            ("wk", "[@a@b, _]"),
            ("wv", "[@a@b, _]"),
            ("wo", "[_, @a@b]"),
            ("gate", "[@a@b, _]"),
            ("up", "[@a@b, _]"),
            ("down", "[_, @a@b]"),
        ];
        let u = unit(4096 * 8192, 8);
        let each = Run {
            layer: &LlamaEach(sizes(3 * 8192)),
            layout,
            mesh: "a=2, b=4",
            stream: "[_, @a@b, _]",
            input: &[1, 4096, 8192],
        };
        each.hold(8 * u, 2 * 2 * (unit(8192, 2) + unit(8192, 4)))?;
        let run = |stream| {
            Run {
                layer: &llama(),
                layout,
                mesh: "a=2, b=4",
                stream,
                input: &[1, 4096, 8192],
            }
            .hold(
                if stream == "[_, _, _]" {
                    8 * u
                } else {
                    608_174_080
                },
                if stream == "[_, _, _]" { 0 } else { 37_748_736 }
                    + 2 * 2 * (unit(8192, 2) + unit(8192, 4)),
            )
        };
        run("[_, _, _]")?;
        run("[_, @a@b, _]")
    }

    /// The outputs or inputs that tp cuts are cut further over dp, and gathered for use.
    #[test]
    fn gather_the_inner_one() -> Result<()> {
        let layout: &Layout = &[
            ("wq", "[@tp@dp, _]"),
            ("wk", "[@tp@dp, _]"),
            ("wv", "[@tp@dp, _]"),
            ("wo", "[_, @tp@dp]"),
            ("gate", "[@tp@dp, _]"),
            ("up", "[@tp@dp, _]"),
            ("down", "[_, @tp@dp]"),
        ];
        let all = over_dp(&llama(), layout, 8);
        let vectors = 2 * 2 * unit(8192, 8);
        let matrices = (all - vectors) / 3;
        let run = Run {
            layer: &llama(),
            layout,
            mesh: "dp=8, tp=8",
            stream: "[@dp, _, _]",
            input: &[8, 4096, 8192],
        };
        run.hold(
            8 * unit(4096 * 8192, 8) + 2 * matrices,
            matrices + 2 * vectors,
        )
    }
}

/// Nine heads of 128 on four ranks: two, two, two and three.
mod nine_heads {
    use super::*;

    const SIZES: Sizes = Sizes {
        width: 9 * 128,
        heads: 9,
        kv_heads: 9,
        d: 128,
        ffn: 4 * 9 * 128,
    };
    const INPUT: &[usize] = &[1, 4096, 9 * 128];

    /// Weights with a dimension for heads, which is what is cut.
    #[test]
    fn as_a_dimension_cost_nothing_more() -> Result<()> {
        let layout: &Layout = &[
            ("wq", "[@tp, _, _]"),
            ("wk", "[@tp, _, _]"),
            ("wv", "[@tp, _, _]"),
            ("wo", "[_, @tp, _]"),
        ];
        let run = Run {
            layer: &UnevenHeads(SIZES),
            layout,
            mesh: "tp=4",
            stream: "[_, _, _]",
            input: INPUT,
        };
        let u = unit(4096 * 9 * 128, 4);
        run.hold(4 * u, 2 * unit(9 * 128, 4))
    }

    /// Rows of matrices are cut evenly, 288 to a rank, heads at 256, 512 and 768: the worst rank
    /// lacks 96 columns of the queries, keys and values, and of the result, in both passes.
    #[test]
    fn as_rows_of_a_matrix_cost_what_heads_lack() -> Result<()> {
        let run = Run {
            layer: &Llama(SIZES),
            layout: MEGATRON,
            mesh: "tp=4",
            stream: "[_, _, _]",
            input: INPUT,
        };
        let (u, lacking) = (unit(4096 * 9 * 128, 4), 4096 * 96 * 2);
        run.hold(8 * u + 2 * 4 * lacking, 2 * 2 * unit(9 * 128, 4))
    }
}
