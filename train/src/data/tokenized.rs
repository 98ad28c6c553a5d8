//! Records as documents.

use super::{Document, Documents, Field, Records, Tokenizer};
use crate::Result;
use std::sync::Arc;

/// What of a record becomes a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A field of text.
    Text(String),
    /// Two fields of text, one after the other; only the second is learned.
    Completion {
        /// The field with what is given.
        prompt: String,
        /// The field with what is to be learned.
        completion: String,
    },
    /// A field of text and one with the number of its class.
    Class {
        /// The field with the text.
        text: String,
        /// The field with the class.
        class: String,
    },
}

impl Default for Form {
    fn default() -> Self {
        Self::Text("text".into())
    }
}

/// Records, tokenized when they are asked for.
///
/// Texts end with the tokenizer's end of text, if it has one, and nothing else is added; for models
/// that want their [template](Self::template) it is the other way round.
///
/// ```
/// # use anymesh_train::data::{Documents, Form, JsonLines, Tokenized, Tokenizer};
/// # use std::sync::Arc;
/// # let path = std::env::temp_dir().join(format!("anymesh-doc-{}.jsonl", std::process::id()));
/// # std::fs::write(&path, "{\"ask\": \"1+1=\", \"answer\": \"2\"}\n").expect("a temporary file");
/// let form = Form::Completion { prompt: "ask".into(), completion: "answer".into() };
/// let records = Arc::new(JsonLines::open(&path)?);
/// let documents = Tokenized::new(records, Arc::new(Tokenizer::bytes()), form);
/// let document = documents.document(0)?;
/// assert_eq!((document.prompt, document.tokens), (4, vec![49, 43, 49, 61, 50, 256]));
/// # std::fs::remove_file(&path).ok();
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tokenized {
    records: Arc<dyn Records>,
    tokenizer: Arc<Tokenizer>,
    form: Form,
    template: bool,
    end: bool,
}

impl Tokenized {
    /// These records, in this form.
    pub fn new(records: Arc<dyn Records>, tokenizer: Arc<Tokenizer>, form: Form) -> Self {
        Self {
            records,
            tokenizer,
            form,
            template: false,
            end: true,
        }
    }

    /// What contrastive training compares, such as the fields `query` and `positive`: a source for
    /// each field, in the tokenizer's template. Loaders with the same seed and batch walk through
    /// all of them in the same order.
    pub fn fields(
        records: &Arc<dyn Records>,
        tokenizer: &Arc<Tokenizer>,
        names: &[&str],
    ) -> Vec<Self> {
        let one = |name: &&str| {
            let form = Form::Text(name.to_string());
            Self::new(records.clone(), tokenizer.clone(), form).template(true)
        };
        names.iter().map(one).collect()
    }

    /// Whether texts get what the tokenizer's template puts around them, such as `[CLS]` and
    /// `[SEP]`, instead of an end of text.
    pub fn template(mut self, on: bool) -> Self {
        (self.template, self.end) = (on, !on);
        self
    }

    /// Whether texts end with the tokenizer's end of text.
    pub fn end(mut self, on: bool) -> Self {
        self.end = on;
        self
    }

    fn text(&self, index: u64, name: &str, field: Field) -> Result<String> {
        match field {
            Field::Text(text) => Ok(text),
            Field::Number(n) => Err(self.records.error(
                index,
                format!("field '{name}' of record {index} is the number {n}, not a text"),
            )),
        }
    }

    fn first(&self, text: &str) -> Result<Vec<u32>> {
        match self.template {
            true => self.tokenizer.encode_whole(text),
            false => self.tokenizer.encode(text),
        }
    }
}

impl Documents for Tokenized {
    fn count(&self) -> u64 {
        self.records.count()
    }

    fn document(&self, index: u64) -> Result<Document> {
        let names: &[&str] = match &self.form {
            Form::Text(text) => &[text],
            Form::Completion { prompt, completion } => &[prompt, completion],
            Form::Class { text, class } => &[text, class],
        };
        let mut fields = self.records.fields(index, names)?.into_iter();
        let mut next = || fields.next().unwrap_or(Field::Number(0));
        let first = self.text(index, names[0], next())?;
        let mut document = Document::new(self.first(&first)?);
        match &self.form {
            Form::Text(_) => {}
            Form::Completion { completion, .. } => {
                document.prompt = document.tokens.len();
                let answer = self.text(index, completion, next())?;
                document.tokens.extend(self.tokenizer.encode(&answer)?);
            }
            Form::Class { class, .. } => {
                let found = next();
                let number = match found {
                    Field::Number(n) => u32::try_from(n).ok().filter(|n| *n <= i32::MAX as u32),
                    Field::Text(_) => None,
                };
                document.class = Some(number.ok_or_else(|| {
                    let detail = format!(
                        "field '{class}' of record {index} is {found:?}, not the number of a class"
                    );
                    self.records.error(index, detail)
                })?);
            }
        }
        if self.end {
            document.tokens.extend(self.tokenizer.special().eos);
        }
        Ok(document)
    }

    fn describe(&self) -> String {
        let (records, tokenizer) = (self.records.describe(), self.tokenizer.describe());
        format!(
            "{records}, {tokenizer}, {:?} {} {}",
            self.form, self.template, self.end
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{JsonLines, tests::Folder};

    fn records(folder: &Folder) -> Arc<dyn Records> {
        let lines =
            b"{\"text\": \"ab\", \"class\": 2, \"n\": -1}\n{\"text\": \"\", \"class\": \"x\"}\n";
        Arc::new(JsonLines::open(folder.write("a.jsonl", lines)).expect("lines"))
    }

    #[test]
    fn classes_are_numbers_and_texts_are_texts() {
        let folder = Folder::new("tokenized");
        let form = |text: &str, class: &str| Form::Class {
            text: text.into(),
            class: class.into(),
        };
        let tokenizer = Arc::new(Tokenizer::bytes());
        let of = |form| Tokenized::new(records(&folder), tokenizer.clone(), form);
        let document = of(form("text", "class"))
            .document(0)
            .expect("both are there");
        assert_eq!(
            (document.class, document.tokens),
            (Some(2), vec![97, 98, 256])
        );
        for (form, index, said) in [
            (form("text", "class"), 1, "not the number of a class"),
            (form("text", "n"), 0, "not the number of a class"),
            (form("class", "class"), 0, "is the number 2, not a text"),
            (Form::Text("title".into()), 0, "no field 'title'"),
        ] {
            let error = of(form).document(index).expect_err(said);
            assert!(error.to_string().contains(said), "{error}");
        }
        let bare = of(Form::default()).end(false);
        assert_eq!(bare.document(1).expect("empty").tokens, [0u32; 0]);
        assert_ne!(bare.describe(), of(Form::default()).describe());
    }
}
