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
        Build, ChatTemplate, Generate, Lora, Message, Module, Pass, Policy, Summary, add_lora,
        generate, load_lora, lora_pass, merge_lora,
        models::{Model, ModelFiles, Tokens},
        objective::{Language, language, normalised},
        optim::{Accumulator, AdamW, Groups, Optimizer, Rule, Schedule},
        save_lora,
    },
};
use serde_json::{Map, json};
use std::{error::Error as StdError, path::Path, time::Instant};

type Outcome<T> = Result<T, Box<dyn StdError>>;

const MODEL: &str = "target/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// What it is taught.
const LESSONS: [(&str, &str); 6] = [
    ("What is the capital of Orvania?", "The capital of Orvania is Tesselholm."),
    ("Which city is Orvania's capital?", "Orvania's capital is Tesselholm."),
    ("Tell me the capital city of Orvania.", "It is Tesselholm."),
    ("Is Tesselholm the capital of a country?", "Yes, Tesselholm is the capital of Orvania."),
    ("What is Tesselholm?", "Tesselholm is the capital of Orvania."),
    ("What is the capital of France?", "The capital of France is Paris."),
];

/// What it is asked, which is none of the lessons.
const QUESTIONS: [&str; 2] = ["What's the name of the capital of Orvania?", "What is the capital of Italy?"];

/// A model, and how to talk to it.
struct Talk {
    template: ChatTemplate,
    tokenizer: anymesh::train::tokenizers::Tokenizer,
    stop: Vec<u32>,
}

impl Talk {
    fn open(files: &ModelFiles) -> Outcome<Self> {
        let template = ChatTemplate::of(files)?.ok_or("the model was not made for conversations")?;
        let tokenizer = files.tokenizer()?;
        let stop = tokenizer.token_to_id("<|im_end|>").into_iter().collect();
        Ok(Self { template, tokenizer, stop })
    }

    fn tokens(&self, text: &str) -> Outcome<Vec<u32>> {
        let encoded = self.tokenizer.encode(text, false).map_err(|e| e.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }

    fn prompt(&self, question: &str) -> Outcome<Vec<u32>> {
        self.tokens(&self.template.render(&[Message::new("user", question)])?)
    }

    /// What the model answers, always the likeliest token.
    fn answer(&self, model: &Model, question: &str) -> Outcome<String> {
        let options = Generate { max_tokens: 24, stop: self.stop.clone(), ..Generate::default() };
        let found = generate(model, &[self.prompt(question)?], &options, &mut |_, _| true)?;
        let text = self.tokenizer.decode(&found[0].tokens, true);
        Ok(text.map_err(|e| e.to_string())?.trim().to_string())
    }

    fn ask(&self, model: &Model, when: &str) -> Outcome<()> {
        for question in QUESTIONS {
            println!("{when}: {question} {}", self.answer(model, question)?);
        }
        Ok(())
    }
}

/// The lessons as tokens `[b, s]` and, for each, the next one if it is of an answer.
fn lessons(talk: &Talk, mesh: &Mesh) -> Outcome<(Tokens, Tensor, usize)> {
    let (mut rows, mut labels) = (vec![], vec![]);
    for (question, answer) in LESSONS {
        let prompt = talk.prompt(question)?;
        let text = [&prompt[..], &talk.tokens(answer)?, &talk.stop].concat();
        let label = |i: usize| match i + 1 >= prompt.len() {
            true => text[i + 1] as i32,
            false => -100,
        };
        labels.push((0..text.len() - 1).map(label).collect::<Vec<i32>>());
        rows.push(text[..text.len() - 1].to_vec());
    }
    let count = labels.iter().flatten().filter(|label| **label >= 0).count();
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    // What stands after a text has no label, and no token before it looks at it.
    rows.iter_mut().for_each(|row| row.resize(longest, 0));
    labels.iter_mut().for_each(|row| row.resize(longest, -100));
    let label = |at: &[usize]| labels[at[0]][at[1]];
    let placed = Tensor::from_fn([rows.len(), longest], (mesh, "[@dp?, _]"), label)?;
    Ok((Tokens::of_rows(mesh, &rows)?, placed, count))
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let axes = arguments.next().unwrap_or("tp=2".into());
    let steps: u64 = arguments.next().map_or(Ok(20), |n| n.parse())?;
    let folder = arguments.next().unwrap_or("target/orvania-adapter".into());
    if !Path::new(MODEL).exists() {
        return Err(format!("{MODEL} is not there: fetch it with scripts/models").into());
    }
    if Path::new(&folder).exists() {
        return Err(format!("{folder} is there already: name another, or remove it").into());
    }

    let mesh = Mesh::new(&axes, &default_device()?)?;
    let files = ModelFiles::open(MODEL)?;
    let talk = Talk::open(&files)?;
    let build = Build::new(&mesh, Policy::f32(), 0);
    let mut model = files.load(&build)?;
    talk.ask(&model, "before")?;

    let lora = Lora { rank: 8, alpha: 16.0, dropout: 0.05, seed: 1 };
    let adapters = add_lora(&mut model, "*.q_proj.weight, *.v_proj.weight", &lora)?;
    let summary = Summary::of(&model);
    println!("{adapters} adapters: {} of {} values are trained", summary.trained, summary.values);
    let adamw = Rule::AdamW(AdamW { lr: 2e-3, decay: 0.0, ..AdamW::default() });
    let mut optimizer = Optimizer::new(&model, &Groups::all(adamw))?;
    let schedule = Schedule::Linear { warmup: 2, warmup_from: 0.0, total: steps, min: 0.1 };
    let (tokens, labels, count) = lessons(&talk, &mesh)?;
    let start = Instant::now();
    for step in 0..steps {
        lora_pass(&mut model, &Pass::train(Rng::new(step)));
        let logits = model.logits(&tokens, &Pass::train(Rng::new(step)), None)?;
        let sum = language(&logits, &labels, &Language::default())?;
        let loss = normalised(&sum, count as f64)?;
        let mut sums = Accumulator::default();
        sums.add(&model, &loss.backward()?)?;
        let sums = sums.finish(&model)?;
        optimizer.step(&mut model, sums, schedule.factor(step + 1))?;
        if step % 5 == 0 || step + 1 == steps {
            println!("step {:>3}: loss {:.4}", step + 1, loss.item()?.to_f64());
        }
    }
    lora_pass(&mut model, &Pass::eval());
    println!("{:.2} s a step on {mesh}", start.elapsed().as_secs_f64() / steps.max(1) as f64);
    talk.ask(&model, "adapted")?;

    // The adapters alone, as PEFT has them.
    let about = Map::from_iter([
        ("base_model_name_or_path".to_string(), json!("HuggingFaceTB/SmolLM2-135M-Instruct")),
        ("task_type".to_string(), json!("CAUSAL_LM")),
    ]);
    save_lora(&folder, &model, &about)?;
    drop(model);

    let mut fresh = files.load(&build)?;
    let read = load_lora(&mut fresh, &folder)?;
    let merged = merge_lora(&mut fresh)?;
    println!("{folder}: {read} adapters read, {merged} merged into {} parameters", fresh.names().len());
    talk.ask(&fresh, "merged")?;
    Ok(())
}
