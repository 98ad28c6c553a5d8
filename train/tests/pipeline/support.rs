//! Small models and their data.

use anymesh_core::{DType, Device, Mesh, Tensor};
use anymesh_schedule::Placement;
use anymesh_train::{
    Build, Lora, Policy, Result, Zero, add_lora,
    data::Batch,
    models::{Gpt2Config, LlamaConfig, ModelConfig},
    objective::Language,
    optim::{AdamW, Clip, Groups, Optimizer, Rule, Schedule},
    pipeline::{ScheduleChoice, Stages},
    trainer::{Feed, LanguageModel, Settings, Trainer},
};

pub(crate) const VOCABULARY: usize = 40;
pub(crate) const LENGTH: usize = 6;

/// Five layers whose head is the embedding, with dropout.
pub(crate) fn tied() -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        vocab_size: VOCABULARY,
        n_positions: LENGTH,
        n_embd: 12,
        n_layer: 5,
        n_head: 2,
        resid_pdrop: 0.1,
        embd_pdrop: 0.1,
        attn_pdrop: 0.0,
        ..Gpt2Config::default()
    })
}

/// Four layers with a head of their own.
pub(crate) fn untied() -> ModelConfig {
    ModelConfig::Llama(LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 4,
        num_attention_heads: 2,
        ..LlamaConfig::default()
    })
}

/// A way to run a model.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) axes: &'static str,
    pub(crate) stages: Stages,
    pub(crate) schedule: ScheduleChoice,
    pub(crate) zero: Zero,
    pub(crate) recompute: bool,
    pub(crate) lora: bool,
}

impl Default for Way {
    fn default() -> Self {
        Self {
            axes: "",
            stages: Stages::default(),
            schedule: ScheduleChoice::default(),
            zero: Zero::Off,
            recompute: false,
            lora: false,
        }
    }
}

/// A named schedule with its placement.
pub(crate) fn named(axes: &'static str, name: &str, chunks: usize) -> Way {
    let placement = match name {
        "zbv" | "dualpipev" => Placement::V,
        _ => Placement::Loop,
    };
    Way {
        axes,
        stages: Stages {
            chunks,
            placement,
            ..Stages::default()
        },
        schedule: ScheduleChoice::Named(name.into()),
        ..Way::default()
    }
}

fn trainer(mesh: &Mesh, config: &ModelConfig, way: &Way) -> Result<Trainer<LanguageModel>> {
    let b = Build::new(mesh, Policy::all(DType::F64), 11)
        .zero(way.zero, &["dp"])
        .stages(way.stages.clone());
    let mut model = config.build(&b)?;
    model.set_recompute(way.recompute);
    if way.lora {
        let lora = Lora {
            rank: 2,
            dropout: 0.3,
            ..Lora::default()
        };
        add_lora(&mut model, "*.q_proj.weight, *.v_proj.weight", &lora)?;
    }
    let rule = Rule::AdamW(AdamW {
        lr: 3e-3,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&model, &Groups::all(rule))?;
    optimizer.clip = Some(Clip::to(1.0));
    let mut task = LanguageModel::new(model, Language::default(), LENGTH);
    task.schedule = way.schedule.clone();
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    Trainer::new(task, optimizer, schedule, Settings::default())
}

/// Texts that can be learnt, in micro-batches of different sizes.
pub(crate) struct Texts {
    pub(crate) mesh: Mesh,
    pub(crate) rows: Vec<(usize, usize)>,
}

impl Feed<Batch> for Texts {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        let mut first = consumed as usize;
        let mut batch = |&(rows, length): &(usize, usize)| {
            let place = (&self.mesh, "[@dp?, _]");
            let token = |row: usize, at: usize| {
                ((row * 7919 % 1009 + at * (1 + row % 3)) % VOCABULARY) as i32
            };
            let ids = Tensor::from_fn([rows, length], place, |at| token(first + at[0], at[1]))?;
            let labels = Tensor::from_fn([rows, length], place, |at| match at[1] {
                // A token without a label here and there: micro-batches count differently.
                2 if (first + at[0]).is_multiple_of(3) => -100,
                _ => token(first + at[0], at[1] + 1),
            })?;
            first += rows;
            Ok(Batch::new(ids, labels))
        };
        let batches = self.rows.iter().map(&mut batch).collect::<Result<_>>()?;
        let samples = self.rows.iter().map(|r| r.0 as u64).sum();
        Ok(Some((batches, samples)))
    }
}

/// The losses and norms of some steps.
pub(crate) fn run(
    device: &Device,
    config: &ModelConfig,
    way: &Way,
    rows: &[(usize, usize)],
    steps: usize,
) -> Result<Vec<(f64, f64)>> {
    let mesh = match way.axes {
        "" => Mesh::single(device),
        axes => Mesh::new(axes, device)?,
    };
    run_on(&mesh, config, way, rows, steps)
}

/// The same on a mesh, of which this process may have a part.
pub(crate) fn run_on(
    mesh: &Mesh,
    config: &ModelConfig,
    way: &Way,
    rows: &[(usize, usize)],
    steps: usize,
) -> Result<Vec<(f64, f64)>> {
    let mut trainer = trainer(mesh, config, way)?;
    let mut feed = Texts {
        mesh: mesh.clone(),
        rows: rows.to_vec(),
    };
    let mut seen = vec![];
    for _ in 0..steps {
        let report = trainer.step(&mut feed)?.expect("the data never ends");
        assert!(!report.skipped);
        seen.push((report.loss, report.norm));
    }
    Ok(seen)
}
