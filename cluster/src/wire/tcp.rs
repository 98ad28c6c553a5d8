//! Tensors over TCP: a connection between every two processes, a thread that writes to each.

use super::{Broken, Receive, Send, Wait, Wire};
use crate::{
    door::{Door, in_words, knock},
    frame::{Answer, Hello, Patience, Purpose, read_all, refuse, write_all, write_frame},
    meet::World,
};
use anymesh_core::{
    Error, Result,
    transport::{Incoming, Outgoing},
};
use std::{
    collections::VecDeque,
    io,
    net::TcpStream,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

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
    /// How many messages were received.
    received: Mutex<u64>,
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
    jobs: VecDeque<(u64, Outgoing)>,
    /// Bytes that are queued or being written.
    bytes: usize,
    /// Somebody is writing.
    busy: bool,
    sent: u64,
    broken: Option<String>,
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
        let failed = |process: usize, detail: String| match world.control.alarm.verdict() {
            Some(verdict) => verdict.error("init", |p| vec![p]),
            None => Error::Transport {
                op: "init",
                detail: format!("no connection to {}: {detail}", cards[process]),
                ranks: vec![process],
            },
        };
        let mut peers: Vec<Option<Peer>> = cards.iter().map(|_| None).collect();
        // In a thread, so that two processes do not wait for each other's welcome in a ring.
        let below: Vec<_> = cards[..own].iter().map(|card| card.listens).collect();
        let dialed = thread::scope(|scope| {
            let dialing = scope.spawn(|| -> Vec<std::result::Result<TcpStream, String>> {
                below.iter().map(|a| knock(*a, &hello, until)).collect()
            });
            let accepted = accept(world, &mut peers, until);
            let dialed = dialing.join().unwrap_or_default();
            accepted.map(|()| dialed)
        })
        .map_err(|(process, detail)| failed(process, detail))?;
        for (process, stream) in dialed.into_iter().enumerate() {
            let stream = stream.map_err(|detail| failed(process, detail))?;
            peers[process] = Some(Peer::new(stream).map_err(|e| failed(process, e.to_string()))?);
        }
        if let Some(missing) = (0..peers.len()).find(|p| *p != own && peers[*p].is_none()) {
            return Err(failed(missing, "it did not come".into()));
        }
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

/// Lets those in that come after this one.
fn accept(
    world: &World,
    peers: &mut [Option<Peer>],
    until: Instant,
) -> std::result::Result<(), (usize, String)> {
    let (door, own): (&Door, _) = (&world.door, world.control.process);
    let cards = &world.control.cards;
    while let Some(missing) = (own + 1..peers.len()).find(|p| peers[*p].is_none()) {
        let rung = || world.control.alarm.has_rung();
        let patience = Patience {
            until: Some(until),
            stopped: &rung,
        };
        let (hello, stream) = door
            .next(Purpose::Data, world.epoch, &patience)
            .map_err(|e| (missing, in_words(&e)))?;
        let number = cards
            .iter()
            .position(|card| card.process == hello.card.process && card.pid == hello.card.pid);
        match number {
            Some(p) if p > own && peers[p].is_none() => {
                let told = |e: io::Error| (p, in_words(&e));
                let _ = stream.set_nodelay(true);
                write_frame(&stream, &Answer::Welcome, &Patience::until(until)).map_err(told)?;
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
            received: Mutex::new(0),
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.line.closed.store(true, Ordering::Relaxed);
        self.line.changed.notify_all();
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
            let Some((digest, bytes)) = next else {
                if self.closed.load(Ordering::Relaxed) {
                    let _ = self.stream.shutdown(std::net::Shutdown::Write);
                    return;
                }
                queue = self.wait(queue, Duration::from_millis(500));
                continue;
            };
            queue.busy = true;
            let number = queue.sent;
            queue.sent += 1;
            drop(queue);
            let patience = Patience {
                until: None,
                stopped: &|| self.closed.load(Ordering::Relaxed),
            };
            let written = self.write(digest, bytes.as_ref(), number, &patience);
            queue = self.queue();
            queue.busy = false;
            queue.bytes -= bytes.as_ref().len();
            if let Err(e) = written {
                queue.broken = Some(in_words(&e));
                queue.jobs.clear();
                queue.bytes = 0;
                self.changed.notify_all();
                return;
            }
            self.changed.notify_all();
        }
    }

    fn write(
        &self,
        digest: u64,
        bytes: &[u8],
        number: u64,
        patience: &Patience<'_>,
    ) -> io::Result<()> {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&digest.to_le_bytes());
        header[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[16..].copy_from_slice(&number.to_le_bytes());
        if bytes.len() <= SMALL {
            return write_all(&self.stream, &[&header[..], bytes].concat(), patience);
        }
        write_all(&self.stream, &header, patience)?;
        write_all(&self.stream, bytes, patience)
    }

    /// Queues bytes, or writes them right away.
    fn send(&self, to: usize, digest: u64, bytes: Outgoing, patience: &Patience<'_>) -> Ended {
        let gone = |detail: &String| Broken::Gone(to, detail.clone());
        let len = bytes.as_ref().len();
        let mut queue = self.queue();
        if let Some(detail) = &queue.broken {
            return Err(gone(detail));
        }
        if len > SMALL || queue.busy || !queue.jobs.is_empty() {
            queue.bytes += len;
            queue.jobs.push_back((digest, bytes));
            self.changed.notify_all();
            return Ok(());
        }
        queue.busy = true;
        let number = queue.sent;
        queue.sent += 1;
        drop(queue);
        let written = self.write(digest, bytes.as_ref(), number, patience);
        let mut queue = self.queue();
        queue.busy = false;
        self.changed.notify_all();
        written.map_err(|e| {
            queue.broken = Some(in_words(&e));
            broken(to, &e)
        })
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
        let stopped = || wait.stopped();
        let patience = Patience {
            until: Some(wait.until()),
            stopped: &stopped,
        };
        let mut to: Vec<usize> = vec![];
        for send in sends {
            if send.bytes.as_ref().len() > SMALL && !to.contains(&send.to) {
                to.push(send.to);
            }
            let line = &self.peer(send.to)?.line;
            line.send(send.to, send.digest, send.bytes, &patience)?;
        }
        // Who has not sent everything when the first one is late.
        let from: Vec<usize> = receives.iter().map(|r| r.from).collect();
        for (at, receive) in receives.into_iter().enumerate() {
            let peer = self.peer(receive.from)?;
            let late = |e: io::Error| match broken(receive.from, &e) {
                Broken::Late(_) => Broken::Late(self.late(&from[at..])),
                other => other,
            };
            let mut header = [0; HEADER];
            read_all(&peer.line.stream, &mut header, &patience).map_err(late)?;
            let word = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&header[at..at + 8]);
                u64::from_le_bytes(bytes)
            };
            let mut received = peer.received.lock().unwrap_or_else(PoisonError::into_inner);
            let bytes = &mut memories[receive.memory].bytes()[receive.bytes];
            if (word(0), word(8), word(16)) != (receive.digest, bytes.len() as u64, *received) {
                return Err(Broken::Differs(receive.from));
            }
            *received += 1;
            drop(received);
            read_all(&peer.line.stream, bytes, &patience).map_err(late)?;
        }
        for to in to {
            self.peer(to)?.line.settle(to, AHEAD, &patience)?;
        }
        Ok(memories)
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
    /// Of those that are still waited for, those that have sent nothing yet.
    fn late(&self, from: &[usize]) -> Vec<usize> {
        let silent = |process: &usize| match self.peer(*process) {
            Ok(peer) => {
                let stream = &peer.line.stream;
                let short = Some(Duration::from_millis(1));
                stream.set_read_timeout(short).is_err() || stream.peek(&mut [0]).is_err()
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
