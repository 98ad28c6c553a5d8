//! Text to tokens, each with its place.

use crate::Error;

/// One word of the language.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Arrow,
    Equals,
    Colon,
    Open,
    Close,
    Comma,
    Transpose,
    Int(i64),
    Text(String),
    Name(String),
}

impl Token {
    /// What a reader sees.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Arrow => "'->'".into(),
            Self::Equals => "'='".into(),
            Self::Colon => "':'".into(),
            Self::Open => "'['".into(),
            Self::Close => "']'".into(),
            Self::Comma => "','".into(),
            Self::Transpose => "'^T'".into(),
            Self::Int(i) => format!("'{i}'"),
            Self::Text(text) => format!("\"{text}\""),
            Self::Name(name) => format!("'{name}'"),
        }
    }
}

/// A token and where it begins, both counted from 1.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    pub(super) token: Token,
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A text and how its lines are numbered in errors.
pub(super) struct Text<'t> {
    lines: Vec<&'t str>,
    number: Option<usize>,
}

impl<'t> Text<'t> {
    /// Lines are numbered as they come, or all as `number`, where the text is one of a list of
    /// statements.
    pub(super) fn new(text: &'t str, number: Option<usize>) -> Self {
        Self {
            lines: text.lines().collect(),
            number,
        }
    }

    /// The line as the user counts.
    pub(super) fn number(&self, line: usize) -> usize {
        self.number.unwrap_or(line)
    }

    /// An error at a place, with the line and a mark under the column.
    pub(super) fn error(
        &self,
        line: usize,
        column: usize,
        detail: impl std::fmt::Display,
    ) -> Error {
        let text = self
            .lines
            .get(line.wrapping_sub(1))
            .copied()
            .unwrap_or_default();
        let mark = " ".repeat(column.saturating_sub(1));
        Error::Mapping {
            line: self.number(line),
            detail: format!("column {column}: {detail}"),
            trace: format!("  {text}\n  {mark}^"),
        }
    }

    /// The tokens of each statement. A line that ends in `,`, `->` or `=` goes on in the next one;
    /// `#` begins a comment.
    pub(super) fn statements(&self) -> Result<Vec<Vec<Spot>>, Error> {
        let mut out = Vec::new();
        let mut open: Vec<Spot> = Vec::new();
        for (index, text) in self.lines.iter().enumerate() {
            self.line(index + 1, text, &mut open)?;
            let goes_on = matches!(
                open.last().map(|s| &s.token),
                Some(Token::Comma | Token::Arrow | Token::Equals)
            );
            if !goes_on && !open.is_empty() {
                out.push(std::mem::take(&mut open));
            }
        }
        if !open.is_empty() {
            out.push(open);
        }
        Ok(out)
    }

    fn line(&self, line: usize, text: &str, out: &mut Vec<Spot>) -> Result<(), Error> {
        let chars: Vec<char> = text.chars().collect();
        let mut at = 0;
        while let Some(&first) = chars.get(at) {
            let column = at + 1;
            let next = chars.get(at + 1).copied();
            let (token, length) = match first {
                '#' => return Ok(()),
                c if c.is_whitespace() => {
                    at += 1;
                    continue;
                }
                '-' if next == Some('>') => (Token::Arrow, 2),
                '^' if next == Some('T') => (Token::Transpose, 2),
                '=' => (Token::Equals, 1),
                ':' => (Token::Colon, 1),
                '[' => (Token::Open, 1),
                ']' => (Token::Close, 1),
                ',' => (Token::Comma, 1),
                '"' | '\'' => {
                    let length = chars[at + 1..].iter().position(|c| *c == first);
                    let length = length.ok_or_else(|| {
                        self.error(line, column, "this quote is not closed on its line")
                    })?;
                    (
                        Token::Text(chars[at + 1..at + 1 + length].iter().collect()),
                        length + 2,
                    )
                }
                c if in_name(c) || c == '-' && next.is_some_and(|c| c.is_ascii_digit()) => {
                    let mut end = at + 1;
                    while end < chars.len()
                        && (in_name(chars[end])
                            || chars[end] == '-' && chars.get(end + 1) != Some(&'>'))
                    {
                        end += 1;
                    }
                    (
                        self.word(line, column, chars[at..end].iter().collect())?,
                        end - at,
                    )
                }
                c => return Err(self.error(
                    line,
                    column,
                    format!(
                        "'{c}' means nothing here; a name with such characters is written in quotes"
                    ),
                )),
            };
            out.push(Spot {
                token,
                line,
                column,
            });
            at += length;
        }
        Ok(())
    }

    /// An integer where all of it is digits, a name otherwise.
    fn word(&self, line: usize, column: usize, word: String) -> Result<Token, Error> {
        let digits = word.strip_prefix('-').unwrap_or(&word);
        if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            return word
                .parse()
                .map(Token::Int)
                .map_err(|_| self.error(line, column, format!("the number {word} is too large")));
        }
        if word.starts_with('-') {
            return Err(self.error(
                line,
                column,
                format!(
                    "'{word}' is no number, and a name that begins with '-' is written in quotes"
                ),
            ));
        }
        Ok(Token::Name(word))
    }
}

/// The characters of a name that needs no quotes. A `-` may stand inside one too.
pub(super) fn in_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '$' | '*' | '/')
}
