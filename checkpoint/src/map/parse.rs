//! Tokens to statements.

use super::dtype::{dtype_by_name, unknown_dtype};
use super::statement::{Attr, Statement, Value, Var, WORDS};
use super::token::{Spot, Text, Token};
use crate::{Error, Result};
use std::sync::Arc;

/// What an attribute takes.
#[derive(Clone, Copy)]
enum Takes {
    Int,
    List,
    DType,
}

const ATTRIBUTES: [(&str, Takes); 13] = [
    ("axis", Takes::Int),
    ("sizes", Takes::List),
    ("permute", Takes::List),
    ("reshape", Takes::List),
    ("src_shape", Takes::List),
    ("dst_shape", Takes::List),
    ("dtype", Takes::DType),
    ("src_dtype", Takes::DType),
    ("dst_dtype", Takes::DType),
    ("num_heads", Takes::Int),
    ("num_key_value_groups", Takes::Int),
    ("src_degree", Takes::Int),
    ("dst_degree", Takes::Int),
];

/// All statements of a text; `number` is the line that errors name where the text is one of a list.
pub(super) fn parse(text: &str, number: Option<usize>) -> Result<Vec<Arc<Statement>>> {
    let text = Text::new(text, number);
    text.statements()?
        .iter()
        .map(|spots| {
            Parser {
                text: &text,
                spots,
                at: 0,
            }
            .statement()
            .map(Arc::new)
        })
        .collect()
}

struct Parser<'t> {
    text: &'t Text<'t>,
    spots: &'t [Spot],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self, ahead: usize) -> Option<&Token> {
        self.spots.get(self.at + ahead).map(|spot| &spot.token)
    }

    /// Takes the token if it is this one.
    fn eat(&mut self, token: &Token) -> bool {
        let found = self.peek(0) == Some(token);
        self.at += usize::from(found);
        found
    }

    /// An error at the current token, or after the last one.
    fn error(&self, detail: impl std::fmt::Display) -> Error {
        match (self.spots.get(self.at), self.spots.last()) {
            (Some(spot), _) | (None, Some(spot)) => self.text.error(spot.line, spot.column, detail),
            (None, None) => self.text.error(1, 1, detail),
        }
    }

    fn found(&self) -> String {
        self.peek(0)
            .map_or("the end of the statement".into(), Token::describe)
    }

    fn expect(&mut self, token: &Token) -> Result<()> {
        if self.eat(token) {
            Ok(())
        } else {
            Err(self.error(format!(
                "{} was expected, not {}",
                token.describe(),
                self.found()
            )))
        }
    }

    fn statement(mut self) -> Result<Statement> {
        let line = self
            .text
            .number(self.spots.first().map_or(1, |spot| spot.line));
        let mut left = vec![self.var()?];
        while self.eat(&Token::Comma) {
            left.push(self.var()?);
        }
        self.expect(&Token::Arrow)?;
        let mut right = vec![self.var()?];
        let mut attrs = Vec::new();
        while self.at < self.spots.len() {
            if self.peek(0) == Some(&Token::Arrow) {
                return Err(self.error(
                    "a second '->' in one statement: does the line before end in a comma?",
                ));
            }
            if !self.eat(&Token::Comma) {
                return Err(self.error(format!(
                    "names and attributes are separated by a comma, which is missing before {}",
                    self.found()
                )));
            }
            match self.attr()? {
                Some(attr) => attrs.push(attr),
                None if attrs.is_empty() => right.push(self.var()?),
                None => {
                    return Err(self.error(format!(
                        "an attribute (key=value) or one of {} was expected, not {}",
                        WORDS.join(", "),
                        self.found()
                    )));
                }
            }
        }
        Ok(Statement {
            left,
            right,
            attrs,
            line,
            from: None,
        })
    }

    fn var(&mut self) -> Result<Var> {
        let (name, quoted) = match self.peek(0) {
            Some(Token::Name(name)) => (name.clone(), false),
            Some(Token::Text(name)) if !name.is_empty() => (name.clone(), true),
            Some(Token::Int(i)) => {
                return Err(self.error(format!(
                    "a name was expected, not the number {i}; \
                     a name that is a number is written in quotes"
                )));
            }
            _ => return Err(self.error(format!("a name was expected, not {}", self.found()))),
        };
        self.at += 1;
        let mut var = Var {
            name,
            range: None,
            transpose: false,
            quoted,
        };
        if self.eat(&Token::Open) {
            let first = self.index()?;
            self.expect(&Token::Colon)?;
            let end = self.index()?;
            self.expect(&Token::Close)?;
            var.range = Some((first, end));
        }
        var.transpose = self.eat(&Token::Transpose);
        if var.is_none() && (var.range.is_some() || var.transpose) {
            return Err(self.error("'_' stands for no tensor: it takes neither a range nor ^T"));
        }
        Ok(var)
    }

    fn index(&mut self) -> Result<u64> {
        match self.peek(0) {
            Some(Token::Int(i)) if *i >= 0 => {
                let index = i.unsigned_abs();
                self.at += 1;
                Ok(index)
            }
            _ => Err(self.error(format!(
                "a number from 0 was expected in NAME[first:end], not {}",
                self.found()
            ))),
        }
    }

    /// An attribute, or nothing where another name follows.
    fn attr(&mut self) -> Result<Option<Attr>> {
        let Some(Token::Name(name)) = self.peek(0) else {
            return Ok(None);
        };
        if self.peek(1) != Some(&Token::Equals) {
            let word = WORDS.into_iter().find(|word| word == name);
            self.at += usize::from(word.is_some());
            return Ok(word.map(Attr::Word));
        }
        let Some((key, takes)) = ATTRIBUTES.into_iter().find(|(key, _)| key == name) else {
            let known = ATTRIBUTES.map(|(key, _)| key).join(", ");
            return Err(self.error(format!("there is no attribute '{name}'; there are {known}")));
        };
        self.at += 2;
        self.value(key, takes)
            .map(|value| Some(Attr::Set(key, value)))
    }

    fn value(&mut self, key: &str, takes: Takes) -> Result<Value> {
        let value = match (takes, self.peek(0)) {
            (Takes::Int, Some(Token::Int(i))) => Some(Value::Int(*i)),
            (Takes::List, Some(Token::Open)) => return self.list(),
            (Takes::List, Some(Token::Text(text))) => list_in(text).map(Value::List),
            (Takes::DType, Some(Token::Text(name) | Token::Name(name))) => {
                match dtype_by_name(name) {
                    Some(dtype) => Some(Value::DType(dtype)),
                    None => return Err(self.error(format!("{key}={}", unknown_dtype(name)))),
                }
            }
            _ => None,
        };
        let wanted = match takes {
            Takes::Int => "a number",
            Takes::List => "numbers such as \"[1, 0]\"",
            Takes::DType => "an element type such as \"bf16\" or \"bfloat16\"",
        };
        let value = value
            .ok_or_else(|| self.error(format!("{key}= takes {wanted}, not {}", self.found())))?;
        self.at += 1;
        Ok(value)
    }

    /// `[1, 0]` without quotes.
    fn list(&mut self) -> Result<Value> {
        self.at += 1;
        let mut list = Vec::new();
        while !self.eat(&Token::Close) {
            if !list.is_empty() {
                self.expect(&Token::Comma)?;
            }
            let Some(Token::Int(i)) = self.peek(0) else {
                return Err(self.error(format!(
                    "a number was expected in the list, not {}",
                    self.found()
                )));
            };
            list.push(*i);
            self.at += 1;
        }
        Ok(Value::List(list))
    }
}

/// The numbers of `[1, 0]`.
fn list_in(text: &str) -> Option<Vec<i64>> {
    let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
    if inner.is_empty() {
        Some(vec![])
    } else {
        inner
            .split(',')
            .map(|part| part.trim().parse().ok())
            .collect()
    }
}
