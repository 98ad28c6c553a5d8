//! Numbers that others published, to the byte.

use anymesh_simulate::{
    Attention, Error, Estimate, Layout, Recompute, bytes, estimate, kept, machine, preset, presets,
    published, state,
};

const GIB: f64 = (1u64 << 30) as f64;

/// The run of a model that table 5 of arXiv 2205.05198 has.
fn run(model: &str, recompute: Recompute) -> (Layout, f64) {
    let all = published().into_iter();
    let mut all =
        all.filter(|r| r.model == model && r.layout.recompute == recompute && r.layout.dp == 1);
    let found = all.next().expect("it is published");
    (found.layout, found.seconds.expect("it has a time"))
}

fn step(model: &str, layout: &Layout) -> Estimate {
    let model = preset(model).expect("it is a preset").model;
    estimate(&model, &machine("a100-80").expect("it is one"), layout).expect("it can be")
}

#[test]
fn collectives_of_a_layer_have_the_bytes_of_their_formulas() {
    // T=4096, h=8192, t=8, bf16.
    let u = bytes::gather(4096.0 * 8192.0 * 2.0, 8);
    assert_eq!(u, 58_720_256.0);
    assert_eq!(bytes::tensor_layer(u, false, false), 469_762_048.0);
    assert_eq!(bytes::tensor_layer(u, true, false), 587_202_560.0);
    assert_eq!(bytes::tensor_layer(u, false, true), 12.0 * u);
    assert_eq!(bytes::cross_entropy(4096.0, 8), 86_016.0);
    // What gathering the logits would cost.
    assert_eq!(bytes::gather(4096.0 * 128_256.0 * 2.0, 8), 919_339_008.0);
    let layer = preset("llama-3-70b").unwrap().model.weights(0).all();
    assert_eq!(layer, 855_654_400.0);
    assert_eq!(bytes::gather(layer * 2.0, 8), 1_497_395_200.0);
    assert_eq!(bytes::sharded_layer(layer, 2.0, 2.0, 8), 4_492_185_600.0);
    // 405B, 131,072 tokens, 8 kv heads of 128 over 8 tensor parallel ranks.
    assert_eq!(
        bytes::context_gather(131_072.0, 2.0 * 128.0, 2.0, 16),
        62_914_560.0
    );
    let heads = bytes::context_heads(131_072.0, 8192.0, 2.0 * 8192.0, 2.0, 8);
    assert_eq!(heads, 939_524_096.0);
    let stream = 4.0 * bytes::gather(131_072.0 * 8192.0 * 2.0, 8);
    assert_eq!((stream, stream / heads), (7_516_192_768.0, 8.0));
    assert_eq!(bytes::dispatch(4096.0, 8, 7168.0, 2.0, 64), 462_422_016.0);
    assert_eq!(bytes::dispatch(4096.0, 8, 7168.0, 1.0, 64), 231_211_008.0);
    assert_eq!(bytes::border(8192.0, 16_384.0, 2.0, 1), 268_435_456.0);
    assert_eq!(bytes::border(8192.0, 16_384.0, 2.0, 8), 33_554_432.0);
}

#[test]
fn an_estimate_receives_the_bytes_of_the_formulas() {
    let model = preset("llama-3-70b").unwrap().model;
    let machine = machine("h100").unwrap();
    let layout = Layout {
        tp: 8,
        sequence: 4096,
        ..Layout::default()
    };
    let u = 58_720_256.0;
    let bytes = estimate(&model, &machine, &layout).unwrap().bytes;
    // 80 layers with gathers once more, two units for the embedding, three for the head, the loss.
    assert_eq!(bytes.tp, 80.0 * 587_202_560.0 + 5.0 * u + 86_016.0);
    assert_eq!(
        (bytes.cp, bytes.dp, bytes.pp, bytes.ep),
        (0.0, 0.0, 0.0, 0.0)
    );
    // Eight data parallel ranks instead, ZeRO 3 with gradients of 2 bytes: three times all parameters.
    let layout = Layout {
        dp: 8,
        zero: 3,
        sequence: 4096,
        batch: 8,
        gradient_bytes: 2,
        ..Layout::default()
    };
    let bytes = estimate(&model, &machine, &layout).unwrap().bytes;
    assert_eq!(bytes.dp, 3.0 * 2.0 * model.parameters() * 7.0 / 8.0);
    // A pipeline: a rank in the middle receives from both sides.
    let layout = Layout {
        pp: 4,
        batch: 16,
        sequence: 8192,
        ..Layout::default()
    };
    let bytes = estimate(&model, &machine, &layout).unwrap().bytes;
    assert_eq!(bytes.pp, 2.0 * 16.0 * 8192.0 * 8192.0 * 2.0);
    // 405B at 131,072 tokens: keys and values once forward and twice backward, in 8 layers of a rank.
    let model = preset("llama-3-405b").unwrap().model;
    let long = published().into_iter().find(|r| r.layout.cp == 16).unwrap();
    let bytes = estimate(&model, &machine, &long.layout).unwrap().bytes;
    assert_eq!(bytes.cp, 3.0 * 62_914_560.0 * 8.0 * 16.0);
}

#[test]
fn activations_of_the_first_stage_are_those_of_the_paper() {
    for (model, none, selective) in [
        ("gpt-22b", 59.25, 9.5625),
        ("gpt-3-175b", 66.84375, 12.3515625),
        ("mt-nlg-530b", 114.0234375, 23.076171875),
        ("gpt-1t", 131.25, 26.5625),
    ] {
        let (layout, _) = run(model, Recompute::Selective);
        let held = step(model, &layout).memory[0].activations / GIB;
        assert!(
            (held - selective).abs() < 1e-9,
            "{model}: {held} {selective}"
        );
        let layout = Layout {
            recompute: Recompute::None,
            sequence_parallel: false,
            ..layout
        };
        let held = step(model, &layout).memory[0].activations / GIB;
        assert!((held - none).abs() < 1e-9, "{model}: {held} {none}");
    }
}

#[test]
fn parameters_and_optimizer_are_those_of_the_paper() {
    for (model, gpus, gib) in [
        ("gpt-22b", 8.0, 45.5625),
        ("gpt-3-175b", 64.0, 45.5625),
        ("mt-nlg-530b", 280.0, 31.640625),
        ("gpt-1t", 512.0, 32.958984375),
    ] {
        // The paper counts the matrices of layers, 12 L h²; biases, norms and ends are 1 to 2 % more.
        let shape = preset(model).unwrap().model;
        let matrices = 12.0 * shape.layers as f64 * (shape.hidden as f64).powi(2);
        let bytes: f64 = state(matrices, 0, 1, 4).iter().sum();
        assert_eq!(bytes / gpus / GIB, gib, "{model}");
        let (layout, _) = run(model, Recompute::Full);
        let step = step(model, &layout);
        let all: f64 = step
            .memory
            .iter()
            .map(|m| m.parameters + m.gradients + m.optimizer)
            .sum();
        let ranks = layout.pp as f64;
        let ratio = all / ranks / GIB / gib;
        assert!((1.0..1.03).contains(&ratio), "{model}: {ratio}");
    }
}

#[test]
fn table_two_of_the_paper_row_by_row() {
    let model = preset("gpt-22b").unwrap().model;
    let (s, b, h, a, t) = (2048.0, 4.0, 6144.0, 64.0, 8.0);
    let held = |tp, sequence_parallel, recompute| {
        let layout = Layout {
            tp,
            micro: 4,
            sequence_parallel,
            recompute,
            attention: Attention::Plain,
            ..Layout::default()
        };
        kept(&model, &layout, 0).kept / (s * b * h)
    };
    let square = 5.0 * a * s / h;
    for (got, table) in [
        (held(1, false, Recompute::None), 34.0 + square),
        (
            held(8, false, Recompute::None),
            10.0 + 24.0 / t + square / t,
        ),
        (held(8, true, Recompute::None), 34.0 / t + square / t),
        (held(8, false, Recompute::Selective), 10.0 + 24.0 / t),
        (held(8, true, Recompute::Selective), 34.0 / t),
        (held(8, false, Recompute::Full), 2.0),
        (held(8, true, Recompute::Full), 2.0 / t),
    ] {
        assert!((got - table).abs() < 1e-12 * table, "{got} {table}");
    }
}

#[test]
fn zero_divides_memory_as_its_paper_says() {
    let gb = |zero, gradient| {
        let bytes: f64 = state(7.5e9, zero, 64, gradient).iter().sum();
        (bytes / 1e8).round() / 10.0
    };
    assert_eq!(
        [gb(0, 2), gb(1, 2), gb(2, 2), gb(3, 2)],
        [120.0, 31.4, 16.6, 1.9]
    );
    // Megatron sums gradients in f32: 18 bytes, 6 + 12/d with its distributed optimizer.
    let bytes: f64 = state(1.0, 1, 64, 4).iter().sum();
    assert_eq!(bytes, 6.0 + 12.0 / 64.0);
}

#[test]
fn the_layouts_of_405b_make_their_gpus_and_the_misprinted_one_does_not() {
    let model = preset("llama-3-405b").unwrap().model;
    let rows: Vec<_> = published()
        .into_iter()
        .filter(|r| r.model == model.name)
        .collect();
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert_eq!(row.layout.ranks(), Some(row.ranks));
        assert_eq!(row.layout.batch * row.layout.sequence, 16_777_216);
        let plan = row.layout.check(&model, row.ranks).unwrap();
        assert_eq!(plan.micros, row.layout.batch / row.layout.dp);
        // The ends have no layers beside them.
        assert_eq!((plan.split[0], plan.split[127], plan.split[64]), (0, 0, 1));
    }
    let wrong = Layout {
        dp: 4,
        batch: 64,
        ..rows[2].layout.clone()
    };
    let error = wrong.check(&model, 16_384).unwrap_err();
    assert!(matches!(error, Error::Product { .. }), "{error}");
    let text = "dp 4 * tp 8 * pp 16 * cp 16 is 8192 ranks, not 16384: dp 8 would do";
    assert_eq!(error.to_string(), text);
}

#[test]
fn presets_have_the_parameters_that_were_published() {
    let exact = [
        ("llama-3-8b", 8_030_261_248.0),
        ("llama-3-70b", 70_553_706_496.0),
        ("llama-3-405b", 405_853_388_800.0),
        ("smollm2-135m", 134_515_008.0),
    ];
    for (name, parameters) in exact {
        assert_eq!(
            preset(name).unwrap().model.parameters(),
            parameters,
            "{name}"
        );
    }
    // In 10⁹, as papers print them.
    let rounded = [
        ("gpt-22b", 22.0, 0.1),
        ("gpt-3-175b", 174.6, 0.05),
        ("mt-nlg-530b", 529.6, 0.05),
        ("gpt-1t", 1008.0, 0.05),
        ("deepseek-v3", 671.0, 0.05),
    ];
    for (name, billions, near) in rounded {
        let got = preset(name).unwrap().model.parameters() / 1e9;
        assert!((got - billions).abs() < near, "{name}: {got}");
    }
    let active = preset("DeepSeek V3").unwrap().model.active() / 1e9;
    assert!((36.5..38.0).contains(&active), "{active}");
    assert_eq!(exact.len() + rounded.len(), presets().len());
    let error = preset("llama-3-9b").unwrap_err().to_string();
    assert!(error.contains("llama-3-8b"), "{error}");
}

#[test]
fn operations_are_those_of_appendix_a() {
    for (model, mfu) in [
        ("gpt-22b", 41.7),
        ("gpt-3-175b", 51.4),
        ("mt-nlg-530b", 56.0),
        ("gpt-1t", 56.3),
    ] {
        let shape = preset(model).unwrap().model;
        let (layout, seconds) = run(model, Recompute::Selective);
        let [b, l, s] = [layout.batch, shape.layers, layout.sequence].map(|n| n as f64);
        let (h, v) = (shape.hidden as f64, shape.vocabulary as f64);
        let table = 72.0 * b * l * s * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * h * l));
        let flops = step(model, &layout).model_flops;
        assert!(
            (flops / table - 1.0).abs() < 1e-12,
            "{model}: {flops} {table}"
        );
        let gpus = layout.ranks().unwrap() as f64;
        let got = flops / (seconds * gpus * 312e12) * 100.0;
        assert_eq!((got * 10.0).round() / 10.0, mfu, "{model}");
    }
}
