//! Known models, with where their numbers come from, and runs of which times are published.

use crate::{
    Error, Experts, Latent, Layout, Model, Result,
    layout::{Attention, Precision, Recompute},
};

/// A model with what it was trained with.
#[derive(Clone, Debug, PartialEq)]
pub struct Preset {
    /// Its shape.
    pub model: Model,
    /// Tokens of a training sequence.
    pub sequence: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Where the numbers come from.
    pub source: &'static str,
}

const MEGATRON: &str = "arXiv 2205.05198 table 3; vocabulary and positions arXiv 2104.04473 §5";

/// GPT as Megatron trains it: four times as wide inside, biases, dropout, tied ends.
fn gpt(name: &str, [layers, hidden, heads, batch]: [usize; 4]) -> Preset {
    let model = Model {
        name: name.into(),
        layers,
        hidden,
        heads,
        kv_heads: heads,
        head_size: hidden / heads,
        ffn: 4 * hidden,
        gated: false,
        vocabulary: 51_200,
        tied: true,
        positions: 2048,
        biases: true,
        dropout: true,
        experts: None,
        latent: None,
    };
    Preset {
        model,
        sequence: 2048,
        batch,
        source: MEGATRON,
    }
}

/// The llama family: shared keys, gates, rotations, no biases.
fn llama(
    name: &str,
    [layers, hidden, heads, kv_heads, ffn, vocabulary]: [usize; 6],
    tied: bool,
) -> Model {
    Model {
        name: name.into(),
        layers,
        hidden,
        heads,
        kv_heads,
        head_size: hidden / heads,
        ffn,
        gated: true,
        vocabulary,
        tied,
        positions: 0,
        biases: false,
        dropout: false,
        experts: None,
        latent: None,
    }
}

/// All presets.
pub fn presets() -> Vec<Preset> {
    const LLAMA: &str = "arXiv 2407.21783 table 3; the batch of 405B §3.4.1, of the others assumed";
    let llama3 = |name: &str, [layers, hidden, heads, ffn]: [usize; 4], tokens: usize| Preset {
        model: llama(name, [layers, hidden, heads, 8, ffn, 128_256], false),
        sequence: 8192,
        batch: tokens / 8192,
        source: LLAMA,
    };
    let deepseek = Model {
        head_size: 128,
        experts: Some(Experts {
            routed: 256,
            shared: 1,
            top_k: 8,
            width: 2048,
            dense_layers: 3,
            nodes: 4,
        }),
        latent: Some(Latent {
            queries: 1536,
            keys: 512,
            rotated: 64,
            plain: 128,
            values: 128,
        }),
        ..llama("deepseek-v3", [61, 7168, 128, 128, 18_432, 129_280], false)
    };
    vec![
        gpt("gpt-22b", [48, 6144, 64, 4]),
        gpt("gpt-3-175b", [96, 12_288, 96, 64]),
        gpt("mt-nlg-530b", [105, 20_480, 128, 280]),
        gpt("gpt-1t", [128, 25_600, 160, 512]),
        llama3("llama-3-8b", [32, 4096, 32, 14_336], 4 << 20),
        llama3("llama-3-70b", [80, 8192, 64, 28_672], 16 << 20),
        llama3("llama-3-405b", [126, 16_384, 128, 53_248], 16 << 20),
        Preset {
            model: deepseek,
            sequence: 4096,
            batch: 15_360,
            source: "arXiv 2412.19437 §4.2; without the module that predicts a second token",
        },
        Preset {
            model: llama("smollm2-135m", [30, 576, 9, 3, 1536, 49_152], true),
            sequence: 2048,
            batch: 512,
            source: "config.json of HuggingFaceTB/SmolLM2-135M; the batch is assumed",
        },
    ]
}

/// A preset by its name.
pub fn preset(name: &str) -> Result<Preset> {
    let plain = |text: &str| -> String {
        let letters = text.chars().filter(char::is_ascii_alphanumeric);
        letters.collect::<String>().to_lowercase()
    };
    let all = presets();
    let known = all.iter().map(|p| p.model.name.clone()).collect();
    let found = all
        .into_iter()
        .find(|p| plain(&p.model.name) == plain(name));
    found.ok_or_else(|| Error::Unknown {
        what: "model",
        name: name.into(),
        known,
    })
}

/// A run that others made and measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// The preset of its model.
    pub model: &'static str,
    /// The preset of its machine.
    pub machine: &'static str,
    /// GPUs that it is said to have used.
    pub ranks: usize,
    /// How it was laid out.
    pub layout: Layout,
    /// Seconds of a step, where told.
    pub seconds: Option<f64>,
    /// 10¹² operations of a GPU in a second, where told.
    pub teraflops: Option<f64>,
    /// Where it is told.
    pub source: &'static str,
}

/// Runs with published times. The A100's coefficients are fitted to the first eight and two of the
/// H100's to the first and the last of Llama 3 ([`Coefficients`](crate::Coefficients)); the others are
/// what the fit is held against.
pub fn published() -> Vec<Published> {
    let mut runs = vec![];
    let gpt = [
        ("gpt-22b", 8, [1, 1, 4, 1], [1.42, 1.10]),
        ("gpt-3-175b", 64, [8, 3, 1, 1], [18.13, 13.75]),
        ("mt-nlg-530b", 280, [35, 3, 1, 1], [49.05, 37.83]),
        ("gpt-1t", 512, [64, 1, 1, 1], [94.42, 71.49]),
        // The same with eight times the ranks and the batch; only the second was measured.
        ("mt-nlg-530b", 2240, [35, 3, 1, 8], [f64::NAN, 39.15]),
    ];
    let batches = [4, 64, 280, 512, 2240];
    for ((model, ranks, [pp, chunks, micro, dp], seconds), batch) in gpt.into_iter().zip(batches) {
        for (recompute, seconds) in [Recompute::Full, Recompute::Selective]
            .into_iter()
            .zip(seconds)
        {
            let layout = Layout {
                dp,
                tp: 8,
                pp,
                chunks,
                micro,
                sequence: 2048,
                batch,
                recompute,
                sequence_parallel: recompute == Recompute::Selective,
                schedule: if chunks > 1 { "interleaved" } else { "1f1b" }.into(),
                attention: Attention::Plain,
                zero: 0,
                ..Layout::default()
            };
            if seconds.is_finite() {
                runs.push(Published {
                    model,
                    machine: "a100-80",
                    ranks,
                    layout,
                    seconds: Some(seconds),
                    teraflops: None,
                    source: "arXiv 2205.05198 table 5; with dp 8 in its text",
                });
            }
        }
    }
    for (ranks, cp, dp, sequence, each, teraflops) in [
        (8192, 1, 64, 8192, 32, 430.0),
        (16_384, 1, 128, 8192, 16, 400.0),
        (16_384, 16, 8, 131_072, 16, 380.0),
    ] {
        runs.push(Published {
            model: "llama-3-405b",
            machine: "h100",
            ranks,
            layout: Layout {
                dp,
                tp: 8,
                pp: 16,
                cp,
                // 126 layers and two ends are 128 stages.
                chunks: 8,
                schedule: "interleaved".into(),
                sequence,
                batch: dp * each,
                zero: 1,
                ..Layout::default()
            },
            seconds: None,
            teraflops: Some(teraflops),
            source: "arXiv 2407.21783 table 4; the number of chunks is not told there",
        });
    }
    runs.push(Published {
        model: "deepseek-v3",
        machine: "h800",
        ranks: 2048,
        layout: Layout {
            dp: 128,
            pp: 16,
            ep: 64,
            chunks: 2,
            sequence: 4096,
            batch: 15_360,
            schedule: "dualpipev".into(),
            precision: Precision::Fp8,
            ..Layout::default()
        },
        // 180,000 GPU hours for 10^12 tokens, and 15,360 sequences of 4,096 tokens a step.
        seconds: Some(15_360.0 * 4096.0 * 180e3 * 3600.0 / 2048.0 / 1e12),
        teraflops: None,
        source: "arXiv 2412.19437 table 1 and §4.2; it runs DualPipe, which has parameters twice",
    });
    runs
}
