//! Lists of launches that came before, with the same memory, as one graph of the driver.
//!
//! Deferred execution runs lists of launches, and a training step's come again. The first time it is
//! written down what each launch of a list comes to (see [`trace`]). When the list comes again with
//! operands at the same places its launches are not made any more: along the list the pool is asked for
//! the very memory that was taken before, and as long as that is free, results are handed out. At the end
//! the whole list is one call of the driver. Where it is not free the launches so far are queued as they
//! were written down, and the others are made.
//!
//! The pool is held until the list is queued: otherwise memory that it gives back could be filled by
//! others before it is used here.
//!
//! Mostly all of it is free from the beginning, and then the list is made as a [whole].

mod whole;

use crate::{
    engine::Way,
    log,
    memory::{GpuArena, Hold, place},
    pool::Pieces,
    queue::Graph,
    replay::Held,
    server::Launcher,
    trace::{self, Act},
};
use anymesh_kernel::{
    Buffer, Mixed, Scalar,
    backend::{Buffers, List, Operands, Steps, Wanted},
};
use anymesh_shaders::Memory;
use smallvec::SmallVec;
use std::{
    collections::hash_map::Entry,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};
use whole::Room;

/// Launches of all lists that are kept; those that were not used for longest go.
const LIMIT: usize = 1 << 15;

/// With how many sets of addresses a list is kept.
const PLACES: usize = 4;

/// How often a list is written down in vain: calls are known from their third time on, and some always
/// need more than launches.
const TRIES: u32 = 12;

/// Operands of a launch that are looked at for one whose memory a result has.
const MOST_OPERANDS: usize = 8;

/// Where a result of a launch is.
#[derive(Clone, Copy, Debug)]
enum Origin {
    Taken {
        address: u64,
        bytes: usize,
    },
    /// An operand, by position, and where that lay.
    Operand {
        k: usize,
        address: u64,
        bytes: usize,
    },
}

/// What a launch of a list came to.
#[derive(Clone)]
struct Step {
    memory: Vec<Act>,
    results: SmallVec<[Origin; 1]>,
    /// How many launches of the device there were with it.
    launches: usize,
}

/// A list that was written down.
pub(crate) struct Listed {
    operands: Vec<u64>,
    numbers: Vec<Scalar>,
    steps: Vec<Step>,
    pub(crate) launches: Vec<Held>,
    /// Whether it is all that was queued.
    alone: OnceLock<bool>,
    /// Where all of its memory lies, once somebody asked; nothing where that cannot be told.
    room: OnceLock<Option<Room>>,
    /// Once it came again; `Err` where the driver could not write it down.
    graph: Mutex<Option<Result<Graph, ()>>>,
}

impl Listed {
    /// Says whether the launches are all that was queued.
    pub(crate) fn seen(&self, alone: bool) {
        let _ = self.alone.set(alone);
    }

    fn room(&self, pieces: Pieces) -> Option<&Room> {
        let room = || Room::new(pieces, &self.operands, &self.steps);
        self.room.get_or_init(room).as_ref()
    }

    pub(crate) fn graph(&self) -> MutexGuard<'_, Option<Result<Graph, ()>>> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of a list.
#[derive(Default)]
struct Known {
    kept: SmallVec<[(Arc<Listed>, u64); 1]>,
    /// How often it was written down in vain.
    vain: u32,
}

#[derive(Default)]
struct Table {
    known: Mixed<u64, Known>,
    launches: usize,
    clock: u64,
}

/// The lists of a GPU.
pub(crate) struct Lists {
    way: Way,
    arena: GpuArena,
    table: Mutex<Table>,
}

/// What to do with a list.
enum Found {
    Again(Arc<Listed>),
    Write,
    Leave,
}

impl Table {
    fn find(&mut self, number: u64, operands: &[u64], numbers: &[Scalar]) -> Found {
        self.clock += 1;
        let Some(known) = self.known.get_mut(&number) else {
            return Found::Write;
        };
        // What was something else than its launches is no use.
        let (mut vain, mut gone) = (0, 0);
        known.kept.retain(|(listed, _)| {
            let useless = listed.alone.get() == Some(&false);
            vain += u32::from(useless);
            gone += usize::from(useless) * listed.launches.len();
            !useless
        });
        known.vain += vain;
        self.launches -= gone;
        let same = |listed: &Listed| {
            listed.operands == operands && listed.numbers == numbers && listed.alone.get().is_some()
        };
        // The last of those that took other memory on the way.
        let fitting = (known.kept.iter_mut()).filter(|(listed, _)| same(listed));
        match fitting.max_by_key(|(_, used)| *used) {
            Some((listed, used)) => {
                *used = self.clock;
                Found::Again(listed.clone())
            }
            None if known.vain >= TRIES => Found::Leave,
            None => Found::Write,
        }
    }

    /// Keeps a list; the ones that go for it.
    fn keep(&mut self, number: u64, listed: Arc<Listed>) -> Vec<Arc<Listed>> {
        let mut gone = vec![];
        let count = listed.launches.len();
        while self.launches + count > LIMIT
            && let Some(oldest) = self.oldest()
        {
            gone.extend(self.forget(oldest));
        }
        let full = (self.known.get(&number)).is_some_and(|known| known.kept.len() >= PLACES);
        if full {
            gone.extend(self.forget(number));
        }
        self.launches += count;
        if self.known.len() >= LIMIT {
            self.known.retain(|_, known| !known.kept.is_empty());
        }
        let known = self.known.entry(number).or_default();
        known.kept.push((listed, self.clock));
        gone
    }

    /// The number of the list that was not used for longest.
    fn oldest(&self) -> Option<u64> {
        let all = (self.known.iter())
            .flat_map(|(number, known)| known.kept.iter().map(move |(_, used)| (used, number)));
        all.min().map(|(_, number)| *number)
    }

    /// Forgets the one of a number's that was not used for longest.
    fn forget(&mut self, number: u64) -> Option<Arc<Listed>> {
        let Entry::Occupied(mut known) = self.known.entry(number) else {
            return None;
        };
        let kept = &mut known.get_mut().kept;
        let oldest = (0..kept.len()).min_by_key(|k| kept[*k].1)?;
        let (gone, _) = kept.swap_remove(oldest);
        self.launches -= gone.launches.len();
        if kept.is_empty() {
            known.remove();
        }
        Some(gone)
    }
}

impl Lists {
    pub(crate) fn new(way: Way, arena: GpuArena) -> Self {
        Self {
            way,
            arena,
            table: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A list begins.
    pub(crate) fn begin<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        let address = |buffer: &&Buffer| Some(place(buffer.get().ok()?).start);
        let operands = (list.operands.iter())
            .map(address)
            .collect::<Option<Vec<u64>>>()?;
        let found = (self.table()).find(list.number, &operands, list.numbers);
        let going = match found {
            Found::Again(listed) => Going::Again {
                listed,
                next: 0,
                hold: self.arena.hold(),
            },
            Found::Write => {
                self.way.handle.submit(Launcher::begin_list);
                Going::Written(Written {
                    operands,
                    numbers: list.numbers.into(),
                    steps: vec![],
                    launches: vec![],
                    open: false,
                    sound: true,
                })
            }
            Found::Leave => {
                self.way.handle.submit(Launcher::begin_list);
                Going::Left
            }
        };
        Some(Box::new(Progress {
            lists: self,
            number: list.number,
            going,
        }))
    }
}

/// A list that is on its way.
struct Progress<'a> {
    lists: &'a Lists,
    number: u64,
    going: Going<'a>,
}

enum Going<'a> {
    /// Its launches so far were as they were written down, and are not queued yet.
    Again {
        listed: Arc<Listed>,
        next: usize,
        hold: Hold<'a>,
    },
    /// All of it is as it was written down, and not queued yet. These results are wanted.
    Whole {
        listed: Arc<Listed>,
        hold: Hold<'a>,
        wanted: Vec<whole::Result>,
    },
    /// Its launches are made, and written down.
    Written(Written),
    /// Its launches are made.
    Left,
}

/// What was written down so far.
struct Written {
    operands: Vec<u64>,
    numbers: Vec<Scalar>,
    steps: Vec<Step>,
    launches: Vec<Held>,
    /// Whether a launch is being made.
    open: bool,
    /// Whether it can be made again.
    sound: bool,
}

impl Written {
    /// A launch begins.
    fn open(&mut self) {
        // One that began before was never made.
        self.sound &= !self.open;
        self.open = true;
        trace::begin();
    }

    /// The launch was made.
    fn close(&mut self, operands: Operands<'_>, results: &[Buffer]) {
        self.open = false;
        let Some(made) = trace::end() else {
            self.sound = false;
            return;
        };
        self.launches.extend(made.launches);
        let origins = results.iter().map(|result| {
            let at = place(result.get().ok()?);
            let taken =
                |act: &Act| matches!(act, Act::Take { address, .. } if *address == at.start);
            if made.memory.iter().any(taken) {
                return Some(Origin::Taken {
                    address: at.start,
                    bytes: (at.end - at.start) as usize,
                });
            }
            let same = |k: &usize| {
                let operand = operands(*k);
                operand.is_some_and(|b| b.get::<Memory>().is_ok_and(|memory| place(memory) == at))
            };
            (0..MOST_OPERANDS).find(same).map(|k| Origin::Operand {
                k,
                address: at.start,
                bytes: (at.end - at.start) as usize,
            })
        });
        let results = origins.collect::<Option<SmallVec<_>>>();
        self.sound &= results.is_some() && gives_its_own(&made.memory);
        self.steps.push(Step {
            memory: made.memory,
            results: results.unwrap_or_default(),
            launches: self.launches.len(),
        });
    }
}

/// Whether only memory is given back that was taken before, and each once.
fn gives_its_own(acts: &[Act]) -> bool {
    let mut own = SmallVec::<[u64; 8]>::new();
    acts.iter().all(|act| match act {
        Act::Take { address, .. } => {
            own.push(*address);
            true
        }
        Act::Give { address } => match own.iter().position(|own| own == address) {
            Some(k) => {
                own.swap_remove(k);
                true
            }
            None => false,
        },
    })
}

/// Makes a step again; its results, if memory lies where it lay.
fn step_again(hold: &mut Hold<'_>, step: &Step, operands: Operands<'_>) -> Option<Buffers> {
    hold.settle();
    let mut taken = SmallVec::<[u64; 8]>::new();
    let mut fits = true;
    for act in &step.memory {
        match *act {
            Act::Take { bytes, address } => {
                fits = hold.pool().take_at(bytes, address);
                if !fits {
                    break;
                }
                taken.push(address);
            }
            Act::Give { address } => {
                hold.pool().give(address);
                taken.retain(|own| *own != address);
            }
        }
    }
    // Operands first: memory that is handed out and dropped again would be given back twice.
    let operand = |origin: &Origin| match *origin {
        Origin::Operand { k, .. } => operands(k).map(Some),
        Origin::Taken { .. } => Some(None),
    };
    let of_operands = (step.results.iter())
        .map(operand)
        .collect::<Option<SmallVec<[Option<Buffer>; 2]>>>();
    let Some(of_operands) = of_operands.filter(|_| fits) else {
        taken
            .into_iter()
            .for_each(|address| hold.pool().give(address));
        return None;
    };
    let results = (step.results.iter()).zip(of_operands);
    let results = results.filter_map(|(origin, operand)| match *origin {
        Origin::Taken { address, bytes } => Some(hold.memory(address, bytes).buffer()),
        Origin::Operand { .. } => operand,
    });
    Some(results.collect())
}

impl Progress<'_> {
    /// From here on launches are made: those that were not are queued as they were written down.
    fn part(&mut self) {
        let Going::Again { listed, next, hold } = std::mem::replace(&mut self.going, Going::Left)
        else {
            return;
        };
        log::say(1, || {
            format!(
                "a list of {} launches parts after {next}",
                listed.steps.len()
            )
        });
        let steps = listed.steps[..next].to_vec();
        let count = steps.last().map_or(0, |step| step.launches);
        let launches = listed.launches[..count].to_vec();
        let first = launches.clone();
        self.lists.way.handle.submit(move |launcher| {
            launcher.begin_list();
            first.into_iter().for_each(|held| launcher.again(held));
        });
        drop(hold);
        self.going = Going::Written(Written {
            operands: listed.operands.clone(),
            numbers: listed.numbers.clone(),
            steps,
            launches,
            open: false,
            sound: true,
        });
    }
}

impl Steps for Progress<'_> {
    fn again(&mut self, operands: Operands<'_>) -> Option<Buffers> {
        if let Going::Again { listed, next, hold } = &mut self.going {
            let step = listed.steps.get(*next);
            if let Some(results) = step.and_then(|step| step_again(hold, step, operands)) {
                *next += 1;
                return Some(results);
            }
            self.part();
        }
        if let Going::Written(written) = &mut self.going {
            written.open();
        }
        None
    }

    fn made(&mut self, operands: Operands<'_>, results: &[Buffer]) {
        if let Going::Written(written) = &mut self.going {
            written.close(operands, results);
        }
    }

    fn whole(&mut self, wanted: &[Wanted], given_up: Operands<'_>) -> bool {
        let Going::Again { listed, hold, .. } = &mut self.going else {
            return false;
        };
        let count = listed.operands.len();
        let fits = |room: &Room| room.fits(hold.pool(), wanted, count, given_up);
        let pieces = self.lists.arena.pieces();
        let Some(wanted) = listed.room(pieces).and_then(fits) else {
            return false;
        };
        if let Going::Again { listed, hold, .. } = std::mem::replace(&mut self.going, Going::Left) {
            self.going = Going::Whole {
                listed,
                hold,
                wanted,
            };
        }
        true
    }

    fn results(&mut self) -> Option<Buffers> {
        let Going::Whole { hold, wanted, .. } = &mut self.going else {
            return None;
        };
        let results = whole::taken(hold, std::mem::take(wanted));
        if results.is_none() {
            // Not queued: its memory is somebody else's.
            self.going = Going::Left;
        }
        results
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        let handle = &self.lists.way.handle;
        if let Going::Again { listed, next, .. } = &self.going
            && *next < listed.steps.len()
        {
            self.part();
        }
        match std::mem::replace(&mut self.going, Going::Left) {
            Going::Again { listed, hold, .. } | Going::Whole { listed, hold, .. } => {
                handle.submit(move |launcher| launcher.list_again(&listed));
                drop(hold);
            }
            Going::Written(written) => {
                trace::end();
                let sound = written.sound && !written.open && !written.launches.is_empty();
                let listed = sound.then(|| {
                    Arc::new(Listed {
                        operands: written.operands,
                        numbers: written.numbers,
                        steps: written.steps,
                        launches: written.launches,
                        alone: OnceLock::new(),
                        room: OnceLock::new(),
                        graph: Mutex::default(),
                    })
                });
                if let Some(listed) = &listed {
                    let gone = self.lists.table().keep(self.number, listed.clone());
                    // The driver's part of it belongs to the thread that launches.
                    handle.submit(move |_| drop(gone));
                }
                handle.submit(move |launcher| launcher.end_list(listed.as_deref()));
            }
            Going::Left => handle.submit(|launcher| launcher.end_list(None)),
        }
        handle.flush_queue();
    }
}

#[cfg(test)]
mod tests;
