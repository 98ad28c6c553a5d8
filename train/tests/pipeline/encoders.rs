//! Encoders in stages: contrastive training gives the loss and gradients of one device.

use anymesh_core::{DType, Mesh, Tensor, grad::Gradients, ops::Rng};
use anymesh_schedule::Name;
use anymesh_train::{
    Build, Encoder, Module, Pass, Policy, Pooling, Result, Sentences, Zero,
    data::Tokenizer,
    models::{BertConfig, ModelConfig},
    objective::{Contrastive, GradCache, Prefix, contrastive},
    optim::{Accumulator, AdamW, Groups, Optimizer, Rule, Schedule},
    pipeline::{Pipeline, ScheduleChoice, Stages},
    trainer::{ContrastiveModel, Feed, Pairs, Settings, Task, Trainer},
};
use std::collections::BTreeMap;

const CHUNK: usize = 3;
/// Two sets of texts; the last chunk of each is shorter.
const ROWS: usize = 8;

fn encoder(mesh: &Mesh, stages: Stages, zero: Zero) -> Result<Encoder> {
    let config = BertConfig {
        vocab_size: 257,
        hidden_size: 8,
        num_hidden_layers: 3,
        num_attention_heads: 2,
        intermediate_size: 12,
        max_position_embeddings: 16,
        ..BertConfig::default()
    };
    let build = Build::new(mesh, Policy::all(DType::F64), 5)
        .zero(zero, &["dp"])
        .stages(stages);
    Ok(Encoder {
        model: ModelConfig::Bert(config).build(&build)?,
        tokenizer: Tokenizer::bytes(),
        pooling: Pooling::Mean,
        normalize: true,
        lower_case: false,
        batch: 4,
    })
}

fn texts(set: usize) -> Vec<Vec<u32>> {
    let word = |row: usize, at: usize| ((row * 7 + at * 3 + set * 11) % 30) as u32;
    let text = |row: usize| (0..3 + (row + set) % 4).map(|at| word(row, at)).collect();
    (0..ROWS).map(text).collect()
}

/// Queries and passages in chunks, and all of them as one batch each.
fn batches(mesh: &Mesh) -> Result<Vec<Sentences>> {
    let chunks = GradCache::new(CHUNK)?.chunks(&[ROWS, ROWS]);
    let batch = |chunk: &anymesh_train::objective::Chunk| {
        Sentences::new(mesh, &texts(chunk.set)[chunk.rows.clone()], 0)
    };
    chunks.iter().map(batch).collect()
}

fn pass(i: usize) -> Pass {
    Pass::train(Rng::new(77)).part(i)
}

fn loss(vectors: &[Tensor]) -> Result<Tensor> {
    let (queries, passages) = vectors.split_at(vectors.len() / 2);
    let whole = |parts: &[Tensor]| Tensor::concat(&parts.iter().collect::<Vec<_>>(), 0);
    let options = Contrastive {
        symmetric: true,
        ..Contrastive::default()
    };
    contrastive(&whole(queries)?, &whole(passages)?, &options)
}

type Found = (f64, BTreeMap<String, Vec<f64>>);

fn told(model: &dyn Module, loss: &Tensor, mut sums: Accumulator) -> Result<Found> {
    let sums = sums.finish(model)?.gradients;
    let values = |(name, g): (String, Tensor)| Ok((name, g.full_tensor()?.to_vec::<f64>()?));
    let sums = sums.into_iter().map(values).collect::<Result<_>>()?;
    Ok((loss.item()?.to_f64(), sums))
}

/// The program without stages: a graph through everything.
fn alone() -> Result<Found> {
    let mesh = Mesh::single(&anymesh_backend_cpu::device());
    let encoder = encoder(&mesh, Stages::default(), Zero::Off)?;
    let batches = batches(&mesh)?;
    let vectors = batches.iter().enumerate();
    let vectors = vectors.map(|(i, b)| encoder.forward(b, &pass(i)));
    let loss = loss(&vectors.collect::<Result<Vec<_>>>()?)?;
    let mut sums = Accumulator::default();
    sums.add(&encoder.model, &loss.backward()?)?;
    told(&encoder.model, &loss.detach(), sums)
}

fn hold(expected: &Found, found: &Found, what: &str) {
    let apart = |a: f64, b: f64, scale: f64| (a - b).abs() / scale;
    assert!(
        apart(expected.0, found.0, expected.0) < 1e-12,
        "{what}: {found:?}"
    );
    assert!(expected.1.keys().eq(found.1.keys()), "{what}");
    for (name, values) in &expected.1 {
        let scale = values.iter().fold(1e-3, |m: f64, x| m.max(x.abs()));
        for (a, b) in values.iter().zip(&found.1[name]) {
            assert!(
                apart(*a, *b, scale) < 1e-12,
                "{what}, {name}: {b} instead of {a}"
            );
        }
    }
}

#[test]
fn contrastive_training_over_stages_is_that_of_one_device() -> Result<()> {
    let expected = alone()?;
    for (axes, name, zero) in [
        ("pp=2", Name::OneFOneB, Zero::Off),
        ("pp=3", Name::ZeroBubbleH1, Zero::Off),
        ("dp=2, pp=2", Name::FThenB, Zero::One),
        ("pp=2, tp=2", Name::OneFOneB, Zero::Off),
        ("pp=2, dp=2", Name::ZeroBubbleV, Zero::Three),
        ("pp=4", Name::OneFOneB, Zero::Off),
    ] {
        let mesh = Mesh::new(axes, &anymesh_backend_cpu::device())?;
        let stages = Stages {
            chunks: name.chunks(),
            placement: name.placement(),
            ..Stages::default()
        };
        let encoder = encoder(&mesh, stages, zero)?;
        let batches = batches(&mesh)?;
        let owners = encoder.model.split().owners().to_vec();
        let schedule = ScheduleChoice::Named(name.to_string());
        let pipeline: Pipeline = schedule.pipeline(&owners, batches.len())?;
        let cached = pipeline.run_cached(&encoder, &batches, &pass, loss)?;
        let found = told(&encoder.model, &cached.loss, cached.gradients)?;
        hold(&expected, &found, &format!("{axes} {name}"));
    }
    Ok(())
}

#[test]
fn gradients_go_back_through_stages_without_a_schedule_too() -> Result<()> {
    let expected = alone()?;
    let mesh = Mesh::new("pp=2, dp=2", &anymesh_backend_cpu::device())?;
    let encoder = encoder(&mesh, Stages::default(), Zero::Off)?;
    let batches = batches(&mesh)?;
    let mut found = Gradients::default();
    let whole = GradCache::new(CHUNK)?.run(
        &[ROWS, ROWS],
        &Pass::train(Rng::new(77)),
        |chunk, pass| encoder.forward(&batches[chunk.index], pass),
        |sets| {
            let options = Contrastive {
                symmetric: true,
                ..Contrastive::default()
            };
            contrastive(&sets[0], &sets[1], &options)
        },
        |more| Ok(found.add(more)?),
    )?;
    let mut sums = Accumulator::default();
    sums.add(&encoder.model, &found)?;
    hold(&expected, &told(&encoder.model, &whole, sums)?, "GradCache");
    // Vectors are those of one device as well.
    let texts = ["one", "and another text"];
    let here = encoder.encode(&texts)?;
    let plain = Mesh::single(&anymesh_backend_cpu::device());
    let there = self::encoder(&plain, Stages::default(), Zero::Off)?.encode(&texts)?;
    for (a, b) in here.iter().flatten().zip(there.iter().flatten()) {
        assert!((a - b).abs() < 1e-6, "{here:?} {there:?}");
    }
    Ok(())
}

#[test]
fn what_an_encoder_cannot_is_said() -> Result<()> {
    let mesh = Mesh::new("pp=2", &anymesh_backend_cpu::device())?;
    let encoder = encoder(&mesh, Stages::default(), Zero::Off)?;
    let batches = batches(&mesh)?;
    let schedule = ScheduleChoice::default();
    let pipeline = schedule.pipeline(encoder.model.split().owners(), batches.len())?;
    // Its last stage gives vectors and no loss.
    let error = pipeline.run(&encoder, &batches, 1.0, &pass).err();
    let error = error.map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("run_cached"), "{error}");
    let error = pipeline.backward_with(&encoder, &batches, &[], &pass).err();
    let error = error.map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("0 gradients for 6"), "{error}");
    Ok(())
}

/// Texts that belong together, in micro-batches of different sizes.
struct Texts(Mesh);

impl Feed<Pairs> for Texts {
    fn global_batch(&mut self, _: u64) -> Result<Option<(Vec<Pairs>, u64)>> {
        let pairs = |rows: std::ops::Range<usize>| {
            let of = |set: usize| Sentences::new(&self.0, &texts(set)[rows.clone()], 0);
            Ok(Pairs {
                queries: of(0)?,
                passages: of(1)?,
            })
        };
        let batches = [0..3, 3..6, 6..8].map(pairs);
        Ok(Some((
            batches.into_iter().collect::<Result<_>>()?,
            ROWS as u64,
        )))
    }
}

fn train(mesh: &Mesh, schedule: Name) -> Result<Vec<(f64, f64)>> {
    let stages = Stages {
        chunks: schedule.chunks(),
        placement: schedule.placement(),
        ..Stages::default()
    };
    let encoder = encoder(mesh, stages, Zero::Off)?;
    let mut task = ContrastiveModel::new(encoder, Contrastive::default())?;
    task.prefixes = Prefix::all(&[8, 4]);
    task.schedule = ScheduleChoice::Named(schedule.to_string());
    let rule = Rule::AdamW(AdamW {
        lr: 1e-2,
        ..AdamW::default()
    });
    let optimizer = Optimizer::new(task.model(), &Groups::all(rule))?;
    let constant = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    let mut trainer = Trainer::new(task, optimizer, constant, Settings::default())?;
    let mut feed = Texts(mesh.clone());
    let step = |_| {
        let report = trainer.step(&mut feed)?.expect("the data never ends");
        Ok((report.loss, report.norm))
    };
    (0..4).map(step).collect()
}

#[test]
fn the_trainer_trains_an_encoder_in_stages() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let alone = train(&Mesh::single(&cpu), Name::FThenB)?;
    assert!(alone[3].0 < alone[0].0, "it learns: {alone:?}");
    for (axes, name) in [
        ("pp=2, dp=2", Name::OneFOneB),
        ("pp=2, tp=2", Name::ZeroBubbleV),
    ] {
        let there = train(&Mesh::new(axes, &cpu)?, name)?;
        for (a, b) in alone.iter().zip(&there) {
            let apart = ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs());
            assert!(apart < 1e-11, "{axes}: {there:?} instead of {alone:?}");
        }
    }
    Ok(())
}
