//! Where a process listens: whoever comes is asked who it is, strangers are refused with a reason,
//! and those who belong here wait inside until they are asked for.

use crate::frame::{
    Answer, Card, HELLO_BYTES, Hello, Opening, Patience, Purpose, in_turns, opening, read_frame,
    refuse, write_all,
};
use std::{
    io::{self, ErrorKind, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a newcomer may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long it may take where others wait outside.
const IN_A_CROWD: Duration = Duration::from_millis(200);
/// Newcomers that are listened to at the same time; more wait outside.
const AT_ONCE: usize = 256;
/// How long one that was refused is listened to, so that it reads why before the connection ends.
const LINGER: Duration = Duration::from_millis(500);

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
    hall: Mutex<Hall>,
    arrived: Condvar,
    closed: AtomicBool,
    refused: AtomicU64,
    epoch: AtomicU32,
}

#[derive(Debug, Default)]
struct Hall {
    /// Those who were let in and have not been asked for.
    parked: Vec<(Hello, TcpStream)>,
    /// For each purpose, the last epoch in which nobody is waited for any more.
    complete: [Option<u32>; 2],
}

impl Hall {
    /// Why a newcomer will never be asked for.
    fn too_late(&self, hello: &Hello) -> Option<String> {
        let process = hello.card.process;
        match self.complete[hello.purpose as usize]? {
            last if hello.epoch < last => {
                Some("the cluster was rebuilt without this process".into())
            }
            last if hello.epoch == last => Some(format!(
                "nobody is waited for: process {process} is here already, or came too late"
            )),
            _ => None,
        }
    }
}

impl Door {
    /// Listens at `listener` for processes like this one.
    pub(crate) fn open(listener: TcpListener, own: Guest) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let inside = Arc::new(Inside {
            own,
            hall: Mutex::default(),
            arrived: Condvar::new(),
            closed: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            epoch: AtomicU32::new(0),
        });
        listener.set_nonblocking(true)?;
        let shared = inside.clone();
        thread::Builder::new()
            .name("anymesh door".into())
            .stack_size(256 << 10)
            .spawn(move || shared.listen(&listener))?;
        Ok(Self { inside, address })
    }

    /// The first who came for this purpose and epoch, waiting until `patience` ends.
    pub(crate) fn next(
        &self,
        purpose: Purpose,
        epoch: u32,
        patience: &Patience<'_>,
    ) -> io::Result<(Hello, TcpStream)> {
        let mut hall = self.inside.hall();
        loop {
            let fits = |(hello, _): &(Hello, _)| hello.purpose == purpose && hello.epoch == epoch;
            if let Some(at) = hall.parked.iter().position(fits) {
                return Ok(hall.parked.remove(at));
            }
            let turn = patience.turn()?;
            hall = self
                .inside
                .arrived
                .wait_timeout(hall, turn)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// From now on nobody is waited for with this purpose in this epoch or an earlier one: who
    /// comes or waits for that is told so.
    pub(crate) fn complete(&self, purpose: Purpose, epoch: u32) {
        let mut hall = self.inside.hall();
        let last = &mut hall.complete[purpose as usize];
        *last = (*last).max(Some(epoch));
        let parked = std::mem::take(&mut hall.parked);
        for (hello, stream) in parked {
            match hall.too_late(&hello) {
                Some(reason) => self.inside.refuse(&stream, reason),
                None => hall.parked.push((hello, stream)),
            }
        }
    }

    /// The number of the next cluster that is met at this door; the first one is 0.
    pub(crate) fn next_epoch(&self) -> u32 {
        self.inside.epoch.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How many were refused so far.
    #[cfg(test)]
    pub(crate) fn refused(&self) -> u64 {
        self.inside.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.inside.closed.store(true, Ordering::Relaxed);
        for (_, stream) in self.inside.hall().parked.drain(..) {
            refuse(&stream, "the process has left");
        }
    }
}

/// One who has not said who it is, or was told why not.
struct Newcomer {
    stream: TcpStream,
    said: Vec<u8>,
    since: Instant,
    refused: bool,
}

/// What becomes of a newcomer.
enum Next {
    /// It is listened to again; whether it said anything.
    Stay(bool),
    Leave,
    Enter(Box<Hello>),
}

impl Inside {
    fn hall(&self) -> MutexGuard<'_, Hall> {
        self.hall.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens to all newcomers in one thread and in turns, so that those who say nothing keep
    /// nobody else waiting.
    fn listen(&self, listener: &TcpListener) {
        let mut newcomers: Vec<Newcomer> = vec![];
        let mut pause = Duration::from_millis(1);
        while !self.closed.load(Ordering::Relaxed) {
            let mut moved = self.accept(listener, &mut newcomers);
            let mut at = 0;
            while at < newcomers.len() {
                match self.hear(&mut newcomers[at]) {
                    Next::Stay(spoke) => {
                        moved |= spoke;
                        at += 1;
                    }
                    Next::Leave => {
                        newcomers.remove(at);
                        moved = true;
                    }
                    Next::Enter(hello) => {
                        let newcomer = newcomers.remove(at);
                        self.park(*hello, newcomer, &mut newcomers);
                        moved = true;
                    }
                }
            }
            // A door that nobody knocks at costs little, also where there are hundreds.
            let longest = match self.hall().complete {
                [Some(_), Some(_)] => 100,
                _ => 10,
            };
            pause = match moved {
                true => Duration::from_millis(1),
                false => (pause * 2).min(Duration::from_millis(longest)),
            };
            thread::sleep(pause);
        }
    }

    /// Lets in who waits outside while there is room; whether there was anybody.
    fn accept(&self, listener: &TcpListener, newcomers: &mut Vec<Newcomer>) -> bool {
        let mut any = false;
        loop {
            if newcomers.len() >= AT_ONCE {
                // They are in the order in which they came.
                if newcomers[0].since.elapsed() < IN_A_CROWD {
                    return any;
                }
                let slow = newcomers.remove(0);
                if !slow.refused {
                    self.refuse(&slow.stream, "no introduction in time".into());
                }
            }
            // Nobody there, or no more file descriptors: both pass.
            let Ok((stream, _)) = listener.accept() else {
                return any;
            };
            any = true;
            if stream.set_nonblocking(true).is_ok() {
                newcomers.push(Newcomer {
                    stream,
                    said: vec![],
                    since: Instant::now(),
                    refused: false,
                });
            }
        }
    }

    /// What a newcomer has said by now.
    fn hear(&self, newcomer: &mut Newcomer) -> Next {
        let mut some = [0; 4096];
        let read = match (&newcomer.stream).read(&mut some) {
            Ok(0) => return Next::Leave,
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
            Err(_) => return Next::Leave,
        };
        let age = newcomer.since.elapsed();
        if newcomer.refused {
            return match age < LINGER {
                true => Next::Stay(read > 0),
                false => Next::Leave,
            };
        }
        newcomer.said.extend_from_slice(&some[..read]);
        let reason = match Opening::of(&newcomer.said) {
            Opening::Hello(hello) => match admit(&self.own, &hello) {
                Ok(()) => return Next::Enter(hello),
                Err(reason) => reason,
            },
            Opening::Stranger(reason) => reason,
            Opening::Unfinished if age < HANDSHAKE => return Next::Stay(read > 0),
            Opening::Unfinished => "no introduction within 5 s".into(),
        };
        self.send_away(newcomer, reason);
        Next::Stay(true)
    }

    /// Tells a newcomer why not and listens on a little.
    fn send_away(&self, newcomer: &mut Newcomer, reason: String) {
        self.refuse(&newcomer.stream, reason);
        newcomer.refused = true;
        newcomer.since = Instant::now();
        newcomer.said = vec![];
    }

    /// One who belongs here waits inside until it is asked for.
    fn park(&self, hello: Hello, mut newcomer: Newcomer, newcomers: &mut Vec<Newcomer>) {
        let mut hall = self.hall();
        let same = |(h, _): &&(Hello, TcpStream)| h.card.process == hello.card.process;
        let reason = match hall.too_late(&hello) {
            None if hall.parked.iter().filter(same).count() >= 4 => {
                Some("this process has knocked often enough".into())
            }
            other => other,
        };
        if let Some(reason) = reason {
            drop(hall);
            self.send_away(&mut newcomer, reason);
            newcomers.push(newcomer);
        } else if in_turns(&newcomer.stream).is_ok() {
            hall.parked.push((hello, newcomer.stream));
            self.arrived.notify_all();
        }
    }

    fn refuse(&self, stream: &TcpStream, reason: String) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        refuse(stream, reason);
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

/// Why there is no connection to a process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Closed {
    /// It did not answer in time.
    Late(String),
    /// It is not there, or not any more.
    Gone(String),
    /// It said why not.
    Refused(String),
    /// It makes no sense any more.
    Stopped,
}

impl Closed {
    fn of(address: SocketAddr, error: &io::Error) -> Self {
        let detail = format!("{address}: {}", in_words(error));
        match error.kind() {
            ErrorKind::TimedOut => Self::Late(detail),
            ErrorKind::Interrupted => Self::Stopped,
            _ => Self::Gone(detail),
        }
    }
}

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Late(detail) | Self::Gone(detail) | Self::Refused(detail) => detail,
            Self::Stopped => "the cluster has failed",
        })
    }
}

/// Connects to a process and says who this is; the stream once the other end has welcomed it.
pub(crate) fn knock(
    address: SocketAddr,
    hello: &Hello,
    patience: &Patience<'_>,
) -> Result<TcpStream, Closed> {
    let stream = dial(address, patience)?;
    introduce(&stream, address, hello, patience)?;
    Ok(stream)
}

/// Says who this is, and waits until the other end has said yes.
pub(crate) fn introduce(
    stream: &TcpStream,
    address: SocketAddr,
    hello: &Hello,
    patience: &Patience<'_>,
) -> Result<(), Closed> {
    let said = opening(hello).and_then(|bytes| write_all(stream, &bytes, patience));
    // One that was refused before it had said all may read why.
    match read_frame(stream, HELLO_BYTES, patience) {
        Ok(Answer::Welcome) => Ok(()),
        Ok(Answer::Refused(reason)) => Err(Closed::Refused(format!("{address} refused: {reason}"))),
        Err(e) => Err(Closed::of(address, said.as_ref().err().unwrap_or(&e))),
    }
}

/// A connection, as soon as somebody listens.
pub(crate) fn dial(address: SocketAddr, patience: &Patience<'_>) -> Result<TcpStream, Closed> {
    let mut pause = Duration::from_millis(5);
    loop {
        // A machine that does not answer is asked again, so that a failure elsewhere is noticed.
        let most = patience
            .left()
            .clamp(Duration::from_millis(1), Duration::from_secs(1));
        let failed = match TcpStream::connect_timeout(&address, most) {
            Ok(stream) => match in_turns(&stream) {
                Ok(()) => return Ok(stream),
                Err(e) => e,
            },
            Err(e) => e,
        };
        if (patience.stopped)() {
            return Err(Closed::Stopped);
        }
        if patience.left() <= pause {
            let detail = format!("{address} cannot be reached: {}", in_words(&failed));
            return Err(Closed::Late(detail));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
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
