//! Text that a model goes on with.

use crate::{
    Error, Pass, Result, Sampling,
    models::{Model, Tokens},
    nn::Cache,
};
use anymesh_core::{DType, Tensor, grad::no_grad};

/// How texts are gone on with.
#[derive(Clone, Debug, PartialEq)]
pub struct Generate {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The most tokens for each text.
    pub max_tokens: usize,
    /// Tokens after which a text is complete; they are not part of it.
    pub stop: Vec<u32>,
}

impl Default for Generate {
    /// The likeliest tokens, 128 of them at most.
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_tokens: 128,
            stop: vec![],
        }
    }
}

/// Why a text is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// One of the tokens came after which it is.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
    /// The model takes no longer texts.
    Full,
    /// Whoever watched had seen enough.
    Told,
}

/// What a model went on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub finish: Finish,
}

/// Goes on with each of several prompts. `watch` is told each token as it comes, with the number of
/// its prompt, and whether to go on with that text is what it answers.
///
/// Prompts may have different lengths. They are cut over `dp`, and keys and values are kept as the
/// model is cut over `tp`.
///
/// ```
/// # use anymesh_train::{Build, Generate, Policy, generate, models::{LlamaConfig, ModelConfig}};
/// # let device = anymesh_backend_cpu::device();
/// # let config = LlamaConfig {
/// #     vocab_size: 32, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 2, ..LlamaConfig::default()
/// # };
/// # let model = ModelConfig::Llama(config).build(&Build::new(&device, Policy::f32(), 1))?;
/// let options = Generate { max_tokens: 5, ..Generate::default() };
/// let mut seen = 0;
/// let texts = generate(&model, &[vec![1, 2, 3], vec![7]], &options, &mut |_, _| { seen += 1; true })?;
/// assert_eq!((texts[0].tokens.len(), texts[1].tokens.len(), seen), (5, 5, 10));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn generate(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &Generate,
    watch: &mut dyn FnMut(usize, u32) -> bool,
) -> Result<Vec<Generated>> {
    let sampling = options.sampling;
    sampling.check()?;
    if prompts.is_empty() {
        return Ok(vec![]);
    }
    let longest = model.config().longest();
    let device = model.mesh().device(0).clone();
    let draws: Vec<Vec<f64>> = (0..prompts.len())
        .map(|row| sampling.draws(row, options.max_tokens, &device))
        .collect::<Result<_>>()?;
    let mut texts: Vec<Text<'_>> = prompts.iter().map(|p| Text::new(p)).collect();
    no_grad(|| {
        let mut decoder = Decoder::new(model, prompts)?;
        let mut logits = match options.max_tokens {
            0 => None,
            _ => Some(decoder.prefill(prompts)?),
        };
        for step in 0..options.max_tokens {
            let Some(current) = logits.take() else { break };
            let next = choose(&current, &sampling, &texts, &draws, step)?;
            for (row, (text, token)) in texts.iter_mut().zip(&next).enumerate() {
                if text.finish.is_some() {
                    continue;
                }
                if options.stop.contains(token) {
                    text.finish = Some(Finish::Stop);
                    continue;
                }
                text.tokens.push(*token);
                if !watch(row, *token) {
                    text.finish = Some(Finish::Told);
                } else if text.tokens.len() == options.max_tokens {
                    text.finish = Some(Finish::Length);
                } else if decoder.length >= longest {
                    text.finish = Some(Finish::Full);
                }
            }
            if texts.iter().any(|text| text.finish.is_none()) {
                logits = Some(decoder.step(&next)?);
            }
        }
        Ok::<_, Error>(())
    })?;
    let done = |text: Text<'_>| Generated {
        tokens: text.tokens,
        finish: text.finish.unwrap_or(Finish::Length),
    };
    Ok(texts.into_iter().map(done).collect())
}

/// A text under way.
struct Text<'p> {
    prompt: &'p [u32],
    tokens: Vec<u32>,
    finish: Option<Finish>,
}

impl<'p> Text<'p> {
    fn new(prompt: &'p [u32]) -> Self {
        Self {
            prompt,
            tokens: vec![],
            finish: None,
        }
    }
}

/// The next token of each text by logits `[b, tokens]`.
fn choose(
    logits: &Tensor,
    sampling: &Sampling,
    texts: &[Text<'_>],
    draws: &[Vec<f64>],
    step: usize,
) -> Result<Vec<u32>> {
    if sampling.is_plain_greedy() {
        let next = logits.argmax(Some(-1), false)?.full_tensor()?;
        let next = next.cast(DType::I32)?.to_vec::<i32>()?;
        return Ok(next.into_iter().map(|t| t as u32).collect());
    }
    let width = logits.dims()[1];
    let values = logits.cast(DType::F32)?.full_tensor()?.to_vec::<f32>()?;
    let rows = values.chunks(width.max(1)).zip(texts).zip(draws);
    let next = rows.map(|((row, text), draws)| {
        let so_far = [text.prompt, &text.tokens].concat();
        sampling.next(row, &so_far, draws[step])
    });
    Ok(next.collect())
}

/// A model that goes through texts token by token. Shorter prompts are filled up on their left,
/// with tokens that nothing sees.
#[derive(Debug)]
pub struct Decoder<'m> {
    model: &'m Model,
    caches: Vec<Cache>,
    /// How much each prompt was filled up.
    fill: Vec<usize>,
    /// Tokens so far, with what was filled up.
    length: usize,
}

impl<'m> Decoder<'m> {
    /// For these prompts.
    pub fn new(model: &'m Model, prompts: &[Vec<u32>]) -> Result<Self> {
        let length = prompts.iter().map(Vec::len).max().unwrap_or(0);
        if prompts.iter().any(Vec::is_empty) {
            let detail = "it has no tokens, and a model goes on from one at least";
            return Err(Error::config("prompt", detail));
        }
        let tokens = model.config().vocabulary();
        if let Some(id) = prompts.iter().flatten().find(|id| **id as usize >= tokens) {
            return Err(Error::config(
                "prompt",
                format!("token {id} is not one of the model's {tokens}"),
            ));
        }
        Ok(Self {
            model,
            caches: model.caches(),
            fill: prompts.iter().map(|p| length - p.len()).collect(),
            length: 0,
        })
    }

    /// The logits `[b, tokens]` after the prompts.
    #[track_caller]
    pub fn prefill(&mut self, prompts: &[Vec<u32>]) -> Result<Tensor> {
        let filled = prompts.iter().zip(&self.fill);
        let rows: Vec<Vec<u32>> = filled
            .map(|(prompt, fill)| [&vec![0; *fill], prompt.as_slice()].concat())
            .collect();
        self.run(&rows)
    }

    /// The logits `[b, tokens]` after one more token of each text.
    #[track_caller]
    pub fn step(&mut self, next: &[u32]) -> Result<Tensor> {
        let rows: Vec<Vec<u32>> = next.iter().map(|token| vec![*token]).collect();
        self.run(&rows)
    }

    #[track_caller]
    fn run(&mut self, rows: &[Vec<u32>]) -> Result<Tensor> {
        let mesh = self.model.mesh();
        let mut tokens = Tokens::of_rows(mesh, rows)?;
        let (batch, count, from) = (rows.len(), tokens.length()?, self.length);
        self.length += count;
        if self.fill.iter().any(|fill| *fill > 0) {
            let fill = |row: usize| self.fill[row];
            let position = |at: &[usize]| (from + at[1]).saturating_sub(fill(at[0])) as i32;
            let place = (mesh, "[@dp?@ep?, _]");
            tokens.positions = Some(Tensor::from_fn([batch, count], place, position)?);
            let shape = [batch, 1, 1, self.length];
            let place = (mesh, "[@dp?@ep?, _, _, _]");
            let seen = |at: &[usize]| at[3] >= fill(at[0]);
            tokens.mask = Some(Tensor::from_fn(shape, place, seen)?);
        }
        let hidden = self
            .model
            .hidden(&tokens, &Pass::eval(), Some(&mut self.caches))?;
        let last = hidden.narrow(1, count - 1, 1)?;
        Ok(self.model.head(&last)?.squeeze(&[1])?)
    }
}
