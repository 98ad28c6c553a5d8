//! Whole runs from a configuration.

use anymesh_core::Mesh;
use anymesh_train::{
    Error, Result,
    config::{RunConfig, parse},
};
use std::path::PathBuf;

/// A text in a folder of its own.
fn corpus(name: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("anymesh-context-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let text: String = (0..400)
        .map(|i| format!("Line {i} of {} about any mesh.\n", i * i % 97))
        .collect();
    std::fs::write(folder.join("corpus.txt"), text).expect("a file");
    folder
}

fn config(folder: &std::path::Path, settings: &[&str]) -> Result<RunConfig> {
    let path = folder.join("corpus.txt");
    let saved = folder.join("run");
    let text = format!(
        r#"
        data = [{{ path = {path:?} }}]
        evaluation = [{{ path = {path:?} }}]
        [run]
        steps = 3
        [run.save]
        folder = {saved:?}
        [model]
        model_type = "llama"
        vocab_size = 260
        hidden_size = 16
        intermediate_size = 24
        num_hidden_layers = 2
        num_attention_heads = 4
        num_key_value_heads = 2
        [mesh]
        dtype = "f64"
        [batch]
        global = 4
        accumulation = 2
        length = 32
        mix_documents = false
        "#
    );
    parse(&text, settings)
}

/// Losses of three steps and of an evaluation.
fn losses(axes: &str, config: &RunConfig) -> Result<Vec<f64>> {
    let cpu = anymesh_backend_cpu::device();
    let mesh = match axes {
        "" => Mesh::single(&cpu),
        axes => Mesh::new(axes, &cpu)?,
    };
    let mut prepared = config.prepare(&mesh)?;
    let mut losses = vec![];
    for _ in 0..3 {
        let report = prepared.trainer.step(&mut prepared.feed)?.expect("data");
        losses.extend([report.loss, report.norm]);
    }
    let evaluation = prepared.evaluation.as_mut().expect("data to evaluate on");
    losses.push(prepared.trainer.evaluate(evaluation)?);
    Ok(losses)
}

#[test]
fn a_run_whose_sequences_are_cut_is_the_run_of_one_device() -> Result<()> {
    let folder = corpus("parity");
    let alone = losses("", &config(&folder, &[])?)?;
    for (axes, settings) in [
        ("cp=2", vec![]),
        ("cp=4", vec!["context.attention=ring"]),
        (
            "cp=4",
            vec!["context.attention=gather", "context.balance=false"],
        ),
        (
            "dp=2, cp=2",
            vec!["context.attention=heads", "context.balance=true"],
        ),
        (
            "pp=2, cp=2",
            vec!["context.attention=ring", "mesh.recompute=true"],
        ),
        (
            "cp=2, tp=2",
            vec!["mesh.sequence_parallel=true", "mesh.zero=1"],
        ),
    ] {
        let there = losses(axes, &config(&folder, &settings)?)?;
        for (a, b) in alone.iter().zip(&there) {
            let apart = ((a - b) / a).abs();
            assert!(
                apart <= 1e-12,
                "{axes} {settings:?}: {there:?}, alone {alone:?}"
            );
        }
    }
    std::fs::remove_dir_all(&folder).ok();
    Ok(())
}

#[test]
fn what_a_configuration_has_wrong_is_found_before_the_first_step() -> Result<()> {
    let folder = corpus("wrong");
    let said = |axes: &str, settings: &[&str]| -> Result<String> {
        let cpu = anymesh_backend_cpu::device();
        let found = config(&folder, settings)?.prepare(&Mesh::new(axes, &cpu)?);
        let Err(Error::Config { key, .. }) = found else {
            panic!("{settings:?} on {axes} was taken");
        };
        Ok(key)
    };
    assert_eq!(
        said("cp=4", &["context.attention=heads"])?,
        "context.attention"
    );
    let uneven = ["batch.length=30", "context.balance=true"];
    assert_eq!(said("cp=4", &uneven)?, "context.balance");
    let dropout = ["context.attention=ring", "model.attention_dropout=0.1"];
    assert_eq!(said("cp=2", &dropout)?, "context.attention");
    assert!(config(&folder, &["context.attention=rings"]).is_err());
    assert!(config(&folder, &["context.pairs=true"]).is_err());
    std::fs::remove_dir_all(&folder).ok();
    Ok(())
}
