//! Published volumes of known schemes, from running the schemes, to the byte.

use crate::{
    layers::{Gpt, Layer, Layout, Llama, MEGATRON, Parameters, Sizes, heads_of, joined},
    measure::{Flow, Program, Traffic, traffic},
    table::gpt,
};
use anymesh_core::{
    DType, Mesh, Result, Tensor, meta,
    ops::{AttentionOptions, CrossEntropyOptions},
    spmd::Ledger,
};

const BF16: DType = DType::BF16;

fn mesh(axes: &str) -> Result<Mesh> {
    Mesh::new(axes, &meta())
}

/// A tensor without values, in bf16.
fn zero(shape: &[usize], mesh: &Mesh, sharding: &str) -> Result<Tensor> {
    Tensor::zeros(shape, BF16, (mesh, sharding))
}

/// What a reshard sends.
fn moved(x: &Tensor, sharding: &str) -> Result<u64> {
    let (y, ledger) = Ledger::record(|| x.reshard(sharding));
    y?;
    Ok(ledger.bytes())
}

/// 4096 tokens, h = 8192 on tp=8.
#[test]
fn a_tensor_parallel_layer_sends_eight_units() -> Result<()> {
    const U: u64 = 58_720_256;
    let mesh = mesh("tp=8")?;
    let input = [1, 4096, 8192];
    let x = |sharding| zero(&input, &mesh, sharding);
    assert_eq!(moved(&x("[_, @tp, _]")?, "[_, _, _]")?, U);
    assert_eq!(moved(&x("[_, _, _]{sum:tp}")?, "[_, @tp, _]")?, U);
    assert_eq!(moved(&x("[_, _, _]{sum:tp}")?, "[_, _, _]")?, 2 * U);
    let run = |stream| {
        let program = Program {
            layer: &gpt(),
            layout: MEGATRON,
            mesh: &mesh,
            stream,
            flow: Flow::EachAdd,
            layers: 1,
            norms: true,
        };
        program.measure(&input, BF16)
    };
    let whole = run("[_, _, _]")?;
    assert_eq!(whole.activations(), 469_762_048, "{}", whole.explain());
    let cut = run("[_, @tp, _]")?;
    assert!(cut.activations() <= 587_202_560, "{}", cut.explain());
    Ok(())
}

/// A vocabulary of 128,256 cut over 8 ranks, 4096 tokens.
mod vocabulary {
    use super::*;

    const TOKENS: usize = 4096;
    const WORDS: usize = 128_256;
    const WIDTH: usize = 8192;
    const U: u64 = 58_720_256;

    /// Megatron sends 86,016 bytes: three all-reduces of an f32 for each token (the largest logit,
    /// the sum of exponentials, the logit of the target). Here the log-sum-exps of the parts go to
    /// ranks that have some of the tokens, the logits of the targets are scattered to them in bf16,
    /// the sum of losses is added up, and the log-sum-exp is gathered for the gradient.
    #[test]
    fn cross_entropy_sends_three_numbers_for_each_token() -> Result<()> {
        let mesh = mesh("tp=8")?;
        let logits = zero(&[TOKENS, WORDS], &mesh, "[_, @tp]")?.require_grad()?;
        let target = Tensor::zeros([TOKENS], DType::I32, &mesh)?;
        let loss = || logits.cross_entropy(&target, &CrossEntropyOptions::default());
        let t = traffic(&[&logits], &[], None, loss)?;
        let part = (TOKENS / 8 * 7) as u64;
        assert_eq!(
            t.forward.bytes(),
            4 * part + 2 * part + 7,
            "{}",
            t.explain()
        );
        assert_eq!(t.backward.bytes(), 4 * part, "{}", t.explain());
        assert!(t.forward.bytes() + t.backward.bytes() <= 86_016);
        assert_eq!(moved(&logits.detach(), "[_, _]")?, 919_339_008);
        Ok(())
    }

    /// The table gives partial sums: an all-reduce, or a reduce-scatter into a cut stream, whose
    /// gradient is gathered.
    #[test]
    fn an_embedding_costs_one_reduction() -> Result<()> {
        let mesh = mesh("tp=8")?;
        let table = zero(&[WORDS, WIDTH], &mesh, "[@tp, _]")?.require_grad()?;
        let ids = Tensor::zeros([1, TOKENS], DType::I32, &mesh)?;
        for (stream, forward, backward) in [("[_, _, _]", 2 * U, 0), ("[_, @tp, _]", U, U)] {
            let seed = zero(&[1, TOKENS, WIDTH], &mesh, stream)?;
            let embed = || table.embedding(&ids)?.reshard(stream);
            let t = traffic(&[], &[&table], Some(&seed), embed)?;
            assert_eq!(t.forward.bytes(), forward, "{}", t.explain());
            let back = t.backward.bytes() + t.parameters.bytes();
            assert_eq!(back, backward, "{}", t.explain());
        }
        Ok(())
    }

    /// From the stream to the loss: the head's input is gathered where the stream is cut, its
    /// gradient is reduced into the stream's sharding.
    #[test]
    fn a_head_costs_one_reduction_of_its_gradient() -> Result<()> {
        let mesh = mesh("tp=8")?;
        let head = zero(&[WORDS, WIDTH], &mesh, "[@tp, _]")?.require_grad()?;
        let target = Tensor::zeros([TOKENS], DType::I32, &mesh)?;
        for stream in ["[_, _]", "[@tp, _]"] {
            let x = zero(&[TOKENS, WIDTH], &mesh, stream)?.require_grad()?;
            let loss = || {
                let logits = x.linear(&head, None)?;
                logits.cross_entropy(&target, &CrossEntropyOptions::default())
            };
            let t = traffic(&[&x], &[&head], None, loss)?;
            // An all-reduce of the gradient, or a gather of the input and a reduce-scatter.
            let hand = 2 * U + 86_016;
            assert!(t.bytes() <= hand, "{} > {hand}\n{}", t.bytes(), t.explain());
        }
        Ok(())
    }
}

/// Llama-3 70B, all of a layer cut over 8 ranks: two gathers and a reduce-scatter of everything.
#[test]
fn a_fully_sharded_llama_layer_sends_its_parameters_three_times() -> Result<()> {
    let layer = Llama(Sizes {
        width: 8192,
        heads: 64,
        kv_heads: 8,
        d: 128,
        ffn: 28_672,
    });
    let count = |(_, shape): (_, Vec<usize>)| shape.iter().product::<usize>();
    let parameters: usize = layer.shapes().into_iter().map(count).sum();
    assert_eq!(parameters, 855_654_400);
    let layout: &Layout = &[
        ("norm1", "[@dp]"),
        ("wq", "[@dp, _]"),
        ("wk", "[@dp, _]"),
        ("wv", "[@dp, _]"),
        ("wo", "[@dp, _]"),
        ("norm2", "[@dp]"),
        ("gate", "[@dp, _]"),
        ("up", "[@dp, _]"),
        ("down", "[@dp, _]"),
    ];
    let mesh = mesh("dp=8")?;
    let run = |layers| {
        let program = Program {
            layer: &layer,
            layout,
            mesh: &mesh,
            stream: "[@dp, _, _]",
            flow: Flow::Never,
            layers,
            norms: true,
        };
        program.measure(&[8, 4096, 8192], BF16)
    };
    // What the last layers of a stack have gathered may still be at hand where the backward pass
    // begins, so one more layer is what counts.
    let (two, three) = (run(2)?, run(3)?);
    let each = |t: &Traffic| [&t.forward, &t.backward, &t.parameters].map(Ledger::bytes);
    let ([a, b, c], [d, e, f]) = (each(&two), each(&three));
    // In the backward pass parameters are gathered again, and their gradients scattered.
    assert_eq!(
        [d - a, e - b, f - c],
        [1_497_395_200, 2 * 1_497_395_200, 0],
        "{}",
        three.explain()
    );
    assert_eq!(three.bytes() - two.bytes(), 4_492_185_600);
    Ok(())
}

/// Llama-3 405B with long contexts: 131,072 positions over cp=16, 8 key heads of 128 over tp=8.
/// Queries stay, keys and values are gathered. Backward they may be gathered again, and their
/// gradients are reduce-scattered.
#[test]
fn context_parallel_by_gathering_sends_keys_and_values() -> Result<()> {
    let mesh = mesh("cp=16, tp=8")?;
    let make = |heads| zero(&[1, heads, 131_072, 128], &mesh, "[_, @tp, @cp, _]")?.require_grad();
    let (q, k, v) = (make(128)?, make(8)?, make(8)?);
    let seed = q.detach().zeros_like()?;
    let attention = || Ok(q.attention(&k, &v, &AttentionOptions::causal())?.out);
    let t = traffic(&[&q, &k, &v], &[], Some(&seed), attention)?;
    assert_eq!(t.forward.bytes(), 62_914_560, "{}", t.explain());
    assert!(t.backward.bytes() <= 2 * 62_914_560, "{}", t.explain());
    Ok(())
}

/// 131,072 positions of h = 8192 over 8 ranks, 64 heads.
mod ulysses {
    use super::*;

    const LENGTH: usize = 131_072;
    const SIZES: Sizes = Sizes {
        width: 8192,
        heads: 64,
        kv_heads: 64,
        d: 128,
        ffn: 4 * 8192,
    };

    /// Queries, keys and values are turned from cut positions to cut heads, the result is turned
    /// back.
    struct Ulysses;

    impl Layer for Ulysses {
        fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
            let Sizes { width, .. } = SIZES;
            ["wq", "wk", "wv", "wo"]
                .map(|w| (w, vec![width, width]))
                .to_vec()
        }

        fn forward(
            &self,
            p: &Parameters,
            x: &Tensor,
            _: crate::layers::Settle<'_>,
        ) -> Result<Tensor> {
            let [q, k, v] = ["wq", "wk", "wv"].map(|w| {
                heads_of(&x.linear(p.get(w), None)?, SIZES.heads)?.reshard("[_, @cp, _, _]")
            });
            let seen = q?.attention(&k?, &v?, &AttentionOptions::causal())?.out;
            joined(&seen.reshard("[_, _, @cp, _]")?)?.linear(p.get("wo"), None)
        }
    }

    #[test]
    fn turning_costs_a_fraction_of_gathering() -> Result<()> {
        let input = [1, LENGTH, SIZES.width];
        let mesh_cp = mesh("cp=8")?;
        let turned = Program {
            layer: &Ulysses,
            layout: &[],
            mesh: &mesh_cp,
            stream: "[_, @cp, _]",
            flow: Flow::Never,
            layers: 1,
            norms: true,
        };
        let turned = turned.measure(&input, BF16)?;
        assert_eq!(turned.forward.bytes(), 939_524_096, "{}", turned.explain());
        assert_eq!(turned.backward.bytes(), 939_524_096, "{}", turned.explain());

        // Megatron's cut stream gathers and reduce-scatters all positions twice. Run as a program
        // it costs less: at this length it is the weights that are gathered.
        let mesh_tp = mesh("tp=8")?;
        let gather = moved(&zero(&input, &mesh_tp, "[_, @tp, _]")?, "[_, _, _]")?;
        let scatter = moved(&zero(&input, &mesh_tp, "[_, _, _]{sum:tp}")?, "[_, @tp, _]")?;
        assert_eq!(2 * gather + 2 * scatter, 7_516_192_768);
        assert_eq!((2 * gather + 2 * scatter) / turned.forward.bytes(), 8);
        let gathered = Program {
            layer: &Gpt(SIZES),
            layout: MEGATRON,
            mesh: &mesh_tp,
            stream: "[_, @tp, _]",
            flow: Flow::Never,
            layers: 1,
            norms: true,
        };
        let gathered = gathered.measure(&input, BF16)?;
        let bytes = gathered.forward.bytes();
        assert!(bytes <= 7_516_192_768, "{}", gathered.explain());
        Ok(())
    }
}

/// 4096 tokens of each of 64 ranks, 8 experts for each token, evenly: 512 rows for each rank.
#[test]
fn expert_dispatch_sends_each_row_once() -> Result<()> {
    let mesh = mesh("ep=64")?;
    for (dtype, bytes) in [(BF16, 462_422_016), (DType::F8E4M3, 231_211_008)] {
        // By sender, receiver, row.
        let place = (&mesh, "[@ep, _, _, _]");
        let rows = Tensor::zeros([64, 64, 4096 * 8 / 64, 7168], dtype, place)?.require_grad()?;
        let seed = Tensor::zeros(rows.shape().clone(), dtype, (&mesh, "[_, @ep, _, _]"))?;
        let t = traffic(&[&rows], &[], Some(&seed), || {
            rows.reshard("[_, @ep, _, _]")
        })?;
        let each = [t.forward.bytes(), t.backward.bytes()];
        assert_eq!(each, [bytes; 2], "{}", t.explain());
    }
    Ok(())
}

/// From one stage of a pipeline to the next: 8192 tokens of h = 16,384.
#[test]
fn a_pipeline_border_sends_the_stream_or_each_ranks_part() -> Result<()> {
    let all = mesh("pp=2, tp=8")?;
    let (first, second) = (all.at("pp", 0)?, all.at("pp", 1)?);
    for (sharding, bytes) in [("[_, _]", 268_435_456), ("[_, @tp]", 33_554_432)] {
        let x = zero(&[8192, 16_384], &first, sharding)?.require_grad()?;
        let seed = zero(&[8192, 16_384], &second, sharding)?;
        let t = traffic(&[&x], &[], Some(&seed), || x.to_mesh(&second, sharding))?;
        let each = [t.forward.bytes(), t.backward.bytes()];
        assert_eq!(each, [bytes; 2], "{}", t.explain());
    }
    Ok(())
}
