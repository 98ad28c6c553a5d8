//! Language models with their tokenizers: text in, text out.

use crate::{
    Build, ChatTemplate, Error, Finish, Generate, Message, Result,
    data::Tokenizer,
    generate,
    models::{Model, ModelFiles},
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// A model that goes on with texts.
///
/// ```no_run
/// # use anymesh_train::{Build, Generate, Policy, TextModel};
/// # let device = anymesh_backend_cpu::device();
/// let model = TextModel::open("SmolLM2-135M-Instruct.gguf", &Build::new(&device, Policy::f32(), 0))?;
/// let prompt = model.chat("What is the capital of France?")?;
/// let answer = model.complete(&prompt, &Generate::default(), &mut |piece| {
///     print!("{piece}");
///     true
/// })?;
/// println!("\n{:.1} tokens/s", answer.tokens_per_second());
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct TextModel {
    /// The model.
    pub model: Model,
    /// How texts become tokens and tokens texts.
    pub tokenizer: Tokenizer,
    /// How conversations are written, where the model was made for them.
    pub template: Option<ChatTemplate>,
    path: PathBuf,
}

/// What came after a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The text, without the prompt.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it ends.
    pub finish: Finish,
    /// How many tokens the prompt has.
    pub prompt_tokens: usize,
    /// How long it took until the first token.
    pub first: Duration,
    /// How long the others took.
    pub others: Duration,
}

impl Completion {
    /// Tokens after the first, each second.
    pub fn tokens_per_second(&self) -> f64 {
        let count = self.tokens.len().saturating_sub(1) as f64;
        count / self.others.as_secs_f64().max(1e-9)
    }
}

impl TextModel {
    /// Opens the model at a path, laid out as `b` says.
    pub fn open(path: impl AsRef<Path>, b: &Build) -> Result<Self> {
        let files = ModelFiles::open(path)?;
        Self::new(files.load(b)?, &files)
    }

    /// Of a model that is loaded and its files.
    pub fn new(model: Model, files: &ModelFiles) -> Result<Self> {
        Ok(Self {
            model,
            tokenizer: files.tokenizer()?,
            template: ChatTemplate::of(files)?,
            path: files.path().into(),
        })
    }

    /// A text as tokens, with those that the model wants at its beginning.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode_whole(text)
    }

    /// A question to the model as tokens that it answers after. An error where the model was not
    /// made for conversations.
    pub fn chat(&self, question: &str) -> Result<Vec<u32>> {
        self.conversation(&[Message::new("user", question)])
    }

    /// A conversation as tokens that the model goes on after.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            return Err(Error::config(
                "chat_template",
                format!(
                    "{} has none: it was made to go on with texts, not to answer",
                    self.path.display()
                ),
            ));
        };
        // The template has the tokens of the beginning itself.
        self.tokenizer.encode(&template.render(messages)?)
    }

    /// Goes on after a prompt, until a token comes that ends texts. `watch` is told each piece of
    /// text as it comes, and whether to go on is what it answers.
    pub fn complete(
        &self,
        prompt: &[u32],
        options: &Generate,
        watch: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Completion> {
        let mut options = options.clone();
        options.stop.extend(&self.tokenizer.special().stops);
        let mut pieces = self.tokenizer.stream();
        let (begun, mut came, mut failed) = (Instant::now(), vec![], None);
        let prompts = [prompt.to_vec()];
        let mut texts = generate(&self.model, &prompts, &options, &mut |_, token| {
            came.push(Instant::now());
            match pieces.push(token) {
                Ok(piece) => piece.is_empty() || watch(&piece),
                Err(error) => {
                    failed = Some(error);
                    false
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = pieces.finish()?;
        if !rest.is_empty() {
            watch(&rest);
        }
        let generated = texts.remove(0);
        let first = came.first().copied().unwrap_or(begun);
        let last = came.last().copied().unwrap_or(first);
        Ok(Completion {
            text: self.tokenizer.decode(&generated.tokens)?,
            tokens: generated.tokens,
            finish: generated.finish,
            prompt_tokens: prompt.len(),
            first: first - begun,
            others: last - first,
        })
    }
}
