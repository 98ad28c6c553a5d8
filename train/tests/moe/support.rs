//! Small mixtures of experts and their data.

use anymesh_core::{DType, Mesh, Tensor};
use anymesh_train::{
    Build, Policy, Result, Zero,
    data::Batch,
    models::{LlamaConfig, ModelConfig, MoeConfig},
    objective::Language,
    optim::{AdamW, Clip, Groups, Optimizer, Rule, Schedule},
    pipeline::{ScheduleChoice, Stages},
    trainer::{Feed, LanguageModel, Settings, StepReport, Task, Trainer},
};
use std::path::PathBuf;

/// A folder that is removed when the test is over.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let folder = format!("anymesh-moe-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(folder);
        drop(std::fs::remove_dir_all(&path));
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

const VOCABULARY: usize = 40;
const LENGTH: usize = 6;

/// Experts in all layers, without drops, with both losses.
pub(crate) fn mixtral() -> MoeConfig {
    MoeConfig {
        llama: LlamaConfig {
            model_type: "mixtral".into(),
            vocab_size: VOCABULARY,
            hidden_size: 12,
            intermediate_size: 10,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            initializer_range: 0.3,
            ..LlamaConfig::default()
        },
        num_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 10,
        norm_topk_prob: true,
        router_aux_loss_coef: 0.02,
        router_z_loss_coef: 0.001,
        ..MoeConfig::default()
    }
}

/// As DeepSeek has them: a first layer without experts, sigmoids, groups, a shared expert, a bias
/// that balances. Full experts drop tokens.
pub(crate) fn deep() -> MoeConfig {
    let mixtral = mixtral();
    MoeConfig {
        llama: LlamaConfig {
            model_type: "qwen3_moe".into(),
            intermediate_size: 16,
            num_hidden_layers: 3,
            tie_word_embeddings: true,
            ..mixtral.llama.clone()
        },
        first_k_dense_replace: 1,
        shared_expert_intermediate_size: Some(6),
        scoring_func: "sigmoid".into(),
        routed_scaling_factor: 1.5,
        n_group: 2,
        topk_group: 2,
        router_bias_update_rate: 0.05,
        expert_capacity_factor: Some(1.25),
        ..mixtral
    }
}

/// A way to run a model.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) axes: &'static str,
    pub(crate) schedule: &'static str,
    pub(crate) zero: Zero,
    pub(crate) recompute: bool,
}

pub(crate) fn on(axes: &'static str) -> Way {
    Way {
        axes,
        schedule: "1f1b",
        zero: Zero::Off,
        recompute: false,
    }
}

pub(crate) fn mesh(axes: &str) -> Result<Mesh> {
    let cpu = anymesh_backend_cpu::device();
    Ok(match axes {
        "" => Mesh::single(&cpu),
        axes => Mesh::new(axes, &cpu)?,
    })
}

pub(crate) fn trainer(
    mesh: &Mesh,
    config: &MoeConfig,
    way: &Way,
    settings: Settings,
) -> Result<Trainer<LanguageModel>> {
    let b = Build::new(mesh, Policy::all(DType::F64), 11)
        .zero(way.zero, &["dp", "ep"])
        .stages(Stages::default());
    let mut model = ModelConfig::Moe(config.clone()).build(&b)?;
    model.set_recompute(way.recompute);
    let rule = Rule::AdamW(AdamW {
        lr: 3e-3,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&model, &Groups::all(rule))?;
    optimizer.clip = Some(Clip::to(1.0));
    let mut task = LanguageModel::new(model, Language::default(), LENGTH);
    task.schedule = ScheduleChoice::Named(way.schedule.into());
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    Trainer::new(task, optimizer, schedule, settings)
}

/// Texts in two micro-batches, of which the second is too small for four ranks.
pub(crate) struct Texts(pub(crate) Mesh);

impl Feed<Batch> for Texts {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        let mut first = consumed as usize;
        let mut batches = vec![];
        for (rows, length) in [(4, LENGTH), (3, LENGTH - 1)] {
            let place = (&self.0, "[@dp?@ep?, _]");
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
            batches.push(Batch::new(ids, labels));
        }
        Ok(Some((batches, 7)))
    }
}

/// What some steps did.
pub(crate) fn steps(trainer: &mut Trainer<LanguageModel>, count: usize) -> Result<Vec<StepReport>> {
    let mut feed = Texts(trainer.task.mesh().clone());
    let mut seen = vec![];
    for _ in 0..count {
        let report = trainer.step(&mut feed)?.expect("the data never ends");
        assert!(!report.skipped);
        seen.push(report);
    }
    Ok(seen)
}

pub(crate) fn run_on(
    mesh: &Mesh,
    config: &MoeConfig,
    way: &Way,
    count: usize,
) -> Result<Vec<StepReport>> {
    let mut trainer = trainer(mesh, config, way, Settings::default())?;
    steps(&mut trainer, count)
}
