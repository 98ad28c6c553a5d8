//! Text as its tokens come.

use super::Tokenizer;
use crate::Result;

/// A character has at most four bytes, and a token at least one: what has not become a character
/// after more tokens never will.
const PATIENCE: usize = 4;

/// Decodes tokens one by one. A token may be half a character, and may look different after
/// others: text is given out as soon as no later token changes it.
///
/// ```
/// # use anymesh_train::data::Tokenizer;
/// let tokenizer = Tokenizer::bytes();
/// let mut stream = tokenizer.stream();
/// let pieces: Result<Vec<String>, _> = "né".bytes().map(|b| stream.push(b.into())).collect();
/// assert_eq!(pieces?, ["n", "", "é"]);
/// assert_eq!(stream.finish()?, "");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// The tokens of the piece that was given out last, for what comes to follow, and those after
    /// it.
    tokens: Vec<u32>,
    /// How many of them were given out.
    told: usize,
}

impl<'t> TextStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: vec![],
            told: 0,
        }
    }

    /// What a token adds to the text, and those before it that were held back.
    pub fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let fresh = self.fresh()?;
        let waits = fresh.ends_with('\u{fffd}') && self.tokens.len() - self.told < PATIENCE;
        if fresh.is_empty() || waits {
            return Ok(String::new());
        }
        self.tokens.drain(..self.told);
        self.told = self.tokens.len();
        Ok(fresh)
    }

    /// What is held back at the end.
    pub fn finish(self) -> Result<String> {
        self.fresh()
    }

    /// The text that was not given out.
    fn fresh(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.tokens[..self.told])?;
        let all = self.tokenizer.decode(&self.tokens)?;
        let same = before.bytes().zip(all.bytes()).take_while(|(a, b)| a == b);
        let mut at = same.count();
        while !all.is_char_boundary(at) {
            at -= 1;
        }
        Ok(all[at..].into())
    }
}
