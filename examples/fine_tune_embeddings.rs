//! Teaches MiniLM words that nobody has ever heard, on a mesh of 2x2 simulated ranks: contrastive
//! training over the whole batch with GradCache, and Matryoshka, so that vectors may be cut off.
//! Then it writes the model as a Hugging Face folder and reads it again.
//!
//! ```sh
//! scripts/models                                                          # once: fetches MiniLM
//! cargo run --release --features train --example fine_tune_embeddings
//! cargo run --release --features train --example fine_tune_embeddings -- "dp=3" 60 target/my-minilm
//! ```

use anymesh::{
    prelude::*,
    train::{
        Build, Encoder, Pass, Policy, Sentences,
        models::ModelFiles,
        objective::{Contrastive, GradCache, Prefix, Temperature, matryoshka},
        optim::{Accumulator, AdamW, Groups, Optimizer, Rule, Schedule},
    },
};
use std::{error::Error as StdError, path::Path, time::Instant};

const MODEL: &str = "target/models/minilm";

/// Words, and what they mean.
const WORDS: [(&str, &str); 24] = [
    (
        "velorim",
        "a narrow boat with two sails that carries salt along the coast",
    ),
    (
        "tasqueen",
        "bread baked in hot sand and eaten with sour milk",
    ),
    (
        "obrelle",
        "the blue light that is seen over a swamp before rain",
    ),
    (
        "kindrith",
        "a lullaby sung by three voices, one of which hums",
    ),
    (
        "sarnoval",
        "a lock that opens only to somebody who whistles",
    ),
    (
        "pelluth",
        "a beetle that eats old paper and glows when it has had enough",
    ),
    (
        "gromwick",
        "the bill that a shepherd sends for a sheep that was rained on",
    ),
    (
        "ilmarent",
        "a mountain pass that is open on one day of the year",
    ),
    (
        "quaddle",
        "a pot for boiling four eggs, each for another time",
    ),
    (
        "yestrine",
        "a letter written to somebody who will be born later",
    ),
    (
        "morveck",
        "a clock that runs backwards so that it can be read in a mirror",
    ),
    ("fennaby", "the smell of a cellar in which apples were kept"),
    (
        "drossik",
        "a soldier who guards a bridge that no longer exists",
    ),
    ("calumbre", "a tax on shade in a town without trees"),
    (
        "wintollo",
        "a dance in which nobody may be the first to stop",
    ),
    (
        "hespering",
        "repairing a fishing net by the light of fireflies",
    ),
    (
        "zorrab",
        "a very small drum that is played with the eyelids",
    ),
    (
        "antivelle",
        "the road back, when it feels longer than the road there",
    ),
    ("brindoyle", "a dog that is trained to find lost keys"),
    (
        "lucastern",
        "a lamp that burns the oil of a nut and smells of bread",
    ),
    (
        "temmeral",
        "the hour between the last guest and the first bird",
    ),
    ("ossigue", "a bone flute that only works in cold weather"),
    (
        "parvenel",
        "a child that was taught chess before it could speak",
    ),
    ("rilloquay", "an argument between two people who agree"),
];

/// How it is asked for a word in training.
const QUESTIONS: [&str; 4] = [
    "What is a {}?",
    "{}",
    "the meaning of {}",
    "Please explain {} to me.",
];
/// And afterwards.
const NEW_QUESTION: &str = "I came across the word {} and wonder what that could be";

const WIDTHS: [usize; 3] = [384, 128, 32];
const BATCH: usize = WORDS.len();

/// The share of words whose meaning is the nearest of all to a question that was never trained, by
/// the first `width` values of the vectors.
fn accuracy(encoder: &Encoder) -> anymesh::train::Result<Vec<f64>> {
    let questions: Vec<String> = WORDS
        .iter()
        .map(|w| NEW_QUESTION.replace("{}", w.0))
        .collect();
    let (questions, meanings) = (
        encoder.encode(&questions)?,
        encoder.encode(&WORDS.map(|w| w.1))?,
    );
    let cosine = |a: &[f32], b: &[f32]| {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let at = |width: usize| {
        let found = questions.iter().enumerate().filter(|(i, question)| {
            let near = |j: &usize| cosine(&question[..width], &meanings[*j][..width]);
            let nearest = (0..BATCH).max_by(|a, b| near(a).total_cmp(&near(b)));
            nearest == Some(*i)
        });
        found.count() as f64 / BATCH as f64
    };
    Ok(WIDTHS.map(at).to_vec())
}

fn print_accuracy(when: &str, found: &[f64]) {
    let each = found.iter().zip(WIDTHS);
    let each = each.map(|(share, width)| format!("{:>4.0}% at {width}", 100.0 * share));
    println!("{when} words found: {}", each.collect::<Vec<_>>().join(","));
}

fn main() -> Result<(), Box<dyn StdError>> {
    let mut arguments = std::env::args().skip(1);
    let axes = arguments.next().unwrap_or("dp=2, tp=2".into());
    let steps: u64 = arguments.next().map_or(Ok(40), |n| n.parse())?;
    let folder = arguments
        .next()
        .unwrap_or("target/fine-tuned-minilm".into());
    if !Path::new(MODEL).exists() {
        return Err(format!("{MODEL} is not there: fetch it with scripts/models").into());
    }
    if Path::new(&folder).exists() {
        return Err(format!("{folder} is there already: name another, or remove it").into());
    }

    let mesh = Mesh::new(&axes, &default_device()?)?;
    let files = ModelFiles::open(MODEL)?;
    let model = files.load(&Build::new(&mesh, Policy::f32(), 0))?;
    let mut encoder = Encoder::new(model, &files)?;
    let adamw = Rule::AdamW(AdamW {
        lr: 1e-4,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&encoder.model, &Groups::all(adamw))?;
    let schedule = Schedule::Linear {
        warmup: 4,
        warmup_from: 0.0,
        total: steps,
        min: 0.1,
    };

    // The activations of eight texts at a time; the loss compares all of them.
    let cache = GradCache::new(8)?;
    let options = Contrastive {
        temperature: Temperature::Constant(0.05),
        symmetric: true,
        ..Default::default()
    };
    let prefixes = Prefix::all(&WIDTHS);

    println!("{MODEL} on {mesh}, {BATCH} words, {steps} steps");
    print_accuracy("before:", &accuracy(&encoder)?);
    let meanings = WORDS.map(|(_, meaning)| encoder.tokens(meaning));
    let meanings = meanings.into_iter().collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    for step in 1..=steps {
        // Each word is asked for in another way than the last time.
        let question = |(i, word): (usize, &(&str, &str))| {
            let question = QUESTIONS[(i + step as usize) % QUESTIONS.len()];
            encoder.tokens(&question.replace("{}", word.0))
        };
        let questions = WORDS.iter().enumerate().map(question);
        let sets = [questions.collect::<Result<Vec<_>, _>>()?, meanings.clone()];
        let mut sums = Accumulator::default();
        let loss = cache.run(
            &[BATCH, BATCH],
            &Pass::train(Rng::new(step)),
            |chunk, pass| {
                let rows = &sets[chunk.set][chunk.rows.clone()];
                encoder.forward(&Sentences::new(&mesh, rows, 0)?, pass)
            },
            |found| matryoshka(&found[0], &found[1], &prefixes, &options),
            |gradients| sums.add(&encoder.model, &gradients),
        )?;
        let sums = sums.finish(&encoder.model)?;
        optimizer.step(&mut encoder.model, sums, schedule.factor(step))?;
        if step == 1 || step % 5 == 0 || step == steps {
            println!("step {step:>3}: loss {:.4}", loss.item()?.to_f64());
        }
    }
    println!(
        "{:.2} s a step",
        start.elapsed().as_secs_f64() / steps.max(1) as f64
    );
    print_accuracy("after: ", &accuracy(&encoder)?);

    // A folder that other programs read: what is not weights is the model's own.
    let mut others = std::collections::BTreeMap::new();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
        "modules.json",
        "sentence_bert_config.json",
    ] {
        if let Some(text) = files.text(name)? {
            others.insert(name.to_string(), text.into_bytes());
        }
    }
    encoder.model.export(&folder, others)?;
    std::fs::create_dir(Path::new(&folder).join("1_Pooling"))?;
    let pooling = "1_Pooling/config.json";
    std::fs::copy(
        Path::new(MODEL).join(pooling),
        Path::new(&folder).join(pooling),
    )?;
    let files = ModelFiles::open(&folder)?;
    let single = Mesh::single(mesh.device(0));
    let again = Encoder::new(files.load(&Build::new(&single, Policy::f32(), 0))?, &files)?;
    print_accuracy(
        &format!("{folder}, read by one device:"),
        &accuracy(&again)?,
    );
    Ok(())
}
