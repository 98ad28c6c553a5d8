//! Tensors over TCP: a connection between every two processes, a thread that writes to each.

use super::{Broken, Flying, Receive, Send, Wait, Wire};
use crate::{
    door::{Closed, Door, in_words, knock},
    frame::{Answer, Card, Hello, Patience, Purpose, in_turns, is_turn_over, refuse, write_frame},
    meet::World,
};
use anymesh_core::{
    Error, Result,
    transport::{Incoming, Outgoing},
};
use std::{
    collections::VecDeque,
    io::{self, Write},
    net::TcpStream,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

mod reader;
#[cfg(test)]
mod tests;

use reader::{Flight, Reader};

/// Digest, size and number of what follows.
const HEADER: usize = 24;
/// Up to this size the caller writes itself, where nothing else is being written: it fits into the
/// buffers of the system.
const SMALL: usize = 32 << 10;
/// A caller that is ahead of a peer by this much waits for it.
const AHEAD: usize = 64 << 20;

/// Connections to all other processes.
#[derive(Debug)]
pub(crate) struct Tcp {
    /// By number; none to itself.
    peers: Vec<Option<Peer>>,
    process: usize,
}

#[derive(Debug)]
struct Peer {
    line: Arc<Line>,
    reader: Arc<Reader>,
}

/// What is to be written to one peer.
#[derive(Debug)]
struct Line {
    stream: TcpStream,
    queue: Mutex<Queue>,
    changed: Condvar,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Bytes that are queued or being written.
    bytes: usize,
    /// Somebody is writing.
    busy: bool,
    sent: u64,
    broken: Option<String>,
}

/// A message to be written, and how much of it was.
#[derive(Debug)]
struct Job {
    header: [u8; HEADER],
    bytes: Outgoing,
    written: usize,
}

impl Job {
    fn new(number: u64, digest: u64, bytes: Outgoing) -> Self {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&digest.to_le_bytes());
        header[8..16].copy_from_slice(&(bytes.as_ref().len() as u64).to_le_bytes());
        header[16..].copy_from_slice(&number.to_le_bytes());
        Self {
            header,
            bytes,
            written: 0,
        }
    }

    fn len(&self) -> usize {
        self.bytes.as_ref().len()
    }

    /// Writes on until all is written, `ErrorKind::WouldBlock` when the other end takes no more
    /// for a while.
    fn write(&mut self, mut to: &TcpStream) -> io::Result<()> {
        let bytes = self.bytes.as_ref();
        while self.written < HEADER + bytes.len() {
            let written = match self.written.checked_sub(HEADER) {
                Some(at) => to.write(&bytes[at..]),
                None if bytes.len() <= SMALL => {
                    to.write(&[&self.header[self.written..], bytes].concat())
                }
                None => to.write(&self.header[self.written..]),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_turn_over(&e) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Tcp {
    /// Connects to all processes: to those before this one, and those after it come here.
    pub(crate) fn connect(world: &World, until: Instant) -> Result<Self> {
        let own = world.control.process;
        let cards = &world.control.cards;
        let hello = Hello {
            purpose: Purpose::Data,
            token: world.guest.token.clone(),
            card: world.guest.card.clone(),
            epoch: world.epoch,
        };
        let mut peers: Vec<Option<Peer>> = cards.iter().map(|_| None).collect();
        let rung = || world.control.alarm.has_rung();
        let patience = || Patience {
            until: Some(until),
            stopped: &rung,
        };
        let seconds = patience().left().as_secs_f64();
        // In a thread, so that two processes do not wait for each other's welcome in a ring.
        let (dialed, accepted) = thread::scope(|scope| {
            let dial = || {
                let below = cards[..own].iter().enumerate();
                let knock = |(process, card): (usize, &Card)| {
                    let stream = knock(card.listens, &hello, &patience());
                    stream.map_err(|closed| (process, closed))
                };
                below.map(knock).collect::<std::result::Result<Vec<_>, _>>()
            };
            let dialing = scope.spawn(dial);
            let accepted = accept(world, &mut peers, &patience());
            let unwound = |_| Err((own, Closed::Gone("the program panicked".into())));
            (dialing.join().unwrap_or_else(unwound), accepted)
        });
        let failed = |(process, closed)| not_connected(world, seconds, process, closed);
        accepted.map_err(failed)?;
        for (process, stream) in dialed.map_err(failed)?.into_iter().enumerate() {
            let gone = |e: io::Error| failed((process, Closed::Gone(e.to_string())));
            peers[process] = Some(Peer::new(stream).map_err(gone)?);
        }
        world.door.complete(Purpose::Data, world.epoch);
        Ok(Self {
            peers,
            process: own,
        })
    }

    fn peer(&self, process: usize) -> std::result::Result<&Peer, Broken> {
        let none = || Broken::Gone(process, "there is no such process".into());
        self.peers
            .get(process)
            .and_then(Option::as_ref)
            .ok_or_else(none)
    }
}

/// The error of all processes where two did not get connected.
fn not_connected(world: &World, seconds: f64, process: usize, closed: Closed) -> Error {
    let control = &world.control;
    let broken = match closed {
        Closed::Late(_) => Broken::Late(vec![process]),
        Closed::Gone(detail) => Broken::Gone(process, detail),
        Closed::Stopped => Broken::Stopped,
        // One that leaves refuses too: then the word of the hub is the better one.
        Closed::Refused(_) if control.alarm.wait(Duration::from_millis(200)).is_some() => {
            Broken::Stopped
        }
        Closed::Refused(detail) => {
            let error = Error::Transport {
                op: "init",
                detail: format!("no connection to {}: {detail}", control.name(process)),
                ranks: vec![process],
            };
            control.failed(&error.to_string());
            return error;
        }
    };
    control
        .conclude(broken, seconds)
        .error("init", |process| vec![process])
}

/// Lets those in that come after this one.
fn accept(
    world: &World,
    peers: &mut [Option<Peer>],
    patience: &Patience<'_>,
) -> std::result::Result<(), (usize, Closed)> {
    let (door, own): (&Door, _) = (&world.door, world.control.process);
    let cards = &world.control.cards;
    while let Some(missing) = (own + 1..peers.len()).find(|p| peers[*p].is_none()) {
        let (hello, stream) =
            door.next(Purpose::Data, world.epoch, patience)
                .map_err(|e| match e.kind() {
                    io::ErrorKind::TimedOut => (missing, Closed::Late("it did not come".into())),
                    _ => (missing, Closed::Stopped),
                })?;
        let number = cards
            .iter()
            .position(|card| card.process == hello.card.process && card.pid == hello.card.pid);
        match number {
            Some(p) if p > own && peers[p].is_none() => {
                let told = |e: io::Error| (p, Closed::Gone(in_words(&e)));
                write_frame(&stream, &Answer::Welcome, patience).map_err(told)?;
                peers[p] = Some(Peer::new(stream).map_err(told)?);
            }
            _ => refuse(
                &stream,
                "no connection for tensors is expected from this process",
            ),
        }
    }
    Ok(())
}

impl Peer {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let line = Arc::new(Line {
            stream,
            queue: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        let writer = line.clone();
        thread::Builder::new()
            .name("anymesh writer".into())
            .stack_size(256 << 10)
            .spawn(move || writer.run())?;
        Ok(Self {
            line,
            reader: Arc::default(),
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.line.closed.store(true, Ordering::Relaxed);
        // With the lock, or the writer might look just before and sleep just after.
        let queue = self.line.queue();
        self.line.changed.notify_all();
        drop(queue);
        self.reader.close();
    }
}

impl Line {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, turn: Duration) -> MutexGuard<'a, Queue> {
        let waited = self.changed.wait_timeout(queue, turn);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Writes what is queued until the peer is dropped.
    fn run(&self) {
        let mut queue = self.queue();
        loop {
            let next = match queue.busy {
                true => None,
                false => queue.jobs.pop_front(),
            };
            let Some(mut job) = next else {
                if self.closed.load(Ordering::Relaxed) {
                    let _ = self.stream.shutdown(std::net::Shutdown::Write);
                    return;
                }
                let waited = self.changed.wait(queue);
                queue = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            // One that takes nothing keeps this thread, and nobody else.
            let written = loop {
                match job.write(&self.stream) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        if self.closed.load(Ordering::Relaxed) {
                            break Err(e);
                        }
                    }
                    other => break other,
                }
            };
            queue = self.queue();
            queue.busy = false;
            queue.bytes -= job.len();
            if let Err(e) = written {
                queue.broken = Some(in_words(&e));
                queue.jobs.clear();
                queue.bytes = 0;
                self.changed.notify_all();
                let _ = self.stream.shutdown(std::net::Shutdown::Write);
                return;
            }
            self.changed.notify_all();
        }
    }

    /// Queues bytes, or writes them right away.
    fn send(&self, to: usize, digest: u64, bytes: Outgoing) -> Ended {
        let mut queue = self.queue();
        if let Some(detail) = &queue.broken {
            return Err(Broken::Gone(to, detail.clone()));
        }
        let mut job = Job::new(queue.sent, digest, bytes);
        queue.sent += 1;
        let len = job.len();
        if len > SMALL || queue.busy || !queue.jobs.is_empty() {
            queue.bytes += len;
            queue.jobs.push_back(job);
            self.changed.notify_all();
            return Ok(());
        }
        queue.busy = true;
        drop(queue);
        let written = job.write(&self.stream);
        let mut queue = self.queue();
        queue.busy = false;
        let ended = match written {
            Ok(()) => Ok(()),
            // The other end may be waiting for this one to read: the thread writes the rest.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                queue.bytes += len;
                queue.jobs.push_front(job);
                Ok(())
            }
            Err(e) => {
                queue.broken = Some(in_words(&e));
                Err(broken(to, &e))
            }
        };
        self.changed.notify_all();
        ended
    }

    /// Waits until not too much is left to write.
    fn settle(&self, to: usize, left: usize, patience: &Patience<'_>) -> Ended {
        let mut queue = self.queue();
        while queue.bytes > left {
            if let Some(detail) = &queue.broken {
                return Err(Broken::Gone(to, detail.clone()));
            }
            let turn = patience.turn().map_err(|e| broken(to, &e))?;
            queue = self.wait(queue, turn);
        }
        Ok(())
    }
}

type Ended = std::result::Result<(), Broken>;

/// What an error of a socket means.
fn broken(process: usize, error: &io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::TimedOut => Broken::Late(vec![process]),
        io::ErrorKind::Interrupted => Broken::Stopped,
        _ => Broken::Gone(process, in_words(error)),
    }
}

impl Wire for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn transfer(
        &self,
        sends: Vec<Send>,
        mut memories: Vec<Incoming>,
        receives: Vec<Receive>,
        wait: &dyn Wait,
    ) -> std::result::Result<Vec<Incoming>, Broken> {
        debug_assert!(sends.iter().all(|s| s.to != self.process));
        // A process that has left closes its connections, so what it sent before is still there.
        let stopped = || wait.failed();
        let patience = Patience {
            until: Some(wait.until()),
            stopped: &stopped,
        };
        let to = self.send(sends)?;
        // Who has not sent everything when the first one is late.
        let from: Vec<usize> = receives.iter().map(|r| r.from).collect();
        for (at, receive) in receives.into_iter().enumerate() {
            let Peer { line, reader } = self.peer(receive.from)?;
            let bytes = &mut memories[receive.memory].bytes()[receive.bytes];
            reader
                .read(line, receive.from, receive.digest, bytes, &patience)
                .map_err(|broken| match broken {
                    Broken::Late(_) => Broken::Late(self.late(&from[at..])),
                    other => other,
                })?;
        }
        for to in to {
            self.peer(to)?.line.settle(to, AHEAD, &patience)?;
        }
        Ok(memories)
    }

    fn posts(&self) -> bool {
        true
    }

    fn post(
        &self,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
        wait: &dyn Wait,
    ) -> std::result::Result<Box<dyn Flying>, Broken> {
        let stopped = || wait.failed();
        let patience = Patience {
            until: Some(wait.until()),
            stopped: &stopped,
        };
        // What was sent before it, so that a message of any size goes beside the program.
        for send in &sends {
            (self.peer(send.to)?.line).settle(send.to, AHEAD, &patience)?;
        }
        self.send(sends)?;
        let reader = |from: usize| self.peer(from).map(|peer| (&peer.reader, &peer.line));
        Ok(Box::new(Flight::post(memories, &receives, reader)?))
    }

    fn flush(&self, wait: &dyn Wait) {
        let stopped = || wait.stopped();
        let patience = Patience {
            until: Some(wait.until()),
            stopped: &stopped,
        };
        for (to, peer) in self.peers.iter().enumerate() {
            // One that is gone takes nothing any more.
            let _ = peer.as_ref().map(|peer| peer.line.settle(to, 0, &patience));
        }
    }
}

impl Tcp {
    /// Queues all of these; to whom.
    fn send(&self, sends: Vec<Send>) -> std::result::Result<Vec<usize>, Broken> {
        let mut to: Vec<usize> = vec![];
        for send in sends {
            if !to.contains(&send.to) {
                to.push(send.to);
            }
            let line = &self.peer(send.to)?.line;
            line.send(send.to, send.digest, send.bytes)?;
        }
        Ok(to)
    }

    /// Of those that are still waited for, those that have sent nothing yet.
    fn late(&self, from: &[usize]) -> Vec<usize> {
        let silent = |process: &usize| match self.peer(*process) {
            Ok(peer) => {
                let stream = &peer.line.stream;
                let short = Some(Duration::from_millis(1));
                let silent =
                    stream.set_read_timeout(short).is_err() || stream.peek(&mut [0]).is_err();
                silent | in_turns(stream).is_err()
            }
            Err(_) => true,
        };
        let mut late: Vec<usize> = from.iter().copied().filter(silent).collect();
        late.sort_unstable();
        late.dedup();
        if late.is_empty() {
            late.extend(from.first());
        }
        late
    }
}
