//! The output of many processes as lines that say whose they are.

use std::{
    io::{self, Read, Write},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

/// A line that is longer is cut, so that no process fills the memory.
const LONGEST_LINE: usize = 1 << 20;

/// Bytes so far without an end of line.
struct Lines {
    prefix: Vec<u8>,
    rest: Vec<u8>,
}

impl Lines {
    /// What is complete with these bytes, each line with its prefix and its end.
    fn take(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![];
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.rest.extend(&bytes[..end]);
            self.put(&mut out);
            bytes = &bytes[end + 1..];
        }
        self.rest.extend(bytes);
        if self.rest.len() >= LONGEST_LINE {
            self.put(&mut out);
        }
        out
    }

    /// What is left when nothing follows.
    fn last(&mut self) -> Vec<u8> {
        let mut out = vec![];
        if !self.rest.is_empty() {
            self.put(&mut out);
        }
        out
    }

    fn put(&mut self, out: &mut Vec<u8>) {
        out.extend(&self.prefix);
        out.append(&mut self.rest);
        out.push(b'\n');
    }
}

/// Where a process's output goes.
#[derive(Clone, Copy)]
pub(super) enum To {
    Stdout,
    Stderr,
}

impl To {
    /// One piece of whole lines: nobody else writes between.
    fn write(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Self::Stderr => io::stderr().lock().write_all(bytes),
        }
    }
}

/// The threads that copy.
pub(super) struct Copying {
    threads: usize,
    tell: Sender<()>,
    told: Receiver<()>,
}

impl Copying {
    pub(super) fn new() -> Self {
        let (tell, told) = mpsc::channel();
        Self {
            threads: 0,
            tell,
            told,
        }
    }

    pub(super) fn add(
        &mut self,
        mut from: impl Read + Send + 'static,
        to: To,
        prefix: &str,
    ) -> io::Result<()> {
        let (done, prefix) = (self.tell.clone(), prefix.as_bytes().to_vec());
        let copy = move || {
            let mut lines = Lines {
                prefix,
                rest: vec![],
            };
            let (mut buffer, mut open) = (vec![0; 1 << 16], true);
            let mut write = |bytes: &[u8]| {
                // Where nobody reads any more, the processes go on without being read.
                open = open && (bytes.is_empty() || to.write(bytes).is_ok());
            };
            loop {
                match from.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => write(&lines.take(&buffer[..n])),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            write(&lines.last());
            // Nobody may be waiting any more.
            let _ = done.send(());
        };
        thread::Builder::new().name("output".into()).spawn(copy)?;
        self.threads += 1;
        Ok(())
    }

    /// Waits until everything was copied, but not for ever: whatever still holds the other end
    /// may never close it.
    pub(super) fn finish(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while self.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            match self.told.recv_timeout(left) {
                Ok(()) => self.threads -= 1,
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_whatever_pieces_they_come_in() {
        let text = b"one\n\ntwo \xff\xfe\rthree\nlast";
        for piece in 1..=text.len() {
            let mut lines = Lines {
                prefix: b"[3] ".to_vec(),
                rest: vec![],
            };
            let mut out = vec![];
            for bytes in text.chunks(piece) {
                let whole = lines.take(bytes);
                assert!(whole.is_empty() || whole.ends_with(b"\n"));
                out.extend(whole);
            }
            out.extend(lines.last());
            assert_eq!(out, b"[3] one\n[3] \n[3] two \xff\xfe\rthree\n[3] last\n");
        }
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let mut lines = Lines {
            prefix: vec![],
            rest: vec![],
        };
        assert!(lines.take(&vec![b'x'; LONGEST_LINE - 1]).is_empty());
        assert_eq!(lines.take(b"xy").len(), LONGEST_LINE + 2);
        assert!(lines.last().is_empty());
    }
}
