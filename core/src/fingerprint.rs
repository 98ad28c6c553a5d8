//! What was decided, as a number that processes can compare.
//!
//! The processes of a cluster run the same program and must decide alike, or they wait for each
//! other for ever. Every decision is folded into a running hash: it costs nothing that can be
//! measured, and comparing it once in a step tells which ranks went another way.

use crate::Sharding;
#[cfg(not(target_family = "wasm"))]
use crate::{DType, Error, Mesh, Result, Tensor, transport::Part};
use smallvec::SmallVec;
use std::{
    cell::{Cell, RefCell},
    panic::Location,
};

/// A hash of the decisions of a program on meshes: of every op in its order, what each mesh axis
/// does, where its operands go and from which of their forms. It depends on nothing else, so it is
/// the same on every machine, in every process, with and without values.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Result, Tensor, meta, spmd::Fingerprint};
/// # let cpu = anymesh_backend_cpu::device();
/// let decided = |mesh: Mesh, sharding: &str| -> Result<Fingerprint> {
///     let x = Tensor::ones([4, 4], DType::F32, (&mesh, sharding))?;
///     let (result, decided) = Fingerprint::record(|| x.exp()?.sum(&[1], false));
///     result.map(|_| decided)
/// };
/// let here = decided(Mesh::new("tp=2", &cpu)?, "[@tp, _]")?;
/// assert_eq!(here.calls, 2);
/// assert_eq!(here, decided(Mesh::new("tp=2", &meta())?, "[@tp, _]")?);
/// assert_ne!(here, decided(Mesh::new("tp=2", &cpu)?, "[_, @tp]")?);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// How many decisions.
    pub calls: u64,
    /// All of them, in their order.
    pub hash: u64,
}

impl Fingerprint {
    const NONE: Self = Self { calls: 0, hash: 0 };

    /// Runs `f` and returns what was decided in it on this thread. For a scope around it that is
    /// one decision, of as many calls.
    pub fn record<T>(f: impl FnOnce() -> T) -> (T, Self) {
        let scope = Scope(NOW.replace(Self::NONE));
        let result = f();
        let within = NOW.get();
        drop(scope);
        (result, within)
    }

    /// Runs `f` without counting what is decided in it: for what the processes of a cluster do not
    /// all do, such as the stages of a pipeline.
    pub fn uncounted<T>(f: impl FnOnce() -> T) -> T {
        let _uncounted = uncounted();
        f()
    }

    /// What was decided on this thread so far, in the innermost [`record`](Self::record).
    pub fn now() -> Self {
        NOW.get()
    }

    /// The last decisions of this thread (at most 64), oldest first, whatever
    /// [`record`](Self::record) they were in. Two processes that ran the same program so far have the
    /// same hash at the same number, so that the first number at which hashes differ is where they
    /// went apart.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, spmd::Fingerprint};
    /// # let mesh = Mesh::new("tp=2", &anymesh_backend_cpu::device())?;
    /// let x = Tensor::ones([4], DType::F32, (&mesh, "[@tp]"))?;
    /// x.exp()?.sin()?;
    /// let recent = Fingerprint::recent();
    /// let last = &recent[recent.len() - 1];
    /// assert_eq!((last.op, last.number), ("sin", recent[recent.len() - 2].number + 1));
    /// println!("{last}"); // such as: 2 sin at src/main.rs:4:10
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn recent() -> Vec<Decided> {
        RECENT.with_borrow(|ring| {
            let first = ring.next.saturating_sub(RING as u64);
            let kept = (first..ring.next).filter_map(|n| ring.last[n as usize % RING]);
            // What was not counted may have overwritten some.
            kept.filter(|d| (first..ring.next).contains(&d.number))
                .collect()
        })
    }

    /// Succeeds where every process of a mesh has the same fingerprint; every one of them must call
    /// this. The error names the ranks that differ from most others, or from rank 0 where there is
    /// no majority. Not in a browser, which has no other processes and cannot wait for them.
    #[cfg(not(target_family = "wasm"))]
    pub fn agree(self, mesh: &Mesh) -> Result<()> {
        let Some(transport) = mesh.transport().filter(|_| !mesh.is_local()) else {
            return Ok(());
        };
        if !mesh.has_values() {
            return Ok(());
        }
        let own = [self.calls as i64, self.hash as i64];
        let part = |rank: usize| match mesh.position_of(rank) {
            Some(at) => Ok(Part::new(
                rank,
                &Tensor::from_slice(&own, [2], mesh.device(at))?,
            )),
            None => Ok(Part::elsewhere(rank, DType::I64, [2])),
        };
        let parts = (0..mesh.ranks()).map(part).collect::<Result<Vec<_>>>()?;
        let gathered = transport.all_gather(mesh, &parts, 0)?;
        let told = match gathered.into_iter().flatten().next() {
            Some(told) => told.to_vec::<i64>()?,
            None => return Ok(()),
        };
        let told: Vec<Self> = told
            .chunks_exact(2)
            .map(|pair| Self {
                calls: pair[0] as u64,
                hash: pair[1] as u64,
            })
            .collect();
        // Of those that are told most often, the one of the lowest rank.
        let times = |f: &Self| told.iter().filter(|other| *other == f).count();
        let Some(usual) = told.iter().rev().max_by_key(|f| times(f)).copied() else {
            return Ok(());
        };
        let ranks: Vec<usize> = (0..told.len()).filter(|r| told[*r] != usual).collect();
        match ranks.is_empty() {
            true => Ok(()),
            false => Err(Error::Disagreement {
                calls: ranks.iter().map(|r| told[*r].calls).collect(),
                usual: usual.calls,
                ranks,
            }),
        }
    }
}

/// A decision that a thread made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// How many the thread had made before.
    pub number: u64,
    /// The op.
    pub op: &'static str,
    /// The line that called it.
    pub caller: &'static Location<'static>,
    /// A hash of this decision and of all before it.
    pub hash: u64,
}

impl std::fmt::Display for Decided {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} at {}", self.number, self.op, self.caller)
    }
}

/// How many decisions are kept.
const RING: usize = 64;

/// The last decisions of a thread, each at its number modulo the size.
struct Ring {
    next: u64,
    hash: u64,
    last: [Option<Decided>; RING],
}

thread_local! {
    static NOW: Cell<Fingerprint> = const { Cell::new(Fingerprint::NONE) };
    static RECENT: RefCell<Ring> = const {
        RefCell::new(Ring {
            next: 0,
            hash: 0,
            last: [None; RING],
        })
    };
}

/// Ends a scope: what was decided in it becomes a part of the one around it, also after a panic.
struct Scope(Fingerprint);

impl Drop for Scope {
    fn drop(&mut self) {
        let _ = NOW.try_with(|now| {
            let (before, within) = (self.0, now.get());
            now.set(match within.calls {
                0 => before,
                _ => Fingerprint {
                    calls: before.calls + within.calls,
                    hash: Digest(before.hash).word(within.hash).0,
                },
            });
        });
    }
}

/// Until it is dropped, decisions of this thread are not counted.
pub(crate) struct Uncounted {
    now: Fingerprint,
    /// How many decisions, and their hash.
    recent: (u64, u64),
}

pub(crate) fn uncounted() -> Uncounted {
    Uncounted {
        now: NOW.get(),
        recent: RECENT.with_borrow(|ring| (ring.next, ring.hash)),
    }
}

impl Drop for Uncounted {
    fn drop(&mut self) {
        let _ = NOW.try_with(|now| now.set(self.now));
        let _ = RECENT.try_with(|ring| {
            let mut ring = ring.borrow_mut();
            (ring.next, ring.hash) = self.recent;
        });
    }
}

/// Folds in a decision of an op that was called from a line.
#[inline]
pub(crate) fn fold(op: &'static str, caller: &'static Location<'static>, decision: u64) {
    let Fingerprint { calls, hash } = NOW.get();
    let own = Digest::default().text(op).word(decision).0;
    NOW.set(Fingerprint {
        calls: calls + 1,
        hash: Digest(hash).word(own).0,
    });
    RECENT.with_borrow_mut(|ring| {
        let (number, hash) = (ring.next, Digest(ring.hash).word(own).0);
        (ring.next, ring.hash) = (number + 1, hash);
        ring.last[number as usize % RING] = Some(Decided {
            number,
            op,
            caller,
            hash,
        });
    });
}

/// A hash that is the same everywhere: of numbers and texts, not of addresses.
#[derive(Clone, Copy, Default)]
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    #[inline]
    pub(crate) fn word(self, word: u64) -> Self {
        let mixed = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Self(mixed ^ mixed >> 29)
    }

    #[inline]
    pub(crate) fn text(self, text: &str) -> Self {
        let words = text.as_bytes().chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        words.fold(self.word(text.len() as u64), Self::word)
    }

    pub(crate) fn words(self, words: impl IntoIterator<Item = u64>) -> Self {
        words.into_iter().fold(self, Self::word)
    }

    pub(crate) fn sharding(self, sharding: &Sharding) -> Self {
        let cuts: SmallVec<[u64; 4]> = sharding
            .cuts()
            .map(|(dim, axis)| (dim << 8 | axis) as u64)
            .collect();
        let partial: SmallVec<[u64; 4]> = sharding
            .partial()
            .map(|(axis, reduction)| (axis << 8 | reduction as usize) as u64)
            .collect();
        self.word((cuts.len() << 8 | partial.len()) as u64)
            .words(cuts)
            .words(partial)
    }
}
