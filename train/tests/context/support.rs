//! Small models, their data, and ways to run them.

use anymesh_core::{DType, Device, Mesh, Tensor, ops::SequenceOrder};
use anymesh_train::{
    Build, Policy, Result, Zero,
    data::Batch,
    models::{Gpt2Config, LlamaConfig, Model, ModelConfig},
    nn::{Context, ContextAttention},
    objective::Language,
    optim::{AdamW, Clip, Groups, Optimizer, Rule, Schedule},
    trainer::{Feed, LanguageModel, Settings, Trainer},
};

pub(crate) const VOCABULARY: usize = 40;
pub(crate) const WAYS: [ContextAttention; 3] = [
    ContextAttention::Heads,
    ContextAttention::Gather,
    ContextAttention::Ring,
];

/// Two layers with `keys` heads of keys for eight of queries.
pub(crate) fn llama(keys: usize) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        num_key_value_heads: Some(keys),
        ..LlamaConfig::default()
    })
}

/// Two layers with learnt positions and a tied head; `dropout` is that of attention, the stream
/// drops 0.1 with it.
pub(crate) fn gpt2(dropout: f64) -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        vocab_size: VOCABULARY,
        n_positions: 32,
        n_embd: 16,
        n_layer: 2,
        n_head: 4,
        resid_pdrop: if dropout > 0.0 { 0.1 } else { 0.0 },
        embd_pdrop: 0.0,
        attn_pdrop: dropout,
        ..Gpt2Config::default()
    })
}

/// A way to run a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) axes: &'static str,
    pub(crate) context: Context,
    pub(crate) documents: bool,
    pub(crate) recompute: bool,
    pub(crate) sequence_parallel: bool,
    pub(crate) zero: Zero,
    pub(crate) dtype: DType,
    pub(crate) length: usize,
}

impl Default for Way {
    fn default() -> Self {
        Self {
            axes: "",
            context: Context::default(),
            documents: false,
            recompute: false,
            sequence_parallel: false,
            zero: Zero::Off,
            dtype: DType::F64,
            length: 16,
        }
    }
}

/// On a mesh, in one of the ways, with pairs of chunks or without.
pub(crate) fn on(axes: &'static str, attention: ContextAttention, balance: bool) -> Way {
    Way {
        axes,
        context: Context {
            attention,
            balance: Some(balance),
        },
        ..Way::default()
    }
}

pub(crate) fn model(mesh: &Mesh, config: &ModelConfig, way: &Way) -> Result<Model> {
    let b = Build::new(mesh, Policy::all(way.dtype), 11)
        .zero(way.zero, &["dp", "cp"])
        .sequence_parallel(way.sequence_parallel)
        .long_sequences(way.context);
    let mut model = config.build(&b)?;
    model.set_recompute(way.recompute);
    Ok(model)
}

fn trainer(mesh: &Mesh, config: &ModelConfig, way: &Way) -> Result<Trainer<LanguageModel>> {
    let model = model(mesh, config, way)?;
    let rule = Rule::AdamW(AdamW {
        lr: 3e-3,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&model, &Groups::all(rule))?;
    optimizer.clip = Some(Clip::to(1.0));
    let options = Language {
        output: way.dtype,
        ..Language::default()
    };
    let task = LanguageModel::new(model, options, way.length);
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    Trainer::new(task, optimizer, schedule, Settings::default())
}

/// Texts that can be learnt, in micro-batches of these rows, placed in the order of the model.
pub(crate) struct Texts {
    pub(crate) mesh: Mesh,
    pub(crate) rows: Vec<usize>,
    pub(crate) length: usize,
    pub(crate) documents: bool,
    pub(crate) order: SequenceOrder,
}

/// The document of a position and where in it that is: documents of different lengths in each row.
fn document(row: usize, at: usize) -> (usize, usize) {
    let each = 3 + row % 4 * 2;
    (at / each, at % each)
}

impl Texts {
    fn batch(&self, first: usize, rows: usize) -> Result<Batch> {
        let (length, order) = (self.length, self.order);
        let place = (&self.mesh, "[@dp?, @cp?]");
        // By row and original position.
        let tensor = |f: &dyn Fn(usize, usize) -> i32| {
            Tensor::from_fn([rows, length], place, |at| {
                f(first + at[0], order.position(at[1], length))
            })
        };
        let token =
            |row: usize, at: usize| ((row * 7919 % 1009 + at * (1 + row % 3)) % VOCABULARY) as i32;
        let label = |row: usize, at: usize| match at {
            // A token without a label here and there: ranks count differently.
            2 | 9 if row.is_multiple_of(3) => -100,
            _ => token(row, at + 1),
        };
        let mut batch = Batch::new(tensor(&token)?, tensor(&label)?);
        batch.order = order;
        if self.documents {
            batch.documents = Some(tensor(&|row, at| document(row, at).0 as i32)?);
            batch.positions = Some(tensor(&|row, at| document(row, at).1 as i32)?);
        }
        Ok(batch)
    }
}

impl Feed<Batch> for Texts {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        let (mut first, mut batches) = (consumed as usize, vec![]);
        for rows in &self.rows {
            batches.push(self.batch(first, *rows)?);
            first += rows;
        }
        Ok(Some((batches, first as u64 - consumed)))
    }
}

/// The losses and norms of some steps.
pub(crate) fn run(
    device: &Device,
    config: &ModelConfig,
    way: &Way,
    rows: &[usize],
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
    rows: &[usize],
    steps: usize,
) -> Result<Vec<(f64, f64)>> {
    let mut trainer = trainer(mesh, config, way)?;
    let mut feed = Texts {
        mesh: mesh.clone(),
        rows: rows.to_vec(),
        length: way.length,
        documents: way.documents,
        order: trainer.task.model.order(way.length)?,
    };
    let mut seen = vec![];
    for _ in 0..steps {
        let report = trainer.step(&mut feed)?.expect("the data never ends");
        assert!(!report.skipped);
        seen.push((report.loss, report.norm));
    }
    Ok(seen)
}
