//! All ways to be parallel at once: data, experts, stages, sequences and layers, each over an axis of
//! two ranks, give the losses of one device; and on a device without memory everything has its type.

use anymesh_core::{
    DType, Device, Mesh, Tensor, meta,
    ops::{Rng, SequenceOrder},
};
use anymesh_train::{
    Build, Module, Pass, Policy, Result, Zero,
    data::Batch,
    models::{LlamaConfig, ModelConfig, MoeConfig},
    nn::{Context, ContextAttention},
    objective::Language,
    optim::{AdamW, Clip, Groups, Optimizer, Rule, Schedule},
    pipeline::ScheduleChoice,
    trainer::{Feed, LanguageModel, Settings, StepReport, Task, Trainer},
};

const VOCABULARY: usize = 40;
const LENGTH: usize = 8;
const STEPS: usize = 3;

/// Experts in every layer, and heads enough for all axes.
fn config() -> ModelConfig {
    ModelConfig::Moe(MoeConfig {
        llama: LlamaConfig {
            model_type: "mixtral".into(),
            vocab_size: VOCABULARY,
            hidden_size: 16,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: Some(4),
            initializer_range: 0.3,
            ..LlamaConfig::default()
        },
        num_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 12,
        norm_topk_prob: true,
        router_aux_loss_coef: 0.02,
        router_z_loss_coef: 0.001,
        ..MoeConfig::default()
    })
}

#[derive(Clone, Copy, Debug)]
struct Way {
    axes: &'static str,
    attention: ContextAttention,
    balance: bool,
    schedule: &'static str,
    zero: Zero,
    sequence_parallel: bool,
}

fn on(axes: &'static str, attention: ContextAttention) -> Way {
    Way {
        axes,
        attention,
        balance: true,
        schedule: "1f1b",
        zero: Zero::Off,
        sequence_parallel: false,
    }
}

fn mesh(axes: &str, device: &Device) -> Result<Mesh> {
    Ok(match axes {
        "" => Mesh::single(device),
        axes => Mesh::new(axes, device)?,
    })
}

fn task(mesh: &Mesh, way: &Way) -> Result<LanguageModel> {
    let b = Build::new(mesh, Policy::all(DType::F64), 11)
        .zero(way.zero, &["dp", "ep", "cp"])
        .sequence_parallel(way.sequence_parallel)
        .long_sequences(Context {
            attention: way.attention,
            balance: Some(way.balance),
        });
    let options = Language {
        output: DType::F64,
        ..Language::default()
    };
    let mut task = LanguageModel::new(config().build(&b)?, options, LENGTH);
    task.schedule = ScheduleChoice::Named(way.schedule.into());
    Ok(task)
}

/// Texts in two micro-batches of four rows, in the order that the model wants.
struct Texts(Mesh, SequenceOrder);

impl Texts {
    fn batch(&self, first: usize) -> Result<Batch> {
        let token =
            |row: usize, at: usize| ((row * 7919 % 1009 + at * (1 + row % 3)) % VOCABULARY) as i32;
        let tensor = |f: &dyn Fn(usize, usize) -> i32| {
            let place = (&self.0, "[@dp?@ep?, @cp?]");
            Tensor::from_fn([4, LENGTH], place, |at| f(first + at[0], at[1]))
        };
        let ids = tensor(&|row, at| token(row, at))?;
        let labels = tensor(&|row, at| match at {
            2 if row.is_multiple_of(3) => -100,
            _ => token(row, at + 1),
        })?;
        Batch::new(ids, labels).in_order(self.1)
    }
}

impl Feed<Batch> for Texts {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        let first = consumed as usize;
        Ok(Some((vec![self.batch(first)?, self.batch(first + 4)?], 8)))
    }
}

fn run(way: &Way) -> Result<Vec<StepReport>> {
    let mesh = mesh(way.axes, &anymesh_backend_cpu::device())?;
    let task = task(&mesh, way)?;
    let mut texts = Texts(mesh, task.model.order(LENGTH)?);
    let rule = Rule::AdamW(AdamW {
        lr: 3e-3,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&task.model, &Groups::all(rule))?;
    optimizer.clip = Some(Clip::to(1.0));
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    let mut trainer = Trainer::new(task, optimizer, schedule, Settings::default())?;
    let step = |_| Ok(trainer.step(&mut texts)?.expect("the data never ends"));
    (0..STEPS).map(step).collect()
}

fn hold(ways: &[Way]) -> Result<()> {
    let alone = run(&on("", ContextAttention::Auto))?;
    let moved = alone
        .windows(2)
        .all(|w| (w[0].loss - w[1].loss).abs() > 1e-5);
    assert!(moved, "it is trained: {alone:?}");
    for way in ways {
        for (a, b) in alone.iter().zip(run(way)?) {
            let apart = ((a.loss - b.loss) / a.loss).abs();
            let apart = apart.max(((a.norm - b.norm) / a.norm).abs());
            assert!(apart <= 1e-12, "{way:?}: {b:?} instead of {a:?}");
        }
    }
    Ok(())
}

#[test]
fn sixteen_ranks_along_four_axes_give_the_losses_of_one_device() -> Result<()> {
    use ContextAttention::{Gather, Heads, Ring};
    hold(&[
        on("pp=2, ep=2, cp=2, tp=2", Ring),
        on("pp=2, dp=2, cp=2, tp=2", Heads),
        Way {
            zero: Zero::Three,
            ..on("dp=2, ep=2, cp=2, tp=2", Gather)
        },
        Way {
            schedule: "zbh1",
            zero: Zero::One,
            ..on("pp=2, dp=2, ep=2, cp=2", Ring)
        },
        Way {
            sequence_parallel: true,
            balance: false,
            ..on("pp=2, dp=2, ep=2, tp=2", Heads)
        },
    ])
}

#[test]
fn all_five_axes_give_the_losses_of_one_device() -> Result<()> {
    hold(&[Way {
        sequence_parallel: true,
        zero: Zero::One,
        ..on("pp=2, dp=2, ep=2, cp=2, tp=2", ContextAttention::Ring)
    }])
}

#[test]
fn all_five_axes_have_types_without_values() -> Result<()> {
    use ContextAttention::{Gather, Heads, Ring};
    for attention in [Ring, Gather, Heads] {
        let way = on("pp=2, dp=2, ep=2, cp=2, tp=2", attention);
        let mesh = mesh(way.axes, &meta())?;
        let mut task = task(&mesh, &way)?;
        let texts = Texts(mesh, task.model.order(LENGTH)?);
        let loss = task.loss(&texts.batch(0)?, &Pass::train(Rng::new(3)))?;
        assert_eq!(
            (loss.dtype(), loss.dims()),
            (DType::F64, &[][..]),
            "{way:?}"
        );
        let gradients = loss.backward()?;
        let mut found = 0;
        task.model.visit("", &mut |name, parameter| {
            let value = parameter.value();
            let gradient = gradients.of(value).expect("a gradient");
            assert_eq!(gradient.type_string(), value.type_string(), "{name}");
            found += 1;
        });
        assert!(found > 20);
    }
    Ok(())
}
