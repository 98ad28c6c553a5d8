//! Vectors of sentences.

use crate::{
    Error, Module, Pass, Result,
    data::Tokenizer,
    models::{Model, ModelFiles, Tokens},
    pipeline::{Given, Staged, kind_of, on_mesh},
};
use anymesh_core::{DType, Mesh, Tensor, grad::no_grad};
use serde_json::Value;

/// How the vectors of tokens become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The first one.
    First,
}

/// Sentences as tokens of one length, the shorter ones filled up on their right.
#[derive(Clone, Debug)]
pub struct Sentences {
    /// What a model takes.
    pub tokens: Tokens,
    /// Which tokens are there, `[b, s]`, as 1 and 0.
    pub there: Tensor,
}

impl Sentences {
    /// Texts as rows that are cut over `dp` and filled up with `fill`.
    pub fn new(mesh: &Mesh, rows: &[Vec<u32>], fill: u32) -> Result<Self> {
        let length = rows.iter().map(Vec::len).max().unwrap_or(0);
        let shape = [rows.len(), length];
        let place = (mesh, "[@dp?@ep?, _]");
        let id = |at: &[usize]| rows[at[0]].get(at[1]).copied().unwrap_or(fill) as i32;
        let there = |at: &[usize]| f32::from(u8::from(at[1] < rows[at[0]].len()));
        let mut tokens = Tokens::new(Tensor::from_fn(shape, place, id)?);
        let there = Tensor::from_fn(shape, place, there)?;
        if rows.iter().any(|row| row.len() < length) {
            tokens.mask = Some(there.gt(0)?.unsqueeze(1)?.unsqueeze(1)?);
        }
        Ok(Self { tokens, there })
    }

    /// One vector for each, `[b, width]`, from those of its tokens `[b, s, width]`.
    #[track_caller]
    pub fn pool(&self, hidden: &Tensor, pooling: Pooling) -> Result<Tensor> {
        Ok(match pooling {
            Pooling::First => hidden.narrow(1, 0, 1)?.squeeze(&[1])?,
            Pooling::Mean => {
                let there = on_mesh(&self.there, hidden.mesh())?;
                let there = there.cast(hidden.dtype())?.unsqueeze(2)?;
                let sum = hidden.mul(&there)?.sum(&[1], false)?;
                sum.div(&there.sum(&[1], false)?)?
            }
        })
    }
}

/// Vectors `[b, width]` at length one.
#[track_caller]
pub fn normalized(x: &Tensor) -> Result<Tensor> {
    let norm = x.square()?.sum(&[-1], true)?.sqrt()?;
    Ok(x.div(&norm.maximum(1e-12)?)?)
}

/// A model that makes vectors of sentences, such that near meanings have near vectors.
#[derive(Debug)]
pub struct Encoder {
    /// The model.
    pub model: Model,
    /// How texts become tokens; longer texts are cut off.
    pub tokenizer: Tokenizer,
    /// How the vectors of tokens become one.
    pub pooling: Pooling,
    /// Whether vectors have length one.
    pub normalize: bool,
    /// Whether texts are made lower-case first.
    pub lower_case: bool,
    /// Texts that go through the model at once.
    pub batch: usize,
}

impl Encoder {
    /// Of a model that is loaded and its files. What `modules.json`, `1_Pooling/config.json` and
    /// `sentence_bert_config.json` say counts; where there are none, vectors are means of length
    /// one.
    pub fn new(model: Model, files: &ModelFiles) -> Result<Self> {
        let mut encoder = Self {
            tokenizer: files.tokenizer()?,
            pooling: Pooling::Mean,
            normalize: true,
            lower_case: false,
            batch: 32,
            model,
        };
        if let Some(modules) = files.json("modules.json")? {
            encoder.normalize = false;
            for module in modules.as_array().into_iter().flatten() {
                encoder.add_module(module, files)?;
            }
        }
        let sentences = files.json("sentence_bert_config.json")?.unwrap_or_default();
        encoder.lower_case = sentences.get("do_lower_case") == Some(&Value::Bool(true));
        let longest = encoder.model.config().longest();
        let said = sentences.get("max_seq_length").and_then(Value::as_u64);
        let max_length = said.map_or(longest, |n| longest.min(n as usize));
        encoder.tokenizer = encoder.tokenizer.truncated(max_length)?;
        Ok(encoder)
    }

    /// Takes over what one entry of `modules.json` says.
    fn add_module(&mut self, module: &Value, files: &ModelFiles) -> Result<()> {
        let field = |name: &str| module.get(name).and_then(Value::as_str).unwrap_or_default();
        match field("type").rsplit('.').next().unwrap_or_default() {
            "Transformer" => {}
            "Normalize" => self.normalize = true,
            "Pooling" => {
                let name = format!("{}/config.json", field("path"));
                let settings = files.json(&name)?.unwrap_or_default();
                self.pooling = pooling(&settings)?;
            }
            other => {
                let detail =
                    format!("'{other}' is not supported: Transformer, Pooling and Normalize are");
                return Err(Error::config("modules.json", detail));
            }
        }
        Ok(())
    }

    /// The tokens of a text, cut off where it is too long.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        match self.lower_case {
            true => self.tokenizer.encode_whole(&text.to_lowercase()),
            false => self.tokenizer.encode_whole(text),
        }
    }

    /// Vectors `[b, width]` of sentences, on the device; with gradients where they are on.
    #[track_caller]
    pub fn forward(&self, sentences: &Sentences, pass: &Pass) -> Result<Tensor> {
        let hidden = self.model.hidden(&sentences.tokens, pass, None)?;
        self.vectors(sentences, &hidden)
    }

    #[track_caller]
    fn vectors(&self, sentences: &Sentences, hidden: &Tensor) -> Result<Tensor> {
        let pooled = sentences.pool(hidden, self.pooling)?;
        match self.normalize {
            true => normalized(&pooled),
            false => Ok(pooled),
        }
    }

    /// The vectors of texts. Texts of like lengths go through the model together, so that little is
    /// filled up.
    pub fn encode<T: AsRef<str>>(&self, texts: &[T]) -> Result<Vec<Vec<f32>>> {
        let rows: Vec<Vec<u32>> = texts
            .iter()
            .map(|text| self.tokens(text.as_ref()))
            .collect::<Result<_>>()?;
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|i| rows[*i].len());
        let mut vectors = vec![vec![]; rows.len()];
        for places in order.chunks(self.batch.max(1)) {
            let batch: Vec<Vec<u32>> = places.iter().map(|i| rows[*i].clone()).collect();
            let sentences = Sentences::new(self.model.mesh(), &batch, self.fill())?;
            let out = no_grad(|| self.forward(&sentences, &Pass::eval()))?;
            let width = out.dims()[1];
            let values = out.cast(DType::F32)?.full_tensor()?.to_vec::<f32>()?;
            for (place, vector) in places.iter().zip(values.chunks(width.max(1))) {
                vectors[*place] = vector.to_vec();
            }
        }
        Ok(vectors)
    }

    /// The token that shorter texts are filled up with.
    fn fill(&self) -> u32 {
        match &self.model {
            Model::Bert(bert) => bert.config().pad_token_id as u32,
            _ => 0,
        }
    }
}

/// A micro-batch is some sentences, and the last stage gives their vectors: for losses over all of
/// them, with [`Pipeline::run_cached`](crate::pipeline::Pipeline::run_cached).
impl Staged for Encoder {
    type Batch = Sentences;

    fn model(&self) -> &dyn Module {
        &self.model
    }

    fn stages(&self) -> usize {
        self.model.split().stages()
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        self.model.split().mesh_of(stage)
    }

    fn kind_of(&self, sentences: &Sentences) -> Option<String> {
        let tokens = &sentences.tokens;
        let more = [tokens.positions.as_ref(), tokens.mask.as_ref()];
        let all = [&tokens.ids, &sentences.there].into_iter();
        kind_of(self.model.mesh(), all.chain(more.into_iter().flatten()))
    }

    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        sentences: &Sentences,
        pass: &Pass,
    ) -> Result<Vec<Tensor>> {
        let stream = given.inputs.first();
        let gave = self.model.stage(stage, stream, &sentences.tokens, pass)?;
        Ok(vec![match stage + 1 == self.stages() {
            true => self.vectors(sentences, &gave)?,
            false => gave,
        }])
    }
}

/// What the settings of a pooling module say.
fn pooling(settings: &Value) -> Result<Pooling> {
    let mut found = None;
    for (key, value) in settings.as_object().into_iter().flatten() {
        if !key.starts_with("pooling_mode_") || *value != Value::Bool(true) {
            continue;
        }
        let pooling = match key.as_str() {
            "pooling_mode_mean_tokens" => Pooling::Mean,
            "pooling_mode_cls_token" => Pooling::First,
            _ => {
                return Err(Error::config(
                    key,
                    "only means and first tokens are supported",
                ));
            }
        };
        if found.replace(pooling).is_some() {
            return Err(Error::config(
                key,
                "several poolings at once are not supported",
            ));
        }
    }
    found.ok_or_else(|| Error::config("pooling_mode_mean_tokens", "no pooling is said to be used"))
}
