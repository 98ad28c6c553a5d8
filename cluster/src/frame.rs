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

    /// For as long as the connection lives.
    pub(crate) fn forever() -> Patience<'static> {
        Patience {
            until: None,
            stopped: &|| false,
        }
    }

    /// How long the next turn may take; an error where there is none.
    pub(crate) fn turn(&self) -> io::Result<Duration> {
        if (self.stopped)() {
            return Err(ErrorKind::Interrupted.into());
        }
        match self.left() {
            left if left.is_zero() => Err(ErrorKind::TimedOut.into()),
            left => Ok(left.min(TURN)),
        }
    }

    /// How much time is left, or one turn where there is no end.
    pub(crate) fn left(&self) -> Duration {
        self.until.map_or(TURN, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }
}

/// Makes a connection one whose reads and writes come back after each turn, to look at the clock.
pub(crate) fn in_turns(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TURN))?;
    stream.set_write_timeout(Some(TURN))
}

pub(crate) fn is_turn_over(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Fills `out`. `ErrorKind::UnexpectedEof` where the other end closed, `TimedOut` at the deadline,
/// `Interrupted` where it makes no sense any more. What has arrived already is read in any case: a
/// process that did its part and is gone has done its part.
pub(crate) fn read_all(
    mut from: impl Read,
    mut out: &mut [u8],
    patience: &Patience<'_>,
) -> io::Result<()> {
    while !out.is_empty() {
        match from.read(out) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                out = &mut out[n..];
                // One that sends a byte in each turn must not take for ever.
                if !out.is_empty() && patience.left().is_zero() {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if is_turn_over(&e) => drop(patience.turn()?),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `bytes`, with the errors of [`read_all`].
pub(crate) fn write_all(
    mut to: impl Write,
    mut bytes: &[u8],
    patience: &Patience<'_>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if is_turn_over(&e) => drop(patience.turn()?),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// What the first bytes of a connection say.
#[derive(Debug, PartialEq)]
pub(crate) enum Opening {
    /// Nothing that could be understood yet.
    Unfinished,
    Hello(Box<Hello>),
    /// Why this is nobody who belongs here.
    Stranger(String),
}

impl Opening {
    /// Understands the bytes that have come so far: the magic, and a frame with a [`Hello`].
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let known = bytes.len().min(7);
        if bytes[..known] != MAGIC[..known] {
            return Self::Stranger("this is no anymesh process".into());
        }
        let Some((magic, rest)) = bytes.split_at_checked(MAGIC.len()) else {
            return Self::Unfinished;
        };
        if magic != MAGIC {
            return Self::Stranger(format!(
                "version {} of the protocol, this process speaks version {}",
                magic[7], MAGIC[7]
            ));
        }
        let Some((length, rest)) = rest.split_first_chunk() else {
            return Self::Unfinished;
        };
        let length = match length_of(*length, HELLO_BYTES) {
            Ok(length) => length,
            Err(e) => return Self::Stranger(e.to_string()),
        };
        match rest.len().cmp(&length) {
            std::cmp::Ordering::Less => Self::Unfinished,
            std::cmp::Ordering::Greater => {
                Self::Stranger("more was said before the introduction was answered".into())
            }
            std::cmp::Ordering::Equal => match parse(rest) {
                Ok(hello) => Self::Hello(Box::new(hello)),
                Err(e) => Self::Stranger(e.to_string()),
            },
        }
    }
}

fn length_of(bytes: [u8; 4], limit: usize) -> io::Result<usize> {
    let length = u32::from_le_bytes(bytes) as usize;
    match length > limit {
        false => Ok(length),
        true => {
            let detail = format!("a message of {length} bytes, at most {limit} are expected");
            Err(io::Error::new(ErrorKind::InvalidData, detail))
        }
    }
}

/// Reads one frame of at most `limit` bytes.
pub(crate) fn read_frame<T: DeserializeOwned>(
    mut from: impl Read,
    limit: usize,
    patience: &Patience<'_>,
) -> io::Result<T> {
    let mut length = [0; 4];
    read_all(&mut from, &mut length, patience)?;
    let mut bytes = vec![0; length_of(length, limit)?];
    read_all(&mut from, &mut bytes, patience)?;
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
    to: impl Write,
    message: &T,
    patience: &Patience<'_>,
) -> io::Result<()> {
    write_all(to, &frame(message)?, patience)
}

/// The bytes of a frame.
pub(crate) fn frame<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
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

/// The bytes with which a process introduces itself.
pub(crate) fn opening(hello: &Hello) -> io::Result<Vec<u8>> {
    Ok([&MAGIC[..], &frame(hello)?].concat())
}

/// Tells a newcomer why not. It is no loss if that does not arrive.
pub(crate) fn refuse(stream: &TcpStream, reason: impl Into<String>) {
    let patience = Patience::until(Instant::now() + Duration::from_millis(200));
    let _ = write_frame(stream, &Answer::Refused(reason.into()), &patience);
    let _ = stream.shutdown(std::net::Shutdown::Write);
}
