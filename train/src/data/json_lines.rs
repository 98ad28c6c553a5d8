//! JSON lines: an object a line.

use super::{
    Field, Records,
    file::DataFile,
    text::{find, lines, utf8},
};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// A file with a JSON object in every line that is not blank.
#[derive(Debug)]
pub struct JsonLines {
    file: DataFile,
    /// Where each line begins and ends.
    lines: Vec<(u64, u64)>,
}

impl JsonLines {
    /// Opens a file and finds out where its lines are. Objects are read when they are asked for.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = DataFile::open(path)?;
        let lines = lines(&file)?;
        if lines.is_empty() {
            return Err(file.error(0, "nothing but blanks is in the file"));
        }
        Ok(Self { file, lines })
    }

    fn object(&self, index: u64) -> Result<(u64, Map<String, Value>)> {
        let (start, end) = find(&self.lines, index)?;
        let line = utf8(&self.file, start, end)?;
        match serde_json::from_str(&line) {
            Ok(Value::Object(object)) => Ok((start, object)),
            Ok(other) => {
                let detail = format!("line {index} is {}, no JSON object", kind(&other));
                Err(self.file.error(start, detail))
            }
            Err(e) => {
                // Columns count bytes from one.
                let column = (e.column() as u64).saturating_sub(1).min(end - start);
                let said = e.to_string();
                let said = said.split(" at line ").next().unwrap_or(&said);
                let detail = format!("record {index} is no JSON: {said}");
                Err(self.file.error(start + column, detail))
            }
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl Records for JsonLines {
    fn count(&self) -> u64 {
        self.lines.len() as u64
    }

    fn fields(&self, index: u64, names: &[&str]) -> Result<Vec<Field>> {
        let (start, object) = self.object(index)?;
        let field = |name: &&str| match object.get(*name) {
            Some(Value::String(text)) => Ok(Field::Text(text.clone())),
            Some(Value::Number(n)) if n.is_i64() => Ok(Field::Number(n.as_i64().unwrap_or(-1))),
            Some(other) => Err(self.file.error(
                start,
                format!(
                    "field '{name}' of record {index} is {}, neither text nor a whole number",
                    kind(other)
                ),
            )),
            None => {
                let there: Vec<&str> = object.keys().map(String::as_str).collect();
                let detail = format!(
                    "record {index} has no field '{name}': it has {}",
                    match there.is_empty() {
                        true => "none".into(),
                        false => there.join(", "),
                    }
                );
                Err(self.file.error(start, detail))
            }
        };
        names.iter().map(field).collect()
    }

    fn error(&self, index: u64, detail: String) -> Error {
        let start = find(&self.lines, index).map_or(0, |(start, _)| start);
        self.file.error(start, detail)
    }

    fn describe(&self) -> String {
        format!("json lines {}", self.file.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Folder;

    #[test]
    fn fields_are_read_by_name() {
        let folder = Folder::new("fields");
        let path = folder.write(
            "a.jsonl",
            "{\"text\": \"größer\\n\", \"label\": 3}\r\n\n{\"label\": -1, \"x\": [1]}".as_bytes(),
        );
        let lines = JsonLines::open(path).expect("whole");
        assert_eq!(lines.count(), 2);
        let fields = lines.fields(0, &["label", "text"]).expect("both are there");
        assert_eq!(fields, [Field::Number(3), Field::Text("größer\n".into())]);
        assert_eq!(
            lines.fields(1, &["label"]).expect("there"),
            [Field::Number(-1)]
        );
    }

    #[test]
    fn what_is_no_object_with_the_field_is_an_error_with_its_offset() {
        let folder = Folder::new("no-object");
        let refused = |line: &str, field: &str, at: u64, said: &str| {
            let bytes = [b"{\"text\": \"ok\"}\n", line.as_bytes()].concat();
            let lines = JsonLines::open(folder.write("a.jsonl", &bytes)).expect("lines");
            lines.fields(0, &["text"]).expect("the first line is fine");
            let error = lines.fields(1, &[field]).expect_err(said);
            assert!(
                matches!(error, Error::Data { offset, .. } if offset == at),
                "{error}"
            );
            assert!(error.to_string().contains(said), "{error}");
        };
        refused(
            "{\"text\": oops}",
            "text",
            24,
            "record 1 is no JSON: expected value",
        );
        refused(
            "{\"text\": \"cut o",
            "text",
            29,
            "EOF while parsing a string",
        );
        refused("[1, 2]", "text", 15, "line 1 is a list");
        refused(
            "{\"title\": \"a\", \"n\": 1}",
            "text",
            15,
            "no field 'text': it has n, title",
        );
        refused("{}", "text", 15, "it has none");
        refused("{\"text\": null}", "text", 15, "'text' of record 1 is null");
        refused("{\"text\": 1.5}", "text", 15, "is a number, neither");
        refused(
            &format!("{{\"text\": {}", "[".repeat(500)),
            "text",
            15 + 9 + 126,
            "recursion",
        );
        let bytes = b"{\"text\": \"ok\"}\n{\"text\": \"\xc3\"}";
        let lines = JsonLines::open(folder.write("a.jsonl", bytes)).expect("lines");
        let error = lines.fields(1, &["text"]).expect_err("no UTF-8");
        assert!(
            error
                .to_string()
                .contains("byte 25: the byte 0xc3 is no UTF-8"),
            "{error}"
        );
        assert!(JsonLines::open(folder.write("a.jsonl", b"\n \n")).is_err());
        assert!(JsonLines::open(folder.write("a.jsonl", b"")).is_err());
    }
}
