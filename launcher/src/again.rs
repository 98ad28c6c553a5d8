//! Launches that came before are made again without CubeCL.
//!
//! What CubeCL needs to make a launch of a call (arguments gathered, a kernel described, hashed and
//! looked up) takes longer than the launch, and comes to the same every time: for calls of one
//! [form](Form) only addresses differ. So the second call of a form is watched: which memory is taken
//! for it, and which kernels are launched with which numbers and addresses. Each address is that of an
//! operand or of memory that was taken, or it is fixed. From then on such a call takes its memory,
//! fills in the addresses, and is a closure for the thread that launches.
//!
//! `ANYMESH_GPU_AGAIN=all` watches every call when it first comes, and makes it again at once: so a
//! suite in which calls come once holds this too. `off` leaves everything to CubeCL.
//!
//! Calls that do something else meanwhile, such as copying a table to the device, are not repeated
//! this way, and neither are calls of a form that is given other numbers all the time.

use crate::{
    engine::Way,
    lists::Lists,
    memory::{GpuArena, place, taken_by},
    order::Access,
    queue::Prepared,
    replay::Held,
    server::{Argument, Taped},
};
use anymesh_kernel::{
    Mix, Mixed, Result, Scalar,
    backend::{Buffers, Form, Kernel, List, Steps},
};
use anymesh_shaders::{Arena, Memory, Repeats};
use cubecl_environment::stream::StreamId;
use smallvec::SmallVec;
use std::{
    collections::{HashSet, hash_map::Entry},
    hash::BuildHasherDefault,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Forms that are kept, and as many that were seen once.
const FORMS: usize = 1 << 14;

/// With how many lists of numbers a form is kept. One that has more is given new ones all the time.
const NUMBERS: usize = 4;

/// One kernel of a call, with everything but addresses.
#[derive(Debug)]
pub(crate) struct Again {
    pub(crate) launch: Prepared,
    pub(crate) slots: Vec<Slot>,
    /// Whether its call is a product or attention.
    pub(crate) long: bool,
}

/// An argument that is an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    from: From,
    pub(crate) bytes: u64,
    read: bool,
    written: bool,
}

impl Again {
    /// Where its memory lies, with these addresses.
    pub(crate) fn places(&self, addresses: &[u64]) -> impl Iterator<Item = Range<u64>> {
        let place = |(slot, address): (&Slot, &u64)| *address..*address + slot.bytes;
        self.slots.iter().zip(addresses).map(place)
    }

    /// The memory that it uses, with these addresses.
    pub(crate) fn accesses(&self, addresses: &[u64]) -> SmallVec<[Access; 8]> {
        let access = |(place, slot): (Range<u64>, &Slot)| Access {
            place,
            written: slot.written,
        };
        self.places(addresses)
            .zip(&self.slots)
            .map(access)
            .collect()
    }
}

impl Slot {
    /// Whether garbage there spoils the kernel. What stands is never garbage.
    pub(crate) fn is_read(&self) -> bool {
        self.read && !matches!(self.from, From::Fixed(_))
    }

    /// Whether there is garbage where the kernel is not run.
    pub(crate) fn is_written(&self) -> bool {
        self.written && !matches!(self.from, From::Fixed(_))
    }
}

/// Where an address comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// So many bytes behind the start of an operand.
    Operand(usize, u64),
    /// The same of memory that is taken for the call.
    Taken(usize, u64),
    /// Always the same.
    Fixed(u64),
}

/// A call, as it is made again.
#[derive(Debug)]
struct Call {
    numbers: SmallVec<[Scalar; 2]>,
    launches: Arc<[Again]>,
    /// Bytes to take: first for results, then for what is let go once everything is queued.
    taken: Vec<usize>,
    /// For each result the operand whose memory it has; nothing where that is taken.
    results: SmallVec<[Option<usize>; 1]>,
}

#[derive(Default)]
struct Known {
    /// The numbers of forms that came once.
    once: HashSet<u64, BuildHasherDefault<Mix>>,
    /// What is known of others. An empty list says that nothing can be.
    forms: Mixed<Form, SmallVec<[Arc<Call>; 1]>>,
}

/// The calls of a GPU that are made again.
pub struct Repeated {
    way: Way,
    arena: GpuArena,
    known: Mutex<Known>,
    lists: Lists,
    mode: Mode,
}

/// Which calls are made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// From the third of a form on.
    Later,
    /// Also the first, after it was made.
    All,
    Off,
}

impl Mode {
    fn of(text: Option<&str>) -> Self {
        match text {
            Some("all") => Self::All,
            Some("off") => Self::Off,
            _ => Self::Later,
        }
    }
}

/// What is to be done for a call.
enum Answer {
    Repeat(Arc<Call>),
    Watch,
    Ask,
}

impl std::fmt::Debug for Repeated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Repeated")
    }
}

impl Repeated {
    pub(crate) fn new(way: Way, arena: GpuArena) -> Self {
        Self {
            lists: Lists::new(way.clone(), arena.clone()),
            way,
            arena,
            known: Mutex::default(),
            mode: Mode::of(std::env::var("ANYMESH_GPU_AGAIN").ok().as_deref()),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, form: &Form, numbers: &[Scalar]) -> Answer {
        let mut known = self.known();
        match known.forms.get(form) {
            Some(calls) => match calls.iter().find(|call| call.numbers[..] == *numbers) {
                Some(call) => Answer::Repeat(call.clone()),
                None if calls.is_empty() || calls.len() >= NUMBERS => Answer::Ask,
                None => Answer::Watch,
            },
            None => {
                if known.once.len() >= FORMS {
                    known.once.clear();
                }
                match known.once.insert(form.number()) {
                    true if self.mode == Mode::Later => Answer::Ask,
                    _ => Answer::Watch,
                }
            }
        }
    }

    /// Makes a call by CubeCL, and keeps what came of it.
    fn watch(
        &self,
        form: Form,
        kernel: &Kernel,
        make: &dyn Fn() -> Result<Buffers>,
    ) -> Result<Buffers> {
        let stream = StreamId::current();
        self.way
            .handle
            .submit(move |launcher| launcher.watch(stream));
        let (made, taken) = taken_by(make);
        let tape = (self.way.handle).submit_blocking(move |launcher| launcher.watched(stream));
        let made = made?;
        let call = match tape {
            Ok(Some(tape)) => learned(kernel, &made, &taken, tape),
            _ => None,
        };
        let mut known = self.known();
        if known.forms.len() >= FORMS {
            known.forms.clear();
        }
        let calls = match known.forms.entry(form) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(SmallVec::new()),
        };
        let call = call.map(Arc::new);
        calls.extend(call.clone());
        drop(known);
        match call {
            // What was written over an operand cannot be computed from it again.
            Some(call) if self.mode == Mode::All && call.results.iter().all(Option::is_none) => {
                self.repeat(kernel, &call)
            }
            _ => Ok(made),
        }
    }

    fn repeat(&self, kernel: &Kernel, call: &Call) -> Result<Buffers> {
        let taken = (call.taken.iter())
            .map(|bytes| self.arena.alloc(*bytes))
            .collect::<Result<SmallVec<[Memory; 2]>>>()?;
        let operands = (kernel.operands())
            .map(|view| Ok(place(view.buffer.get()?).start))
            .collect::<Result<SmallVec<[u64; 6]>>>()?;
        let address = |slot: &Slot| match slot.from {
            From::Operand(k, behind) => operands[k] + behind,
            From::Taken(k, behind) => place(&taken[k]).start + behind,
            From::Fixed(address) => address,
        };
        let slots = call.launches.iter().flat_map(|launch| &launch.slots);
        let held = Held::Again {
            launches: call.launches.clone(),
            addresses: slots.map(address).collect(),
        };
        self.way.submit(held);
        let mut taken = taken.into_iter();
        let result = |operand: &Option<usize>| match *operand {
            None => taken.next().map(Memory::buffer),
            Some(k) => kernel.operands().nth(k).map(|view| view.buffer.clone()),
        };
        Ok(call.results.iter().filter_map(result).collect())
    }
}

impl Repeats for Repeated {
    fn launch(&self, kernel: &Kernel, make: &dyn Fn() -> Result<Buffers>) -> Result<Buffers> {
        if self.mode == Mode::Off {
            return make();
        }
        let form = kernel.form();
        match self.answer(&form, kernel.numbers()) {
            Answer::Repeat(call) => self.repeat(kernel, &call),
            Answer::Watch => self.watch(form, kernel, make),
            Answer::Ask => make(),
        }
    }

    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        match self.mode {
            Mode::Off => None,
            _ => self.lists.begin(list),
        }
    }
}

/// A call of which it is known what came of it; nothing where some address cannot be told.
fn learned(kernel: &Kernel, made: &Buffers, taken: &[Memory], tape: Vec<Taped>) -> Option<Call> {
    let operands = (kernel.operands())
        .map(|view| view.buffer.get().map(place))
        .collect::<Result<SmallVec<[Range<u64>; 6]>>>()
        .ok()?;
    let taken: Vec<Range<u64>> = taken.iter().map(place).collect();
    // The results first.
    let (mut order, mut results) = (Vec::with_capacity(taken.len()), SmallVec::new());
    for buffer in made {
        let result = place(buffer.get().ok()?);
        let among = |places: &[Range<u64>]| places.iter().position(|place| *place == result);
        match among(&taken) {
            Some(k) if order.contains(&k) => return None,
            Some(k) => {
                order.push(k);
                results.push(None);
            }
            None => {
                let operand = Some(among(&operands)?);
                if results.contains(&operand) {
                    return None;
                }
                results.push(operand);
            }
        }
    }
    let rest: Vec<usize> = (0..taken.len()).filter(|k| !order.contains(k)).collect();
    order.extend(rest);
    let taken: Vec<Range<u64>> = order.iter().map(|k| taken[*k].clone()).collect();
    let within = |ranges: &[Range<u64>], place: &Range<u64>| {
        let inside = |range: &Range<u64>| range.start <= place.start && place.end <= range.end;
        let k = ranges.iter().position(inside)?;
        Some((k, place.start - ranges[k].start))
    };
    let from = |argument: &Argument| {
        if argument.standing {
            return Some(From::Fixed(argument.place.start));
        }
        match within(&taken, &argument.place) {
            Some((k, behind)) => Some(From::Taken(k, behind)),
            None => within(&operands, &argument.place).map(|(k, at)| From::Operand(k, at)),
        }
    };
    let long = matches!(
        kernel,
        Kernel::Matmul(_) | Kernel::Attention(_) | Kernel::AttentionBackward(_)
    );
    let launches = (tape.into_iter())
        .map(|taped| {
            let slots = (taped.arguments.iter())
                .map(|argument| {
                    Some(Slot {
                        from: from(argument)?,
                        bytes: argument.place.end - argument.place.start,
                        read: argument.read,
                        written: argument.written,
                    })
                })
                .collect::<Option<Vec<_>>>()?;
            Some(Again {
                launch: taped.launch,
                slots,
                long,
            })
        })
        .collect::<Option<Vec<_>>>()?;
    Some(Call {
        numbers: kernel.numbers().into(),
        launches: launches.into(),
        taken: (taken.iter())
            .map(|range| (range.end - range.start) as usize)
            .collect(),
        results,
    })
}

#[cfg(test)]
mod tests;
