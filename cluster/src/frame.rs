//! What processes say to each other: how a connection begins, and frames of JSON with their length.
//!
//! Everything that is read here may come from anybody: sizes are bounded, every read has a deadline,
//! and what cannot be understood is an error.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// The first bytes of every connection; the last one is the version of what follows.
pub(crate) const MAGIC: [u8; 8] = *b"anymesh\x01";
/// The longest frame of somebody who is not known yet.
pub(crate) const HELLO_BYTES: usize = 8 << 10;
/// The longest frame between processes that know each other.
pub(crate) const FRAME_BYTES: usize = 16 << 20;
/// How often a wait looks whether it still makes sense.
const TURN: Duration = Duration::from_millis(50);

/// How a process introduces itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// What only processes of this run know.
    pub(crate) token: String,
    pub(crate) card: Card,
    /// How often this cluster has been rebuilt.
    pub(crate) epoch: u32,
}

/// What the connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// To the hub, for messages about the run.
    Control,
    /// Between two processes, for tensors.
    Data,
}

/// Who a process is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Card {
    /// Its number among the processes.
    pub(crate) process: usize,
    /// How many there are.
    pub(crate) size: usize,
    /// The run it belongs to, as its launcher calls it.
    pub(crate) run: String,
    /// The program it runs.
    pub(crate) program: String,
    /// The version of this library.
    pub(crate) version: String,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it listens.
    pub(crate) listens: SocketAddr,
}

impl std::fmt::Display for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "process {} ({}, pid {})",
            self.process, self.host, self.pid
        )
    }
}

/// What a newcomer is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    Welcome,
    Refused(String),
}

/// Until when to read or write, and whether it still makes sense.
pub(crate) struct Patience<'a> {
    pub(crate) until: Option<Instant>,
    pub(crate) stopped: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    pub(crate) fn until(until: Instant) -> Patience<'static> {
        Patience {
            until: Some(until),
            stopped: &|| false,
        }
    }

    /// How long the next turn may take; an error where there is none.
    pub(crate) fn turn(&self) -> io::Result<Duration> {
        if (self.stopped)() {
            return Err(ErrorKind::Interrupted.into());
        }
        let left = self.until.map_or(TURN, |until| {
            until.saturating_duration_since(Instant::now())
        });
        match left.is_zero() {
            true => Err(ErrorKind::TimedOut.into()),
            false => Ok(left.min(TURN)),
        }
    }
}

fn is_turn_over(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Fills `out`. `ErrorKind::UnexpectedEof` where the other end closed, `TimedOut` at the deadline,
/// `Interrupted` where it makes no sense any more.
pub(crate) fn read_all(
    mut stream: &TcpStream,
    mut out: &mut [u8],
    patience: &Patience<'_>,
) -> io::Result<()> {
    while !out.is_empty() {
        stream.set_read_timeout(Some(patience.turn()?))?;
        match stream.read(out) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => out = &mut out[n..],
            Err(e) if is_turn_over(&e) || e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `bytes`, with the errors of [`read_all`].
pub(crate) fn write_all(
    mut stream: &TcpStream,
    mut bytes: &[u8],
    patience: &Patience<'_>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(patience.turn()?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if is_turn_over(&e) || e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads one frame of at most `limit` bytes.
pub(crate) fn read_frame<T: DeserializeOwned>(
    stream: &TcpStream,
    limit: usize,
    patience: &Patience<'_>,
) -> io::Result<T> {
    let mut length = [0; 4];
    read_all(stream, &mut length, patience)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        let detail = format!("a message of {length} bytes, at most {limit} are expected");
        return Err(io::Error::new(ErrorKind::InvalidData, detail));
    }
    let mut bytes = vec![0; length];
    read_all(stream, &mut bytes, patience)?;
    parse(&bytes)
}

/// What a frame holds.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes).map_err(|e| {
        let detail = format!("a message that cannot be understood: {e}");
        io::Error::new(ErrorKind::InvalidData, detail)
    })
}

/// Writes one frame.
pub(crate) fn write_frame<T: Serialize>(
    stream: &TcpStream,
    message: &T,
    patience: &Patience<'_>,
) -> io::Result<()> {
    write_all(stream, &frame(message)?, patience)
}

fn frame<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = bytes.len() - 4;
    if length > FRAME_BYTES {
        let detail = format!("a message of {length} bytes is too long");
        return Err(io::Error::new(ErrorKind::InvalidInput, detail));
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// Says who this is; the other end answers when it is ready.
pub(crate) fn introduce(stream: &TcpStream, hello: &Hello, until: Instant) -> io::Result<()> {
    let patience = Patience::until(until);
    write_all(stream, &MAGIC, &patience)?;
    write_frame(stream, hello, &patience)
}

/// Tells a newcomer why not. It is no loss if that does not arrive.
pub(crate) fn refuse(stream: &TcpStream, reason: impl Into<String>) {
    let patience = Patience::until(Instant::now() + Duration::from_millis(500));
    let _ = write_frame(stream, &Answer::Refused(reason.into()), &patience);
    let _ = stream.shutdown(std::net::Shutdown::Write);
}
