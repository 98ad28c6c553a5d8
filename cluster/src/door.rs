//! Where a process listens: whoever comes is asked who it is, strangers are refused with a reason,
//! and those who belong here wait inside until they are asked for.

use crate::frame::{
    Card, HELLO_BYTES, Hello, MAGIC, Patience, Purpose, read_all, read_frame, refuse,
};
use std::{
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a newcomer may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Newcomers that are listened to at the same time; more wait outside.
const AT_ONCE: usize = 256;

/// What a newcomer must know to be let in.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) token: String,
    pub(crate) card: Card,
}

/// A listening socket with its thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct Door {
    inside: Arc<Inside>,
    pub(crate) address: SocketAddr,
}

#[derive(Debug)]
struct Inside {
    own: Guest,
    /// Those who were let in and have not been asked for.
    parked: Mutex<Vec<(Hello, TcpStream)>>,
    arrived: Condvar,
    closed: AtomicBool,
    busy: AtomicUsize,
    refused: AtomicU64,
}

impl Door {
    /// Listens at `listener` for processes like this one.
    pub(crate) fn open(listener: TcpListener, own: Guest) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let inside = Arc::new(Inside {
            own,
            parked: Mutex::default(),
            arrived: Condvar::new(),
            closed: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        });
        // Waiting in turns, so that a closed door is noticed.
        listener.set_nonblocking(true)?;
        let shared = inside.clone();
        thread::Builder::new()
            .name("anymesh door".into())
            .stack_size(256 << 10)
            .spawn(move || shared.listen(&listener))?;
        Ok(Self { inside, address })
    }

    /// The first who came for this purpose, epoch and with a number that `wanted` accepts, waiting
    /// until `patience` ends.
    pub(crate) fn next(
        &self,
        purpose: Purpose,
        epoch: u32,
        patience: &Patience<'_>,
    ) -> io::Result<(Hello, TcpStream)> {
        let fits = |hello: &Hello| hello.purpose == purpose && hello.epoch == epoch;
        let mut parked = self.inside.parked();
        loop {
            // Who speaks of an epoch that is over will never be asked for.
            for (_, stream) in parked.extract_if(.., |(hello, _)| hello.epoch < epoch) {
                refuse(&stream, "the cluster was rebuilt without this process");
            }
            if let Some(at) = parked.iter().position(|(hello, _)| fits(hello)) {
                return Ok(parked.remove(at));
            }
            let turn = patience.turn()?;
            parked = self
                .inside
                .arrived
                .wait_timeout(parked, turn)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// How many were refused so far.
    pub(crate) fn refused(&self) -> u64 {
        self.inside.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.inside.closed.store(true, Ordering::Relaxed);
        for (_, stream) in self.inside.parked().drain(..) {
            refuse(&stream, "the process has left");
        }
    }
}

impl Inside {
    fn parked(&self) -> MutexGuard<'_, Vec<(Hello, TcpStream)>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        let mut pause = Duration::from_millis(1);
        while !self.closed.load(Ordering::Relaxed) {
            if self.busy.load(Ordering::Relaxed) >= AT_ONCE {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let Ok((stream, _)) = listener.accept() else {
                // Nobody there, or no more file descriptors: both pass. A door that nobody knocks at
                // costs little.
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
                continue;
            };
            pause = Duration::from_millis(1);
            self.busy.fetch_add(1, Ordering::Relaxed);
            let shared = self.clone();
            let spawned = thread::Builder::new()
                .name("anymesh handshake".into())
                .stack_size(256 << 10)
                .spawn(move || {
                    shared.receive(stream);
                    shared.busy.fetch_sub(1, Ordering::Relaxed);
                });
            if spawned.is_err() {
                self.busy.fetch_sub(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Asks a newcomer who it is.
    fn receive(&self, stream: TcpStream) {
        let known = stream
            .set_nonblocking(false)
            .map_err(|e| e.to_string())
            .and_then(|()| self.known(&stream));
        match known {
            Ok(hello) => {
                let mut parked = self.parked();
                let waiting = parked
                    .iter()
                    .filter(|(h, _)| h.card.process == hello.card.process)
                    .count();
                if waiting >= 4 {
                    drop(parked);
                    return self.refuse(&stream, "this process has knocked often enough".into());
                }
                parked.push((hello, stream));
                self.arrived.notify_all();
            }
            Err(reason) => self.refuse(&stream, reason),
        }
    }

    fn refuse(&self, stream: &TcpStream, reason: String) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        refuse(stream, reason);
    }

    /// The newcomer's words, or why it does not belong here.
    fn known(&self, stream: &TcpStream) -> Result<Hello, String> {
        let closed = || self.closed.load(Ordering::Relaxed);
        let patience = Patience {
            until: Some(Instant::now() + HANDSHAKE),
            stopped: &closed,
        };
        let silent = |e: io::Error| match e.kind() {
            ErrorKind::TimedOut => "no introduction within 5 s".to_string(),
            _ => e.to_string(),
        };
        let mut magic = [0; 8];
        read_all(stream, &mut magic, &patience).map_err(silent)?;
        if magic[..7] != MAGIC[..7] {
            return Err("this is no anymesh process".into());
        }
        if magic != MAGIC {
            return Err(format!(
                "version {} of the protocol, this process speaks version {}",
                magic[7], MAGIC[7]
            ));
        }
        let hello: Hello = read_frame(stream, HELLO_BYTES, &patience).map_err(silent)?;
        admit(&self.own, &hello)?;
        Ok(hello)
    }
}

/// Refuses who does not belong to the same run, program and version.
pub(crate) fn admit(own: &Guest, hello: &Hello) -> Result<(), String> {
    if !same_secret(&own.token, &hello.token) {
        return Err("the token is not that of this run: start all processes by one launcher, or set ANYMESH_TOKEN alike".into());
    }
    let (mine, theirs) = (&own.card, &hello.card);
    for (what, a, b) in [
        ("run", &mine.run, &theirs.run),
        ("version of anymesh", &mine.version, &theirs.version),
        ("program", &mine.program, &theirs.program),
    ] {
        if a != b {
            return Err(format!(
                "process {} is of {what} '{b}', this is {what} '{a}'",
                theirs.process
            ));
        }
    }
    if mine.size != theirs.size || theirs.process >= theirs.size {
        return Err(format!(
            "process {} of {} does not fit into a run of {} processes",
            theirs.process, theirs.size, mine.size
        ));
    }
    Ok(())
}

/// Compares without telling by the time how much was right.
fn same_secret(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |d, (a, b)| d | (a ^ b)) == 0
}

/// Connects to a process and says who this is, trying again until it listens; the stream once the
/// other end has welcomed it.
pub(crate) fn knock(
    address: SocketAddr,
    hello: &Hello,
    until: Instant,
) -> Result<TcpStream, String> {
    let stream = dial(address, until)?;
    let told = |e: io::Error| format!("{address} did not answer: {}", in_words(&e));
    crate::frame::introduce(&stream, hello, until).map_err(told)?;
    welcome(&stream, until).map_err(|reason| format!("{address}: {reason}"))?;
    Ok(stream)
}

/// A connection, as soon as somebody listens.
pub(crate) fn dial(address: SocketAddr, until: Instant) -> Result<TcpStream, String> {
    let mut pause = Duration::from_millis(5);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let failed = match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1)))
        {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(e) => e,
        };
        if left <= pause {
            return Err(format!(
                "{address} cannot be reached: {}",
                in_words(&failed)
            ));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// Waits until the other end has said yes.
pub(crate) fn welcome(stream: &TcpStream, until: Instant) -> Result<(), String> {
    use crate::frame::Answer;
    match read_frame(stream, HELLO_BYTES, &Patience::until(until)) {
        Ok(Answer::Welcome) => Ok(()),
        Ok(Answer::Refused(reason)) => Err(format!("refused: {reason}")),
        Err(e) => Err(in_words(&e)),
    }
}

/// An error of a socket, for people.
pub(crate) fn in_words(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "the connection was closed".into(),
        ErrorKind::TimedOut => "nothing came in time".into(),
        ErrorKind::ConnectionRefused => "nobody listens there".into(),
        _ => error.to_string(),
    }
}
