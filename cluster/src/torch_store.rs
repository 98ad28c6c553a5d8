//! A client of the TCPStore that torchrun's agent serves: a place to say addresses in.

use std::{
    fmt,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// What the store expects first of a client.
const MAGIC: u32 = 0x3C85_F7CE;
/// The most bytes of a key or a value: addresses are short, and a length is the peer's word.
const LONGEST: usize = 1 << 20;

/// The requests, as the store numbers them.
const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const ADD: u8 = 4;
const WAIT: u8 = 6;

/// Why the store did not answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no store, or no way to it.
    Unreachable {
        /// Host and port.
        address: String,
        /// What was tried last, in words.
        detail: String,
    },
    /// No answer came until the deadline.
    Late {
        /// What was asked for.
        request: String,
    },
    /// The store closed the connection before it had answered.
    Closed {
        /// What was asked for.
        request: String,
    },
    /// A key or a value is longer than 1 MiB.
    TooLong {
        /// What was asked for.
        request: String,
        /// How long it is or claims to be.
        bytes: u64,
    },
    /// The answer is not one that a store gives.
    Garbage {
        /// What was asked for.
        request: String,
        /// What came.
        answer: String,
    },
    /// The connection failed.
    Broken {
        /// What was asked for.
        request: String,
        /// How.
        source: std::io::Error,
    },
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("torch store: ")?;
        match self {
            Self::Unreachable { address, detail } => write!(
                f,
                "cannot reach {address}: {detail}; is MASTER_ADDR:MASTER_PORT the agent's store?"
            ),
            Self::Late { request } => write!(f, "no answer to {request} within the deadline"),
            Self::Closed { request } => write!(f, "the store closed the connection in {request}"),
            Self::TooLong { request, bytes } => {
                write!(f, "{bytes} bytes in {request}: at most {LONGEST}")
            }
            Self::Garbage { request, answer } => write!(
                f,
                "{request} was answered with {answer}: what listens there is no TCPStore"
            ),
            Self::Broken { request, source } => write!(f, "{request}: {source}"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Broken { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A connection to a store. After an error it is closed: half an answer may be on its way, so a
/// later request would read the wrong one.
#[derive(Debug)]
pub struct TorchStore {
    stream: Option<TcpStream>,
}

impl TorchStore {
    /// Connects; until the deadline, a refused connection is tried again.
    pub fn connect(host: &str, port: u16, until: Instant) -> Result<Self, StoreError> {
        let unreachable = |detail: String| StoreError::Unreachable {
            address: format!("{host}:{port}"),
            detail,
        };
        let addresses = resolve(host, port, until).map_err(unreachable)?;
        let mut detail = "the name has no address".to_string();
        let stream = 'tries: loop {
            for address in &addresses {
                let Some(left) = left(until) else {
                    return Err(unreachable(detail));
                };
                match TcpStream::connect_timeout(address, left) {
                    Ok(stream) => break 'tries stream,
                    Err(error) => detail = error.to_string(),
                }
            }
            if addresses.is_empty() {
                return Err(unreachable(detail));
            }
            thread::sleep(Duration::from_millis(50).min(left(until).unwrap_or_default()));
        };
        let mut store = Self {
            stream: Some(stream),
        };
        let mut hello = vec![VALIDATE];
        hello.extend(MAGIC.to_le_bytes());
        store.talk("the greeting".into(), until, |talk| talk.send(&hello))?;
        Ok(store)
    }

    /// Sets a key. The store does not confirm it: a [`get`](Self::get) does.
    pub fn set(&mut self, key: &str, value: &[u8], until: Instant) -> Result<(), StoreError> {
        self.talk(format!("set {key}"), until, |talk| {
            let mut bytes = vec![SET];
            talk.put(&mut bytes, key.as_bytes())?;
            talk.put(&mut bytes, value)?;
            talk.send(&bytes)
        })
    }

    /// The value of a key; waits until somebody has set it.
    pub fn get(&mut self, key: &str, until: Instant) -> Result<Vec<u8>, StoreError> {
        // Asked for a key that it lacks, an old store would fall over.
        self.wait(&[key], until)?;
        self.talk(format!("get {key}"), until, |talk| {
            let mut bytes = vec![GET];
            talk.put(&mut bytes, key.as_bytes())?;
            talk.send(&bytes)?;
            let length = u64::from_le_bytes(talk.receive()?);
            let mut value = vec![0; talk.short(length)?];
            talk.fill(&mut value)?;
            Ok(value)
        })
    }

    /// Adds to the number of a key, which starts as 0, and returns the sum.
    pub fn add(&mut self, key: &str, amount: i64, until: Instant) -> Result<i64, StoreError> {
        self.talk(format!("add {key}"), until, |talk| {
            let mut bytes = vec![ADD];
            talk.put(&mut bytes, key.as_bytes())?;
            bytes.extend(amount.to_le_bytes());
            talk.send(&bytes)?;
            talk.receive().map(i64::from_le_bytes)
        })
    }

    /// Waits until all of the keys are set.
    pub fn wait(&mut self, keys: &[&str], until: Instant) -> Result<(), StoreError> {
        self.talk(format!("wait for {}", keys.join(", ")), until, |talk| {
            let mut bytes = vec![WAIT];
            bytes.extend((keys.len() as u64).to_le_bytes());
            for key in keys {
                talk.put(&mut bytes, key.as_bytes())?;
            }
            talk.send(&bytes)?;
            match talk.receive()? {
                [0] => Ok(()),
                [other] => Err(talk.garbage(format!("byte {other}"))),
            }
        })
    }

    fn talk<T>(
        &mut self,
        request: String,
        until: Instant,
        body: impl FnOnce(&mut Talk<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let Some(stream) = &self.stream else {
            return Err(StoreError::Closed { request });
        };
        let result = body(&mut Talk {
            stream,
            request,
            until,
        });
        if result.is_err() {
            self.stream = None;
        }
        result
    }
}

fn left(until: Instant) -> Option<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left)
}

/// The addresses of a name. The system's lookup has no deadline, so a thread waits for it.
fn resolve(host: &str, port: u16, until: Instant) -> Result<Vec<SocketAddr>, String> {
    let (tell, told) = mpsc::channel();
    let name = host.to_string();
    thread::Builder::new()
        .name("resolve".into())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs();
            // Nobody may be waiting any more.
            let _ = tell.send(found.map(Iterator::collect));
        })
        .map_err(|error| error.to_string())?;
    match told.recv_timeout(left(until).unwrap_or_default()) {
        Ok(found) => found.map_err(|error| error.to_string()),
        Err(_) => Err("its name was not found within the deadline".into()),
    }
}

/// One request on its way.
struct Talk<'a> {
    stream: &'a TcpStream,
    request: String,
    until: Instant,
}

impl Talk<'_> {
    /// A text as the store reads it: its length, then its bytes.
    fn put(&self, to: &mut Vec<u8>, bytes: &[u8]) -> Result<(), StoreError> {
        self.short(bytes.len() as u64)?;
        to.extend((bytes.len() as u64).to_le_bytes());
        to.extend(bytes);
        Ok(())
    }

    fn short(&self, bytes: u64) -> Result<usize, StoreError> {
        match usize::try_from(bytes) {
            Ok(length) if length <= LONGEST => Ok(length),
            _ => Err(StoreError::TooLong {
                request: self.request.clone(),
                bytes,
            }),
        }
    }

    fn garbage(&self, answer: String) -> StoreError {
        StoreError::Garbage {
            request: self.request.clone(),
            answer,
        }
    }

    /// How long the next turn may take.
    fn turn(&self) -> Result<Option<Duration>, StoreError> {
        match left(self.until) {
            Some(left) => Ok(Some(left)),
            None => Err(StoreError::Late {
                request: self.request.clone(),
            }),
        }
    }

    fn failed(&self, source: std::io::Error) -> Result<(), StoreError> {
        let request = self.request.clone();
        match source.kind() {
            // The time of a turn is over; the next one says whether that was the last.
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
            ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof => Err(StoreError::Closed { request }),
            _ => Err(StoreError::Broken { request, source }),
        }
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            let time = self.turn()?;
            let sent = self.stream.set_write_timeout(time);
            match sent.and_then(|()| (&mut &*self.stream).write(bytes)) {
                Ok(0) => self.failed(ErrorKind::BrokenPipe.into())?,
                Ok(n) => bytes = &bytes[n..],
                Err(error) => self.failed(error)?,
            }
        }
        Ok(())
    }

    fn fill(&self, mut memory: &mut [u8]) -> Result<(), StoreError> {
        while !memory.is_empty() {
            let time = self.turn()?;
            let set = self.stream.set_read_timeout(time);
            match set.and_then(|()| (&mut &*self.stream).read(memory)) {
                Ok(0) => self.failed(ErrorKind::UnexpectedEof.into())?,
                Ok(n) => memory = &mut memory[n..],
                Err(error) => self.failed(error)?,
            }
        }
        Ok(())
    }

    fn receive<const N: usize>(&self) -> Result<[u8; N], StoreError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
