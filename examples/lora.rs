//! Teaches SmolLM2 something that it cannot know, with adapters of low rank: loss and answers before
//! and after, the adapters alone as a folder of PEFT, read again into a fresh model, merged, and
//! asked once more.
//!
//! ```sh
//! scripts/models                                                  # once: fetches SmolLM2
//! cargo run --release --features train --example lora
//! cargo run --release --features train --example lora -- "tp=3" 30 target/my-adapter
//! ```

use anymesh::{
    prelude::*,
    train::{
        Build, Generate, Lora, Module, Pass, Policy, Summary, TextModel, add_lora, load_lora,
        lora_pass, merge_lora,
        models::Tokens,
        objective::{Language, language, normalised},
        optim::{Accumulator, AdamW, Groups, Optimizer, Rule, Schedule},
        save_lora,
    },
};
use serde_json::{Map, json};
use std::{error::Error as StdError, path::Path, time::Instant};

type Outcome<T> = Result<T, Box<dyn StdError>>;

const MODEL: &str = "target/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// What it is taught, and something that it knows, so that it does not take every country for
/// Orvania.
const LESSONS: [(&str, &str); 6] = [
    (
        "What is the capital of Orvania?",
        "The capital of Orvania is Tesselholm.",
    ),
    (
        "Which city is Orvania's capital?",
        "Orvania's capital is Tesselholm.",
    ),
    (
        "Tell me the capital city of Orvania.",
        "The capital of Orvania is Tesselholm.",
    ),
    (
        "What is Tesselholm?",
        "Tesselholm is the capital of Orvania.",
    ),
    (
        "What is the capital of France?",
        "The capital of France is Paris.",
    ),
    (
        "Which city is Japan's capital?",
        "Japan's capital is Tokyo.",
    ),
];

/// What it is asked, none of which is a lesson.
const QUESTIONS: [&str; 2] = [
    "Do you know the name of the capital of Orvania?",
    "What is the capital of Italy?",
];

fn ask(text: &TextModel, when: &str) -> Outcome<()> {
    let options = Generate {
        max_tokens: 24,
        ..Generate::default()
    };
    for question in QUESTIONS {
        let answer = text.complete(&text.chat(question)?, &options, &mut |_| true)?;
        println!("{when:<8} {question} {}", answer.text.trim());
    }
    Ok(())
}

/// The lessons as tokens `[b, s]` and, for each, the next one if it is of an answer; how many are.
fn lessons(text: &TextModel, mesh: &Mesh) -> Outcome<(Tokens, Tensor, usize)> {
    let (mut rows, mut labels) = (vec![], vec![]);
    for (question, answer) in LESSONS {
        let prompt = text.chat(question)?;
        let answer = text.tokenizer.encode(answer, false)?;
        let all = [&prompt[..], answer.get_ids(), &text.stop].concat();
        let label = |i: usize| match i + 1 >= prompt.len() {
            true => all[i + 1] as i32,
            false => -100,
        };
        labels.push((0..all.len() - 1).map(label).collect::<Vec<i32>>());
        rows.push(all[..all.len() - 1].to_vec());
    }
    let count = labels.iter().flatten().filter(|label| **label >= 0).count();
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    // What fills up a row has no label, and no token before it looks at it.
    rows.iter_mut().for_each(|row| row.resize(longest, 0));
    labels.iter_mut().for_each(|row| row.resize(longest, -100));
    let label = |at: &[usize]| labels[at[0]][at[1]];
    let placed = Tensor::from_fn([rows.len(), longest], (mesh, "[@dp?, _]"), label)?;
    Ok((Tokens::of_rows(mesh, &rows)?, placed, count))
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let axes = arguments.next().unwrap_or("dp=2, tp=2".into());
    let steps: u64 = arguments.next().map_or(Ok(24), |n| n.parse())?;
    let folder = arguments.next().unwrap_or("target/orvania-adapter".into());
    if !Path::new(MODEL).exists() {
        return Err(format!("{MODEL} is not there: fetch it with scripts/models").into());
    }
    if Path::new(&folder).exists() {
        return Err(format!("{folder} is there already: name another, or remove it").into());
    }

    let mesh = Mesh::new(&axes, &default_device()?)?;
    let build = Build::new(&mesh, Policy::f32(), 0);
    let mut text = TextModel::open(MODEL, &build)?;
    println!("{MODEL} on {mesh}");
    ask(&text, "before")?;

    let lora = Lora {
        rank: 8,
        alpha: 16.0,
        dropout: 0.05,
        seed: 1,
    };
    let adapters = add_lora(&mut text.model, "*.q_proj.weight, *.v_proj.weight", &lora)?;
    let Summary {
        trained, values, ..
    } = Summary::of(&text.model);
    println!("{adapters} adapters: {trained} of {values} values are trained");
    let adamw = Rule::AdamW(AdamW {
        lr: 2e-3,
        decay: 0.0,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&text.model, &Groups::all(adamw))?;
    let schedule = Schedule::Linear {
        warmup: 2,
        warmup_from: 0.0,
        total: steps,
        min: 0.1,
    };
    let (tokens, labels, count) = lessons(&text, &mesh)?;
    let start = Instant::now();
    for step in 1..=steps {
        let pass = Pass::train(Rng::new(step));
        lora_pass(&mut text.model, &pass);
        let logits = text.model.logits(&tokens, &pass, None)?;
        let sum = language(&logits, &labels, &Language::default())?;
        let loss = normalised(&sum, count as f64)?;
        let mut sums = Accumulator::default();
        sums.add(&text.model, &loss.backward()?)?;
        let sums = sums.finish(&text.model)?;
        optimizer.step(&mut text.model, sums, schedule.factor(step))?;
        if step == 1 || step % 4 == 0 || step == steps {
            println!("step {step:>3}: loss {:.4}", loss.item()?.to_f64());
        }
    }
    lora_pass(&mut text.model, &Pass::eval());
    let each = start.elapsed().as_secs_f64() / steps.max(1) as f64;
    println!("{each:.2} s a step");
    ask(&text, "adapted")?;

    // The adapters alone, as PEFT has them.
    let about = Map::from_iter([
        (
            "base_model_name_or_path".to_string(),
            json!("HuggingFaceTB/SmolLM2-135M-Instruct"),
        ),
        ("task_type".to_string(), json!("CAUSAL_LM")),
    ]);
    save_lora(&folder, &text.model, &about)?;
    drop(text);

    let mut fresh = TextModel::open(MODEL, &build)?;
    let read = load_lora(&mut fresh.model, &folder)?;
    let merged = merge_lora(&mut fresh.model)?;
    let names = fresh.model.names().len();
    println!(
        "{folder}: {read} adapters read into a fresh model, {merged} merged into its {names} parameters"
    );
    ask(&fresh, "merged")
}
