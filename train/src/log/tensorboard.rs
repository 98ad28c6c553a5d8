//! TensorBoard's event files: records of protocol buffers, as much of them as numbers need.

use crate::{Error, Result};
use std::{
    fs::File,
    io::{BufWriter, ErrorKind, Write},
    path::{Path, PathBuf},
};

/// A file of events. Every run has its own: one that is there is never written to, so that a run
/// that ended in the middle of a record spoils nothing.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl EventFile {
    /// A new file in a folder.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        let (seconds, process) = (super::now() as u64, std::process::id());
        for number in 0..10_000 {
            let name = format!("events.out.tfevents.{seconds:010}.anymesh.{process}.{number}");
            let path = folder.as_ref().join(name);
            return match File::create_new(&path) {
                Ok(file) => Self::new(file, path, super::now()),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                Err(e) => Err(Error::io(path, "create", &e)),
            };
        }
        let full = std::io::Error::other("all names of this second are taken");
        Err(Error::io(folder.as_ref(), "create", &full))
    }

    pub(super) fn new(file: File, path: PathBuf, time: f64) -> Result<Self> {
        let mut events = Self {
            path,
            out: BufWriter::new(file),
        };
        events.record(&version(time))?;
        events.flush()?;
        Ok(events)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A number of a step. `time` is in seconds since 1970.
    pub fn scalar(&mut self, time: f64, step: u64, name: &str, value: f64) -> Result<()> {
        self.record(&scalar(time, step, name, value as f32))
    }

    /// Returns when all events are in the file.
    pub fn flush(&mut self) -> Result<()> {
        let flushed = self.out.flush();
        flushed.map_err(|e| Error::io(&self.path, "write", &e))
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let record = [&length[..], &masked_crc(&length), data, &masked_crc(data)];
        let written = self.out.write_all(&record.concat());
        written.map_err(|e| Error::io(&self.path, "write", &e))
    }
}

/// The CRC-32C of bytes, turned so that bytes which contain their own CRC are no special case.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    let crc = crc32c::crc32c(bytes).rotate_right(15);
    crc.wrapping_add(0xa282_ead8).to_le_bytes()
}

// Fields of protocol buffers: a number and how the value is written (0 varint, 1 eight bytes, 2 with
// its length, 5 four bytes), then the value.

/// `Event { wall_time: 1, file_version: 3 }`
fn version(time: f64) -> Vec<u8> {
    let mut event = vec![];
    double(&mut event, 1, time);
    nested(&mut event, 3, b"brain.Event:2");
    event
}

/// `Event { wall_time: 1, step: 2, summary: 5 { value: 1 { tag: 1, simple_value: 2 } } }`
fn scalar(time: f64, step: u64, name: &str, number: f32) -> Vec<u8> {
    let (mut event, mut summary, mut value) = (vec![], vec![], vec![]);
    nested(&mut value, 1, name.as_bytes());
    value.push(2 << 3 | 5);
    value.extend(number.to_le_bytes());
    nested(&mut summary, 1, &value);
    double(&mut event, 1, time);
    event.push(2 << 3);
    varint(&mut event, step);
    nested(&mut event, 5, &summary);
    event
}

fn double(out: &mut Vec<u8>, field: u8, value: f64) {
    out.push(field << 3 | 1);
    out.extend(value.to_le_bytes());
}

fn nested(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
