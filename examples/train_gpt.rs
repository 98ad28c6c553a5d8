//! A small GPT learns a text, on one device or on any mesh, and goes on with it.
//!
//! ```sh
//! cargo run --release --features train --example train_gpt                        # this repository's own pages
//! cargo run --release --features train --example train_gpt -- book.txt mesh.axes="dp=2, tp=2"
//! anymesh launch -n 2 -- target/release/examples/train_gpt book.txt run.steps=2000 run.save.folder=runs/book
//! ```
//!
//! Arguments after the text are settings over those below, as `anymesh train --set` takes them.

use anymesh::{
    prelude::*,
    train::{
        Error, Generate, Result, Sampling,
        config::{Prepared, RunConfig, parse},
        data::Tokenizer,
        generate,
        models::Model,
        trainer::{Event, Task},
    },
};
use std::{path::PathBuf, process::ExitCode};

const SETTINGS: &str = r#"
tokenizer = "bytes"
data = []

[model]
model_type = "gpt2"
vocab_size = 257
n_positions = 128
n_embd = 128
n_layer = 4
n_head = 4

[batch]
global = 16
length = 128

[optimizer]
kind = "adamw"
lr = 2e-3
betas = [0.9, 0.95]

[schedule]
kind = "cosine"
warmup = 20
total = 300
min = 0.1

[run]
steps = 300
"#;

fn main() -> ExitCode {
    let cluster = anymesh::init().map_err(Error::from);
    match cluster.and_then(|cluster| cluster.run(train)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn train(cluster: &Cluster) -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let text = match arguments.next() {
        Some(path) => PathBuf::from(path),
        None => own_pages()?,
    };
    let mut settings = vec![format!(
        "data=[{{ path = {:?} }}]",
        text.display().to_string()
    )];
    settings.extend(arguments);
    let config: RunConfig = parse(SETTINGS, &settings)?;
    let mesh = match config.mesh.axes.as_str() {
        "" if cluster.size() == 1 => Mesh::single(&cluster.devices()[0]),
        "" => Mesh::new(&format!("dp={}", cluster.size()), cluster)?,
        axes => Mesh::new(axes, cluster)?,
    };
    let Prepared {
        mut trainer,
        mut feed,
        tokenizer,
        ..
    } = config.prepare(&mesh)?;
    trainer.resume()?;

    let say = |text: String| {
        if mesh.is_first() {
            println!("{text}");
        }
    };
    say(format!(
        "{} parameters on {mesh}",
        trainer.task.model().count()
    ));
    say(format!(
        "before: {:?}",
        sample(&trainer.task.model, &tokenizer)?
    ));
    let mut losses = vec![];
    trainer.run(&mut feed, None, &mut |event| {
        if let Event::Step { report, time } = event {
            losses.push(report.loss);
            if report.step.is_multiple_of(20) {
                let speed = report.count / time.as_secs_f64();
                say(format!(
                    "step {:>4}: loss {:.4}, {speed:.0} tokens/s",
                    report.step, report.loss
                ));
            }
        }
    })?;
    say(plot(&losses, 60, 12));
    say(format!(
        "after: {:?}",
        sample(&trainer.task.model, &tokenizer)?
    ));
    Ok(())
}

/// What the model goes on with after a few letters.
fn sample(model: &Model, tokenizer: &Tokenizer) -> Result<String> {
    let options = Generate {
        max_tokens: 100,
        sampling: Sampling {
            temperature: 0.7,
            seed: 1,
            ..Sampling::default()
        },
        ..Generate::default()
    };
    let prompt = tokenizer.encode("The ")?;
    let texts = generate(model, &[prompt], &options, &mut |_, _| true)?;
    tokenizer.decode(&texts[0].tokens)
}

/// The pages and sources of this repository as one file: real text that is always there.
fn own_pages() -> Result<PathBuf> {
    let mut text = String::new();
    for page in [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "docs/checkpoints.md",
        "docs/programs.md",
        "docs/clusters.md",
    ] {
        text += &std::fs::read_to_string(page).unwrap_or_default();
    }
    let path = std::env::temp_dir().join("anymesh-own-pages.txt");
    std::fs::write(&path, text).map_err(|e| Error::io(&path, "write", &e))?;
    Ok(path)
}

/// A curve as text.
fn plot(values: &[f64], width: usize, height: usize) -> String {
    let means: Vec<f64> = (0..width.min(values.len()))
        .map(|i| {
            let n = width.min(values.len());
            let part = &values[i * values.len() / n..(i + 1) * values.len() / n];
            part.iter().sum::<f64>() / part.len() as f64
        })
        .collect();
    let top = means.iter().copied().fold(f64::MIN, f64::max);
    let bottom = means.iter().copied().fold(f64::MAX, f64::min);
    let row = |value: f64| ((top - value) / (top - bottom).max(1e-9) * (height - 1) as f64).round();
    let mut lines = vec![];
    for line in 0..height {
        let label = top - (top - bottom) * line as f64 / (height - 1) as f64;
        let points: String = means
            .iter()
            .map(|value| {
                if row(*value) as usize == line {
                    '•'
                } else {
                    ' '
                }
            })
            .collect();
        lines.push(format!("{label:7.3} │{points}"));
    }
    lines.push(format!(
        "        └{} {} steps",
        "─".repeat(means.len()),
        values.len()
    ));
    lines.join("\n")
}
