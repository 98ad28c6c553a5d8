//! `anymesh generate`: text that a model goes on with.

use crate::model::Placed;
use anymesh::train::{self, Error, Finish, Result, Sampling, TextModel};
use clap::Args;
use std::{
    io::{IsTerminal, Read, Write},
    path::PathBuf,
    time::Instant,
};

/// Arguments of `anymesh generate`.
#[derive(Args)]
pub(crate) struct Generate {
    /// A Hugging Face folder, a GGUF file, or a checkpoint of a training run.
    model: PathBuf,
    /// The text to go on with; `-` reads it from stdin.
    prompt: String,
    /// Ask it as a question, written as the model's chat template says.
    #[arg(long)]
    chat: bool,
    /// The most tokens.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// 0 takes the likeliest token always; higher is more daring.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Draw from so many of the likeliest tokens only; 0 for all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Draw from the likeliest tokens with this share of the probability only.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Make tokens that the text has already less likely; 1 for no difference.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// The same seed gives the same text, on every device and mesh.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    placed: Placed,
}

impl Generate {
    pub(crate) fn run(self) -> Result<()> {
        let options = train::Generate {
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                repetition_penalty: self.repetition_penalty,
                seed: self.seed,
            },
            max_tokens: self.max_tokens,
            stop: vec![],
        };
        options.sampling.check()?;
        let begun = Instant::now();
        let model = TextModel::open(&self.model, &self.placed.build()?)?;
        let loaded = begun.elapsed();
        let text = match self.prompt.as_str() {
            "-" => {
                let mut text = String::new();
                let read = std::io::stdin().read_to_string(&mut text);
                read.map_err(|e| Error::io("-", "read", &e))?;
                text
            }
            text => text.into(),
        };
        let prompt = match self.chat {
            true => model.chat(&text)?,
            false => model.tokens(&text)?,
        };
        let mut out = std::io::stdout();
        if !self.chat && out.is_terminal() {
            print(&mut out, &text);
        }
        let done = model.complete(&prompt, &options, &mut |piece| print(&mut out, piece))?;
        print(&mut out, "\n");
        eprintln!(
            "{} tokens after {} ({}); loaded in {:.1} s, first token after {:.2} s, then {:.1} tokens/s",
            done.tokens.len(),
            done.prompt_tokens,
            match done.finish {
                Finish::Stop => "complete",
                Finish::Length => "as many as asked for",
                Finish::Full => "the model takes no longer texts",
                Finish::Told => "nobody reads on",
            },
            loaded.as_secs_f64(),
            done.first.as_secs_f64(),
            done.tokens_per_second(),
        );
        Ok(())
    }
}

/// Prints at once; false where nobody reads any more.
fn print(out: &mut impl Write, text: &str) -> bool {
    write!(out, "{text}").and_then(|()| out.flush()).is_ok()
}
