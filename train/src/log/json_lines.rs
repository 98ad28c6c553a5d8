//! JSON lines: an object for each step.

use crate::{Error, Result};
use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// A file with a JSON object for each step: `{"step":300,"time":1.0,"loss":1.5}`. What JSON has no
/// numbers for is text: `"NaN"`, `"inf"`, `"-inf"`.
#[derive(Debug)]
pub struct JsonLog {
    path: PathBuf,
    file: File,
}

impl JsonLog {
    /// Goes on with a file, or begins one. A line that a run left unfinished is ended first, so
    /// that only that one is not JSON.
    pub fn append(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |action| move |e| Error::io(path, action, &e);
        let mut options = OpenOptions::new();
        let mut file = options
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(io("open"))?;
        // Devices have no length and no last line.
        if file.metadata().map_err(io("open"))?.len() > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1)).map_err(io("read"))?;
            file.read_exact(&mut last).map_err(io("read"))?;
            if last != *b"\n" {
                file.write_all(b"\n").map_err(io("write"))?;
            }
        }
        Ok(Self {
            path: path.into(),
            file,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The numbers of a step, as one line, written at once.
    pub fn scalars(&mut self, time: f64, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let line = line(time, step, scalars);
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|e| Error::io(&self.path, "write", &e))
    }
}

fn line(time: f64, step: u64, scalars: &[(&str, f64)]) -> String {
    let mut line = format!("{{\"step\":{step},\"time\":{}", number(time));
    for (name, value) in scalars {
        // Names as JSON writes texts, in the order in which they were given.
        let name = serde_json::Value::from(*name);
        line += &format!(",{name}:{}", number(*value));
    }
    line + "}\n"
}

/// A number as JSON, or as a text where JSON has none for it.
fn number(value: f64) -> String {
    match serde_json::Number::from_f64(value) {
        Some(number) => number.to_string(),
        None => format!("\"{value}\""),
    }
}

#[cfg(test)]
pub(super) fn line_of(time: f64, step: u64, scalars: &[(&str, f64)]) -> String {
    line(time, step, scalars)
}
