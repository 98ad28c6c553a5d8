//! SmolLM2 says what plain NumPy code in f64 says with the same weights, on every mesh.

use crate::Suite;
use anymesh_core::Mesh;
use anymesh_train::{Build, Generate, Policy, Sampling, TextModel, generate};
use serde_json::Value;
use std::path::Path;

pub(crate) const SUITE: Suite = &[
    ("smollm2_on_one_device", |path| on(path, "")),
    ("smollm2_on_tp_2", |path| on(path, "tp=2")),
    ("smollm2_on_tp_3", |path| on(path, "tp=3")),
    ("smollm2_on_tp_4", |path| on(path, "tp=4")),
    ("smollm2_draws_the_same_text_on_every_mesh", sampled),
    ("smollm2_stops_at_the_end_of_its_answer", stops),
];

struct Fact {
    prompt: String,
    chat: bool,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    first_logits: Vec<f64>,
}

fn facts() -> Vec<Fact> {
    let facts: Value = serde_json::from_str(include_str!("../facts/smollm2.json")).expect("JSON");
    let ids = |v: &Value| -> Vec<u32> {
        let list = v.as_array().expect("a list").iter();
        list.map(|x| x.as_u64().expect("a token") as u32).collect()
    };
    let fact = |p: &Value| Fact {
        prompt: p["prompt"].as_str().expect("a text").into(),
        chat: p["chat"].as_bool().expect("a bool"),
        ids: ids(&p["ids"]),
        greedy: ids(&p["greedy"]),
        first_logits: (p["first_logits"].as_array().expect("a list").iter())
            .map(|x| x.as_f64().expect("a number"))
            .collect(),
    };
    let prompts = facts["prompts"].as_array().expect("prompts").iter();
    prompts.map(fact).collect()
}

fn open(path: &Path, axes: &str) -> TextModel {
    let device = anymesh_backend_cpu::device();
    let mesh = match axes {
        "" => Mesh::single(&device),
        axes => Mesh::new(axes, &device).expect("a mesh"),
    };
    TextModel::open(path, &Build::new(&mesh, Policy::f32(), 0)).expect("SmolLM2")
}

fn on(path: &Path, axes: &str) {
    let (model, facts) = (open(path, axes), facts());
    assert_eq!(facts.len(), 3);
    for fact in &facts {
        let ids = match fact.chat {
            true => model.chat(&fact.prompt),
            false => model.tokens(&fact.prompt),
        };
        assert_eq!(ids.expect("tokens"), fact.ids, "{}", fact.prompt);
    }
    let options = Generate {
        max_tokens: 32,
        ..Generate::default()
    };
    // All at once: prompts of different lengths.
    let prompts: Vec<Vec<u32>> = facts.iter().map(|f| f.ids.clone()).collect();
    let together = generate(&model.model, &prompts, &options, &mut |_, _| true).expect("texts");
    for (fact, text) in facts.iter().zip(&together) {
        assert_eq!(
            text.tokens, fact.greedy,
            "{} of three on {axes}",
            fact.prompt
        );
    }
    // And one alone.
    let one = generate(&model.model, &prompts[..1], &options, &mut |_, _| true).expect("a text");
    assert_eq!(one[0].tokens, facts[0].greedy, "{axes}");
    let mut decoder = anymesh_train::Decoder::new(&model.model, &prompts[..1]).expect("a decoder");
    let logits = anymesh_core::grad::no_grad(|| decoder.prefill(&prompts[..1])).expect("logits");
    let logits = logits
        .full_tensor()
        .expect("whole")
        .to_vec::<f32>()
        .expect("values");
    let expected = &facts[0].first_logits;
    let far = logits
        .iter()
        .zip(expected)
        .map(|(a, b)| (f64::from(*a) - b).abs());
    let far = far.fold(0.0, f64::max);
    println!("{axes}: largest difference of a logit {far:.2e}");
    assert!(far < 1e-3, "{axes}: {far}");
}

fn sampled(path: &Path) {
    let options = |seed| Generate {
        max_tokens: 12,
        sampling: Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.1,
            seed,
        },
        ..Generate::default()
    };
    let prompt = facts()[0].ids.clone();
    let run = |model: &TextModel, seed| {
        let texts = generate(
            &model.model,
            &[prompt.clone()],
            &options(seed),
            &mut |_, _| true,
        );
        texts.expect("a text").remove(0).tokens
    };
    let one = open(path, "");
    let (first, other) = (run(&one, 1), run(&one, 2));
    assert_ne!(first, other, "another seed, another text");
    assert_eq!(run(&one, 1), first);
    for axes in ["tp=3", "dp=2, tp=2"] {
        assert_eq!(run(&open(path, axes), 1), first, "{axes}");
    }
}

fn stops(path: &Path) {
    let model = open(path, "tp=3");
    let prompt = model
        .chat("What is the capital of France?")
        .expect("tokens");
    let mut streamed = String::new();
    let answer = model.complete(&prompt, &Generate::default(), &mut |piece| {
        streamed += piece;
        true
    });
    let answer = answer.expect("an answer");
    assert_eq!(answer.text, "The capital of France is Paris.");
    assert_eq!(streamed, answer.text);
    assert_eq!(answer.finish, anymesh_train::Finish::Stop);
}
