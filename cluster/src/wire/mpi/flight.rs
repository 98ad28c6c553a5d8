//! One call of the wire: everything that it sends and receives.
#![allow(unsafe_code)]

use super::{
    super::{Broken, Receive, Send, Wait},
    Mpi, State,
    library::Trouble,
    requests::{Fault, Requests},
};
use anymesh_core::transport::Incoming;
use std::{
    mem::ManuallyDrop,
    time::{Duration, Instant},
};

/// The size of a head at most, on every process: what follows it is never longer than the memory
/// for it, since the sizes have been compared.
const HEAD: usize = 2 << 10;

/// Messages of at most this size are packed: a copy costs less than a message of MPI.
const SMALL: usize = 1 << 10;

/// So many messages of a call between two processes are not packed, the largest: MPI becomes slow,
/// or worse, where thousands are under way.
pub(super) const LARGE: usize = 64;

/// So often MPI is asked in a row before other processes are let in, which may be those waited for.
const SPINS: u32 = 50;

/// So often before a process that nothing has come for sleeps between.
const PATIENCE: u32 = 20_000;
const NAP: Duration = Duration::from_micros(50);

/// Everything of one call. Its memory is MPI's until all requests are complete, so it is never
/// dropped before [`Flight::land`].
pub(super) struct Flight<'a> {
    wire: &'a Mpi,
    sends: ManuallyDrop<Vec<Send>>,
    memories: ManuallyDrop<Vec<Incoming>>,
    /// Where they are: MPI writes to parts of one while we look at others, so they are not borrowed
    /// again.
    places: Vec<*mut [u8]>,
    receives: Vec<Receive>,
    sent: ManuallyDrop<Vec<Vec<u8>>>,
    letters: ManuallyDrop<Vec<Letter>>,
    requests: Requests,
    /// What each request is.
    kinds: Vec<Kind>,
    /// How many heads have not arrived.
    awaited: usize,
}

/// What a request does.
#[derive(Clone, Copy)]
enum Kind {
    /// Sends to a process.
    To(usize),
    /// Receives the head of a letter from a process.
    Head(usize, usize),
    /// So many bytes of its body.
    Body(usize, usize, usize),
    /// So many bytes of a tensor, from a process.
    Tensor(usize, usize),
}

impl Kind {
    fn process(self) -> usize {
        let (Self::To(process)
        | Self::Head(process, _)
        | Self::Body(process, _, _)
        | Self::Tensor(process, _)) = self;
        process
    }
}

/// What a process is about to send us in this call, by what we know.
struct Letter {
    from: usize,
    /// By their places in `receives`.
    messages: Vec<usize>,
    expected: Outline,
    head: Vec<u8>,
    /// Table and packed messages, where the head has no room for them.
    body: Vec<u8>,
    /// How much of the body has not arrived.
    left: usize,
}

/// What two processes know of their messages in a call, before they send any.
struct Outline {
    /// The number of the call, how many messages, and the size of the body.
    start: Vec<u8>,
    /// Digest and size of each message.
    table: Vec<u8>,
    /// Messages of at most this size are packed.
    packed: usize,
    /// The size of table and packed messages.
    body: usize,
}

impl Outline {
    fn new(number: u64, messages: &[(u64, usize)]) -> Self {
        let mut table = Vec::with_capacity(16 * messages.len());
        for (digest, len) in messages {
            table.extend(digest.to_le_bytes());
            table.extend((*len as u64).to_le_bytes());
        }
        let mut sizes: Vec<usize> = messages.iter().map(|(_, len)| *len).collect();
        let all = sizes
            .iter()
            .fold(0usize, |all, len| all.saturating_add(*len));
        let packed = if table.len().saturating_add(all) <= HEAD - Self::START {
            usize::MAX
        } else {
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes.get(LARGE).copied().unwrap_or(0).max(SMALL)
        };
        let inside = sizes.iter().filter(|len| **len <= packed).sum::<usize>();
        let body = table.len() + inside;
        let start = [number, messages.len() as u64, body as u64];
        Self {
            start: start.into_iter().flat_map(u64::to_le_bytes).collect(),
            table,
            packed,
            body,
        }
    }

    /// The size of the start.
    const START: usize = 24;

    /// Whether the body is in the head.
    fn fits(&self) -> bool {
        Self::START + self.body <= HEAD
    }

    fn head(&self) -> usize {
        Self::START + if self.fits() { self.body } else { 0 }
    }
}

/// The places of messages, by their process.
fn by_process(
    processes: usize,
    of: impl Iterator<Item = usize>,
) -> Result<Vec<Vec<usize>>, Broken> {
    let mut places = vec![vec![]; processes];
    for (i, process) in of.enumerate() {
        match places.get_mut(process) {
            Some(places) => places.push(i),
            None => return Err(Broken::Gone(process, "there is no such process".into())),
        }
    }
    Ok(places)
}

impl<'a> Flight<'a> {
    pub(super) fn new(
        wire: &'a Mpi,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
    ) -> Self {
        let mut memories = ManuallyDrop::new(memories);
        let places = memories
            .iter_mut()
            .map(|memory| memory.bytes() as *mut [u8]);
        Self {
            wire,
            sends: ManuallyDrop::new(sends),
            places: places.collect(),
            memories,
            receives,
            sent: ManuallyDrop::new(vec![]),
            letters: ManuallyDrop::new(vec![]),
            requests: Requests::default(),
            kinds: vec![],
            awaited: 0,
        }
    }

    /// Asks for all heads and sends everything.
    pub(super) fn start(&mut self, state: &mut State) -> Result<(), Broken> {
        let world = self.wire.world;
        let _call = world.enter().map_err(|e| broken(0, e))?;
        let processes = self.wire.ranks.len();
        let from = by_process(processes, self.receives.iter().map(|r| r.from))?;
        for (from, messages) in from.into_iter().enumerate() {
            if messages.is_empty() {
                continue;
            }
            let about = |i: &usize| {
                let receive = &self.receives[*i];
                (receive.digest, receive.bytes.len())
            };
            let about: Vec<_> = messages.iter().map(about).collect();
            let expected = Outline::new(state.received[from], &about);
            state.received[from] += 1;
            self.letters.push(Letter {
                from,
                messages,
                head: vec![0; HEAD],
                body: vec![0; if expected.fits() { 0 } else { expected.body }],
                left: 0,
                expected,
            });
        }
        for (at, letter) in self.letters.iter_mut().enumerate() {
            let (rank, memory) = (self.wire.ranks[letter.from], letter.head.as_mut_slice());
            // SAFETY: the memory belongs to this flight, which keeps it for ever unless it lands,
            // and looks at it only when its request is complete.
            unsafe { self.requests.receive(world, memory, rank, self.wire.tag) }
                .map_err(|e| broken(letter.from, e))?;
            self.kinds.push(Kind::Head(letter.from, at));
        }
        self.awaited = self.letters.len();
        let to = by_process(processes, self.sends.iter().map(|s| s.to))?;
        // Everybody begins with its successor, so that not all send to the same one first.
        let me = self
            .wire
            .ranks
            .iter()
            .position(|r| *r as usize == world.rank());
        let first = me.map_or(0, |me| me + 1);
        for to_process in (0..processes).map(|k| (first + k) % processes) {
            if !to[to_process].is_empty() {
                self.send(to_process, &to[to_process], state)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, to: usize, messages: &[usize], state: &mut State) -> Result<(), Broken> {
        let Mpi {
            world,
            ranks,
            tag,
            piece,
            ..
        } = self.wire;
        let sends = &*self.sends;
        let bytes = || messages.iter().map(|i| sends[*i].bytes.as_ref());
        let about = messages.iter().map(|i| sends[*i].digest);
        let about: Vec<_> = about.zip(bytes().map(<[u8]>::len)).collect();
        let outline = Outline::new(state.sent[to], &about);
        state.sent[to] += 1;
        let (packed, fits) = (outline.packed, outline.fits());
        let mut first = outline.start;
        let mut body = outline.table;
        bytes()
            .filter(|bytes| bytes.len() <= packed)
            .for_each(|bytes| body.extend_from_slice(bytes));
        if fits {
            first.append(&mut body);
        }
        self.sent.extend([first, body]);
        let [.., first, body] = self.sent.as_slice() else {
            return Ok(());
        };
        let large = bytes().filter(|bytes| bytes.len() > packed);
        let rest = std::iter::once(body.as_slice()).chain(large);
        let pieces = std::iter::once((first.as_slice(), *tag)).chain(
            rest.flat_map(|bytes| bytes.chunks(*piece))
                .map(|p| (p, tag + 1)),
        );
        for (bytes, tag) in pieces {
            // SAFETY: what is sent belongs to this flight, which keeps it for ever unless it
            // lands; bytes of vectors stay where they are when the vectors move.
            unsafe { self.requests.send(world, bytes, ranks[to], tag) }
                .map_err(|e| broken(to, e))?;
            self.kinds.push(Kind::To(to));
        }
        Ok(())
    }

    /// Until everything is sent and received.
    pub(super) fn finish(&mut self, wait: &dyn Wait) -> Result<(), Broken> {
        let (until, mut idle, mut done) = (wait.until(), 0u32, vec![]);
        while self.requests.open() > 0 {
            if self.step(&mut done)? {
                idle = 0;
                continue;
            }
            idle = idle.saturating_add(1);
            if wait.stopped() {
                return Err(Broken::Stopped);
            }
            if idle % 64 == 0 && Instant::now() >= until {
                return Err(Broken::Late(self.missing()));
            }
            if idle > PATIENCE && self.requests.open() == self.awaited {
                // Nothing is under way: others compute. Where something is, MPI needs to be asked.
                std::thread::sleep(NAP);
            } else if idle > SPINS {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Lets MPI work once; whether something became complete.
    fn step(&mut self, done: &mut Vec<(Kind, usize)>) -> Result<bool, Broken> {
        let _call = self.wire.world.enter().map_err(|e| broken(0, e))?;
        let (mut trouble, kinds) = (None, &self.kinds);
        let tested = self.requests.test(|i, outcome| match (kinds[i], outcome) {
            (kind, Ok(len)) => done.push((kind, len)),
            (
                Kind::Head(from, _) | Kind::Body(from, ..) | Kind::Tensor(from, _),
                Err(Fault::Long),
            ) => {
                trouble = Some(Broken::Differs(from));
            }
            (kind, Err(fault)) => {
                trouble = Some(Broken::Gone(kind.process(), fault.to_string()));
            }
        });
        tested.map_err(|e| broken(0, e))?;
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        let some = !done.is_empty();
        for (kind, len) in done.drain(..) {
            match kind {
                Kind::To(_) => {}
                Kind::Head(_, at) => self.opened(at, len)?,
                Kind::Tensor(_, expected) if len == expected => {}
                Kind::Body(_, at, expected) if len == expected => {
                    self.letters[at].left -= len;
                    if self.letters[at].left == 0 {
                        self.read(at)?;
                    }
                }
                Kind::Tensor(from, _) | Kind::Body(from, ..) => return Err(Broken::Differs(from)),
            }
        }
        Ok(some)
    }

    /// The head of a letter has arrived.
    fn opened(&mut self, at: usize, len: usize) -> Result<(), Broken> {
        self.awaited -= 1;
        let letter = &mut self.letters[at];
        if len != letter.expected.head() || !letter.head.starts_with(&letter.expected.start) {
            return Err(Broken::Differs(letter.from));
        }
        if letter.expected.fits() {
            return self.read(at);
        }
        let Mpi {
            world,
            ranks,
            tag,
            piece,
            ..
        } = self.wire;
        letter.left = letter.body.len();
        for piece in letter.body.chunks_mut(*piece) {
            self.kinds.push(Kind::Body(letter.from, at, piece.len()));
            // SAFETY: the memory belongs to this flight, which keeps it for ever unless it lands,
            // and looks at it only when all of it has arrived.
            unsafe {
                self.requests
                    .receive(world, piece, ranks[letter.from], tag + 1)
            }
            .map_err(|e| broken(letter.from, e))?;
        }
        Ok(())
    }

    /// Table and packed messages of a letter are there: memory for the others.
    fn read(&mut self, at: usize) -> Result<(), Broken> {
        let Letter {
            from,
            messages,
            expected,
            head,
            body,
            ..
        } = &self.letters[at];
        let body = if expected.fits() {
            &head[Outline::START..expected.head()]
        } else {
            body
        };
        let Some(mut packed) = body.strip_prefix(expected.table.as_slice()) else {
            return Err(Broken::Differs(*from));
        };
        let Mpi {
            world,
            ranks,
            tag,
            piece,
            ..
        } = self.wire;
        for i in messages {
            let Receive { memory, bytes, .. } = &self.receives[*i];
            let place = self.places[*memory];
            assert!(bytes.start <= bytes.end && bytes.end <= place.len());
            // SAFETY: it is a part of memory that belongs to this flight, as was just made sure.
            let at = unsafe { place.cast::<u8>().add(bytes.start) };
            if bytes.len() <= expected.packed {
                let (mine, others) = packed.split_at(bytes.len());
                packed = others;
                // SAFETY: as many bytes as there is room for; nobody else has this part.
                unsafe { std::ptr::copy_nonoverlapping(mine.as_ptr(), at, mine.len()) };
                continue;
            }
            for start in (0..bytes.len()).step_by(*piece) {
                let len = (*piece).min(bytes.len() - start);
                self.kinds.push(Kind::Tensor(*from, len));
                // SAFETY: the memory belongs to this flight, which keeps it for ever unless it
                // lands, and does not look at it before.
                unsafe {
                    let piece = std::ptr::slice_from_raw_parts_mut(at.add(start), len);
                    self.requests.receive(world, piece, ranks[*from], tag + 1)
                }
                .map_err(|e| broken(*from, e))?;
            }
        }
        Ok(())
    }

    /// Who has not sent or taken everything.
    fn missing(&self) -> Vec<usize> {
        let mut missing: Vec<usize> = self
            .requests
            .incomplete()
            .map(|i| self.kinds[i].process())
            .collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// All requests are complete: the memory is ours again.
    pub(super) fn land(self) -> Vec<Incoming> {
        drop(ManuallyDrop::into_inner(self.sends));
        drop(ManuallyDrop::into_inner(self.sent));
        drop(ManuallyDrop::into_inner(self.letters));
        ManuallyDrop::into_inner(self.memories)
    }

    pub(super) fn abandon(mut self) {
        let kinds = &self.kinds;
        let receives = |i: usize| !matches!(kinds.get(i), Some(Kind::To(_)));
        if let Ok(_call) = self.wire.world.enter() {
            self.requests.abandon(receives);
        }
    }
}

/// MPI itself refused something that has to do with a process.
fn broken(process: usize, trouble: Trouble) -> Broken {
    Broken::Gone(process, trouble.to_string())
}
