//! What the search finds, and that its prices are those of a run.

use anymesh_core::{DType, cost::CostModel};
use anymesh_layout::{Layout, Llama, Search, pattern_of};

fn llama(width: usize, ffn: usize, heads: usize, layers: usize, length: usize) -> Llama {
    Llama {
        width,
        ffn,
        heads,
        kv_heads: 8,
        head: width / heads,
        layers,
        vocabulary: 128_256,
        length,
        dtype: DType::BF16,
    }
}

fn search<'a>(model: &'a Llama, cost: &'a CostModel, ranks: usize, sequences: usize) -> Search<'a> {
    Search {
        model,
        cost,
        ranks,
        sequences,
        optimizer: 12.0,
    }
}

fn h100() -> CostModel {
    CostModel::preset("h100").expect("a preset")
}

/// One layer of 70B, without embedding and loss.
fn layer_of_70b(length: usize) -> Llama {
    Llama {
        vocabulary: 0,
        ..llama(8192, 28672, 64, 1, length)
    }
}

const MEGATRON: [&str; 7] = [
    "q_proj.weight = [@tp, _]",
    "k_proj.weight = [@tp, _]",
    "v_proj.weight = [@tp, _]",
    "o_proj.weight = [_, @tp]",
    "gate_proj.weight = [@tp, _]",
    "up_proj.weight = [@tp, _]",
    "down_proj.weight = [_, @tp]",
];

#[test]
fn one_node_and_a_70b_layer_give_megatron_with_a_cut_stream() {
    let (model, cost) = (layer_of_70b(4096), h100());
    let search = search(&model, &cost, 8, 1);
    let report = search.run().expect("a report");
    println!("{report}");
    let best = report.best().expect("a layer fits");
    let text = best.layout.to_string();
    assert!(text.starts_with("mesh tp=8\n"), "{report}");
    assert!(text.contains("stream [_, @tp, _]"), "{report}");
    for line in MEGATRON {
        assert!(text.contains(line), "{line}\n{report}");
    }
    // The reason: as many bytes as with a whole stream, but norms and sums run once, not eight times.
    let whole = text.replace("stream [_, @tp, _]", "stream [_, _, _]");
    let whole = search
        .price(&whole.parse().expect("a layout"))
        .expect("a price");
    let u = 58_720_256.0;
    // Beside the stream the gradients of two norms cross.
    let norms = 2.0 * 8192.0 * 2.0 * 2.0 * 7.0 / 8.0;
    assert_eq!(whole.price.received.tp, 8.0 * u + norms);
    assert_eq!(best.price.received.tp, 8.0 * u + norms);
    assert!(whole.compute > 1.05 * best.compute, "{report}");
    // And the second product of each pair cut by its outputs would have its operands gathered.
    let other = text.replace("weight = [_, @tp]", "weight = [@tp, _]");
    let other = search
        .price(&other.parse().expect("a layout"))
        .expect("a price");
    assert!(other.seconds > 1.05 * best.seconds, "{report}");
}

#[test]
fn with_more_sequences_the_layer_stays_cut_so_over_fewer_ranks() {
    let (model, cost) = (layer_of_70b(1024), h100());
    let report = search(&model, &cost, 8, 8).run().expect("a report");
    let best = report.best().expect("a layer fits");
    let (tp, text) = (best.layout.size("tp"), best.layout.to_string());
    assert!(
        tp > 1 && tp < 8 && text.contains("stream [@dp, @tp, _]"),
        "{report}"
    );
    for line in MEGATRON {
        assert!(text.contains(line), "{line}\n{report}");
    }
    // All eight ranks as data-parallel ones: weights do not come as fast as they are used.
    let sharded = report
        .candidates
        .iter()
        .find(|c| c.layout.size("fsdp") == 8);
    let sharded = sharded.expect("a candidate");
    assert!(sharded.exposed > 0.5 * sharded.compute, "{report}");
    assert!(report.why(sharded).contains("slower"), "{report}");
}

#[test]
fn many_nodes_and_a_large_batch_give_fully_sharded() {
    let (model, cost) = (llama(4096, 14336, 32, 32, 8192), h100());
    let search = search(&model, &cost, 64, 512);
    let report = search.run().expect("a report");
    println!("{report}");
    let best = report.best().expect("8B fits on 64 ranks");
    assert_eq!(best.layout.size("tp"), 1, "{report}");
    assert!(best.layout.size("fsdp") > 1, "{report}");
    for (_, sharding) in &best.layout.parameters {
        assert!(sharding.to_string().contains("@fsdp"), "{report}");
    }
    // Whole on every rank it does not fit: 16 bytes for each of 8 billion.
    let whole = report.candidates.iter().find(|c| c.layout.size("dp") == 64);
    let whole = whole.expect("a candidate");
    assert!(!whole.fits && whole.state > 128e9, "{report}");
    assert!(report.why(whole).contains("of 80.0 GB"), "{report}");
}

#[test]
fn the_closed_form_is_what_the_model_sends() {
    let cost = h100();
    // Many tokens, so that weights are what is gathered, and few layers.
    let model = Llama {
        vocabulary: 4096,
        ..llama(1024, 4096, 16, 2, 8192)
    };
    let search = search(&model, &cost, 8, 8);
    let report = search.run().expect("a report");
    let mut wrong = String::new();
    let kinds = report.of_each_kind();
    assert!(kinds.len() > 10);
    for candidate in kinds {
        if candidate.layout.recompute {
            continue;
        }
        let check = search.verify(candidate).expect("a run");
        if check.ratio() > 1.001 {
            wrong += &format!("{}{check}{}\n\n", candidate.layout, check.run.ledger);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn axes_must_make_the_ranks() {
    let layout = |text: &str| text.parse::<Layout>().expect("a layout");
    // Llama 3 405B, table 4: the last row of the first version says dp=4.
    let rows = [
        ("mesh tp=8, cp=1, pp=16, dp=64", 8192, true),
        ("mesh tp=8, cp=1, pp=16, dp=128", 16384, true),
        ("mesh tp=8, cp=16, pp=16, dp=8", 16384, true),
        ("mesh tp=8, cp=16, pp=16, dp=4", 16384, false),
    ];
    for (text, ranks, right) in rows {
        let checked = layout(text).check(ranks);
        assert_eq!(checked.is_ok(), right, "{text}: {checked:?}");
    }
    let error = layout(rows[3].0)
        .check(16384)
        .expect_err("dp=4")
        .to_string();
    assert_eq!(
        error,
        "mesh: the axes make 8 * 16 * 16 * 4 = 8192 ranks, there are 16384"
    );
}

#[test]
fn layouts_read_back_and_name_the_line_of_a_mistake() {
    let (model, cost) = (llama(4096, 14336, 32, 2, 4096), h100());
    for candidate in search(&model, &cost, 16, 32)
        .run()
        .expect("a report")
        .candidates
    {
        let text = candidate.layout.to_string();
        assert_eq!(text.parse::<Layout>(), Ok(candidate.layout), "{text}");
    }
    for (text, expected) in [
        (
            "mesh tp",
            "'line 1: mesh tp' as a layout: expected axes with sizes",
        ),
        ("mesh tp=0", "expected axes with sizes"),
        (
            "\nrecompute maybe",
            "'line 2: recompute maybe' as a layout: expected yes or no",
        ),
        ("microbatches 0", "expected a number above 0"),
        (
            "w = tp",
            "'line 1: w = tp' as a layout: expected a sharding",
        ),
        (
            "w = [_]\nw = [_]",
            "'line 2: w = [_]' as a layout: expected w once",
        ),
        (
            "steam [_]",
            "expected mesh, microbatches, recompute, stream",
        ),
    ] {
        let error = text.parse::<Layout>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}\n{error}");
    }
    let layout: Layout = "a.*.b* = [@x]".parse().expect("a layout");
    let of = |name: &str| layout.sharding_of(name, 1).to_string();
    assert_eq!(
        [of("a.17.b2"), of("a.1.c.b"), of("a..b")],
        ["[@x]", "[_]", "[@x]"]
    );
    assert_eq!(
        pattern_of("model.layers.17.mlp.w1"),
        "model.layers.*.mlp.w1"
    );
}
