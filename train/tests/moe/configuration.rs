//! Mixtures of experts from configurations, and settings that cannot be.

use crate::support::{Scratch, mesh};
use anymesh_train::{
    Result,
    config::{RunConfig, parse},
    models::ModelConfig,
};
use serde_json::{Value, json};

#[test]
fn a_run_of_a_configuration_has_experts() -> Result<()> {
    let scratch = Scratch::new("configuration");
    std::fs::create_dir_all(&scratch.0).expect("a folder");
    let text = scratch.0.join("corpus.txt");
    std::fs::write(&text, "the cat sat on the mat. ".repeat(200)).expect("written");
    let toml = format!(
        r#"
        data = [{{ path = "{}" }}]
        [run.save]
        folder = "{}"
        [batch]
        micro = 1
        length = 16
        [model]
        model_type = "qwen3_moe"
        vocab_size = 300
        hidden_size = 16
        num_hidden_layers = 2
        num_attention_heads = 2
        num_key_value_heads = 1
        num_experts = 4
        num_experts_per_tok = 2
        moe_intermediate_size = 8
        router_bias_update_rate = 0.01
        "#,
        text.display(),
        scratch.0.join("run").display()
    );
    let config: RunConfig = parse(&toml, &["mesh.zero=1"])?;
    let mut prepared = config.prepare(&mesh("dp=2, ep=2")?)?;
    assert_eq!(
        prepared.batch.global, 4,
        "a sequence for each rank of dp and ep"
    );
    let mut losses = vec![];
    for _ in 0..3 {
        let report = prepared.trainer.step(&mut prepared.feed)?.expect("data");
        let names: Vec<&str> = report.more.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["expert_load", "expert_drops"]);
        assert_eq!(report.more[1].1, 0.0, "all that come are taken");
        losses.push(report.loss);
    }
    assert!(losses[2] < losses[0], "{losses:?}");
    Ok(())
}

#[test]
fn settings_that_cannot_be_are_named() {
    let base = json!({
        "model_type": "mixtral", "hidden_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 8, "num_local_experts": 4,
    });
    let config = |changes: &[(&str, Value)]| {
        let mut settings = base.as_object().expect("settings").clone();
        for (key, value) in changes {
            settings.insert((*key).into(), value.clone());
        }
        (
            ModelConfig::try_from(settings.clone()).map_err(|e| e.to_string()),
            ModelConfig::from_settings(&settings).map_err(|e| e.to_string()),
        )
    };
    let (strict, loose) = config(&[]);
    let Ok(ModelConfig::Moe(found)) = &strict else {
        panic!("{strict:?}")
    };
    assert_eq!((found.num_experts, found.moe_intermediate_size), (4, 8));
    assert_eq!(strict, loose);
    let wrong = [
        ("num_experts_per_tok", json!(5)),
        ("num_experts_per_tok", json!(0)),
        ("scoring_func", json!("tanh")),
        ("n_group", json!(3)),
        ("expert_capacity_factor", json!(0.0)),
        ("router_aux_loss_coef", json!(-1.0)),
        ("mlp_only_layers", json!([99])),
        ("decoder_sparse_step", json!(0)),
        ("moe_intermediate_size", json!(0)),
        ("hidden_act", json!("gelu")),
        ("num_key_value_heads", json!(3)),
    ];
    for (key, value) in wrong {
        let (strict, loose) = config(&[(key, value)]);
        for error in [strict, loose].map(|e| e.expect_err("it cannot be")) {
            assert!(error.starts_with(&format!("{key}: ")), "{key}: {error}");
        }
    }
    let (strict, loose) = config(&[("experts", json!(4))]);
    assert!(strict.expect_err("unknown").starts_with("experts: "));
    assert!(loose.is_ok(), "files say more than is needed");
    let (_, jitter) = config(&[("router_jitter_noise", json!(0.1))]);
    let jitter = jitter.expect_err("noise");
    assert!(jitter.starts_with("router_jitter_noise: "), "{jitter}");
}

#[test]
fn settings_come_back_as_they_were_written() -> Result<()> {
    for config in [crate::support::mixtral(), crate::support::deep()] {
        let settings = ModelConfig::Moe(config.clone()).to_settings()?;
        // As many heads of keys as of queries: said, because files mean another number without it.
        assert_eq!(settings["num_key_value_heads"], json!(2));
        let mut config = config;
        config.llama.num_key_value_heads = Some(2);
        let config = ModelConfig::Moe(config);
        assert_eq!(ModelConfig::from_settings(&settings)?, config);
        assert_eq!(ModelConfig::try_from(settings)?, config);
    }
    Ok(())
}
