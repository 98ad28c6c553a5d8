//! What cannot be is refused, with the nearest that can.

use anymesh_simulate::{Case, Layout, Model, estimate, machine, preset};
use serde_json::json;

fn refused(layout: Layout, ranks: usize, model: &str, text: &str) {
    let model = preset(model).unwrap().model;
    let error = layout.check(&model, ranks).unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
    assert!(
        layout.ranks() != Some(ranks)
            || estimate(&model, &machine("h100").unwrap(), &layout).is_err()
    );
}

#[test]
fn numbers_that_do_not_go_together() {
    let base = Layout::default();
    refused(
        Layout {
            dp: 3,
            tp: 2,
            ..base.clone()
        },
        8,
        "llama-3-8b",
        "is 6 ranks, not 8: dp 4 would do",
    );
    refused(
        Layout {
            tp: 3,
            ..base.clone()
        },
        8,
        "llama-3-8b",
        "near are tp 8",
    );
    refused(
        Layout {
            tp: 12,
            ..base.clone()
        },
        12,
        "llama-3-8b",
        "32 heads do not divide by tp 12: 8 or 16 would do",
    );
    refused(
        Layout {
            tp: 9,
            ..base.clone()
        },
        9,
        "smollm2-135m",
        "columns of the feed-forward block do not divide by tp 9",
    );
    refused(
        Layout {
            dp: 4,
            batch: 6,
            ..base.clone()
        },
        4,
        "llama-3-8b",
        "4 or 8 would do",
    );
    refused(
        Layout {
            dp: 4,
            batch: 2,
            ..base.clone()
        },
        4,
        "llama-3-8b",
        "= 4: 4 would do",
    );
    refused(
        Layout {
            dp: 8,
            batch: 8,
            ep: 3,
            ..base.clone()
        },
        8,
        "deepseek-v3",
        "8 ranks of dp * cp do not divide by ep 3: 2 or 4 would do",
    );
    refused(
        Layout {
            ep: 2,
            dp: 2,
            batch: 2,
            ..base.clone()
        },
        2,
        "llama-3-8b",
        "has no experts: ep 1 would do",
    );
    refused(
        Layout {
            pp: 64,
            ..base.clone()
        },
        64,
        "llama-3-8b",
        "32 layers make at most 34",
    );
    refused(
        Layout {
            cp: 3,
            ..base.clone()
        },
        3,
        "llama-3-8b",
        "do not divide by 2 cp = 6: 4 or 8 would do",
    );
    refused(
        Layout {
            zero: 4,
            ..base.clone()
        },
        1,
        "llama-3-8b",
        "it is 0, 1, 2 or 3",
    );
    refused(
        Layout {
            micro: 0,
            ..base.clone()
        },
        1,
        "llama-3-8b",
        "micro is 0",
    );
    refused(
        Layout {
            gradient_bytes: 3,
            ..base.clone()
        },
        1,
        "llama-3-8b",
        "it is 2 or 4",
    );
    refused(
        Layout {
            schedule: "1f1d".into(),
            ..base.clone()
        },
        1,
        "llama-3-8b",
        "interleaved",
    );
    let big = 1 << 24;
    refused(
        Layout {
            dp: big,
            tp: big,
            pp: big,
            cp: big,
            ..base.clone()
        },
        8,
        "llama-3-8b",
        "too many",
    );
    refused(Layout::default(), 0, "llama-3-8b", "ranks is 0");
    // The schedule's own refusal, which only an estimate meets.
    let model = preset("llama-3-8b").unwrap().model;
    let layout = Layout {
        pp: 2,
        chunks: 2,
        ..base
    };
    let error = estimate(&model, &machine("h100").unwrap(), &layout)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1f1b does not go with 2 stages on each rank"),
        "{error}"
    );
}

#[test]
fn models_and_machines_that_cannot_be() {
    let model = preset("llama-3-8b").unwrap().model;
    let own = machine("h100-80G").unwrap_err().to_string();
    assert!(own.contains("a100-80, h100"), "{own}");
    assert_eq!(machine("A100-80G").unwrap().name, "a100-80");
    let none = Model {
        kv_heads: 5,
        ..model.clone()
    };
    assert!(estimate(&none, &machine("h100").unwrap(), &Layout::default()).is_err());
    for field in [
        "machine.bandwidth=0",
        "machine.bf16=-1",
        "machine.coefficients.products=1.5",
        "machine.node=0",
    ] {
        let case = Case::new(json!({"model": "llama-3-8b"}), &[field.into()]).unwrap();
        let error = estimate(&case.model, &case.machine, &case.layout)
            .unwrap_err()
            .to_string();
        assert!(error.contains("the machine's"), "{error}");
    }
}

#[test]
fn files_and_settings_with_faults() {
    for (file, sets, text) in [
        (json!({}), vec![], "model: it is missing"),
        (json!([]), vec![], "expected model"),
        (
            json!({"model": "llama-3-8b", "modle": 1}),
            vec![],
            "there is no setting \"modle\"",
        ),
        (json!({"model": "llama-9"}), vec![], "there is no model"),
        (
            json!({"model": "llama-3-8b"}),
            vec!["tp"],
            "expected a setting such as",
        ),
        (json!({"model": "llama-3-8b"}), vec!["tp=many"], "layout"),
        (
            json!({"model": "llama-3-8b"}),
            vec!["tpp=8"],
            "unknown field `tpp`",
        ),
        (
            json!({"model": "llama-3-8b"}),
            vec!["model.layer=8"],
            "unknown field `layer`",
        ),
        (
            json!({"model": "llama-3-8b"}),
            vec!["..=8"],
            "expected a setting such as",
        ),
        (json!({"model": {"layers": 2}}), vec![], "missing field"),
        (
            json!({"model": "llama-3-8b", "layout": 3}),
            vec![],
            "layout",
        ),
        (json!({"model": "llama-3-8b", "ranks": -1}), vec![], "ranks"),
    ] {
        let sets: Vec<String> = sets.into_iter().map(String::from).collect();
        let error = Case::new(file.clone(), &sets).unwrap_err().to_string();
        assert!(error.contains(text), "{file} {sets:?}: {error}");
    }
}
