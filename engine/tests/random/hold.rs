//! Random programs, deferred against eager: the same bits and the same errors.
//!
//! A program is a list of launches on values that came before: elementwise programs of several
//! dtypes, windows, positions, random numbers, reductions, products, sorts, gathers, through views
//! that are permuted, sliced, flipped, broadcast and reshaped; values are dropped and read in
//! between, and indices and divisors are wrong at times.

#[path = "ops.rs"]
mod ops;

use anymesh_engine::{Options, deferred_with};
use anymesh_kernel::{Device, Error, Result, View};
use ops::{Made, Program};

/// Numbers that are the same everywhere.
pub(crate) struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// The same value on both sides.
struct Pair {
    eager: Result<View>,
    deferred: Result<View>,
    /// Handles that are dropped are never read again.
    about: String,
}

fn read(device: &Device, view: &Result<View>) -> Result<Vec<u8>> {
    let view = view.as_ref().map_err(Clone::clone)?;
    let bytes = view.layout.shape.numel() * view.dtype.size();
    pollster::block_on(device.backend().download(&view.buffer, 0..bytes))
}

/// Runs one program on both.
fn run(
    eager: &Device,
    deferred: &Device,
    seed: u64,
    faults: bool,
) -> std::result::Result<(), String> {
    let mut dice = Dice(seed);
    let mut values: Vec<Pair> = vec![];
    // The first fault that nobody was told of.
    let mut fault: Option<Error> = None;
    let launches = 10 + dice.below(50);
    for step in 0..launches {
        let known: Vec<&View> = values
            .iter()
            .filter_map(|v| v.eager.as_ref().ok())
            .collect();
        let program = Program { eager, faults };
        let Made { kernel, about } = program.next(&mut dice, &known);
        let twin = |view: &View| {
            let pair = values
                .iter()
                .find(|pair| matches!(&pair.eager, Ok(known) if known.buffer.same(&view.buffer)));
            match pair {
                Some(pair) => pair.deferred.clone().map(|d| d.buffer),
                // Uploads are the device's own.
                None => Ok(view.buffer.clone()),
            }
        };
        let mut same = kernel.clone();
        let mut lost = None;
        for view in same.operands_mut() {
            match twin(view) {
                Ok(buffer) => view.buffer = buffer,
                Err(error) => lost = Some(error),
            }
        }
        let outputs = kernel.outputs().len();
        let ours = eager.launch(kernel);
        let theirs = match lost {
            Some(error) => Err(error),
            None => deferred.launch(same),
        };
        if let Err(error) = &ours {
            fault.get_or_insert_with(|| error.clone());
        }
        let nth = |views: &Result<anymesh_kernel::backend::Views>, k: usize| {
            views.as_ref().map(|v| v[k].clone()).map_err(Clone::clone)
        };
        for k in 0..outputs {
            values.push(Pair {
                eager: nth(&ours, k),
                deferred: nth(&theirs, k),
                about: format!("{step}.{k}: {about}"),
            });
        }
        while values.len() > 3 && dice.one_in(3) {
            let gone = dice.below(values.len());
            values.swap_remove(gone);
        }
        if !values.is_empty() && dice.one_in(8) {
            let at = dice.below(values.len());
            compare(eager, deferred, &values[at], &mut fault)?;
        }
    }
    for pair in &values {
        compare(eager, deferred, pair, &mut fault)?;
    }
    let synced = deferred.sync();
    match fault {
        Some(error) if synced != Err(error.clone()) => {
            Err(format!("{error} was told as {synced:?}"))
        }
        None if synced.is_err() => Err(format!("nothing was wrong, and yet {synced:?}")),
        _ => Ok(()),
    }
}

fn compare(
    eager: &Device,
    deferred: &Device,
    pair: &Pair,
    fault: &mut Option<Error>,
) -> std::result::Result<(), String> {
    let expected = match fault.take() {
        Some(error) => Err(error),
        None => read(eager, &pair.eager),
    };
    let got = match &pair.deferred {
        // What was refused when it was launched was told then.
        Err(error) if expected.is_err() => {
            let told = read(deferred, &pair.deferred);
            let _ = deferred.sync();
            told.and(Err(error.clone()))
        }
        view => read(deferred, view),
    };
    if expected == got {
        return Ok(());
    }
    let short = |r: &Result<Vec<u8>>| match r {
        Ok(bytes) => format!("{:02x?}", &bytes[..bytes.len().min(64)]),
        Err(error) => format!("{error:?}"),
    };
    let at = match (&expected, &got) {
        (Ok(a), Ok(b)) => a.iter().zip(b).position(|(a, b)| a != b),
        _ => None,
    };
    Err(format!(
        "{}\nbyte {at:?}\neager    {}\ndeferred {}",
        pair.about,
        short(&expected),
        short(&got)
    ))
}

/// Runs programs with these seeds, under options that differ, each so many times: what came before a
/// device may make in other ways.
pub(crate) fn hold(eager: &Device, seeds: std::ops::Range<u64>, times: usize, gpu: bool) {
    for seed in seeds {
        let mut dice = Dice(!seed);
        let mut options = if gpu { Options::gpu() } else { Options::host() };
        options.launches = 1 + dice.below(60);
        options.ramp = false;
        options.slack = dice.of(&[0, 1 << 30]);
        // Fences change nothing where nothing is compiled, and must not.
        options.compiles |= dice.one_in(2);
        options.recipes = dice.of(&[0, 200, u64::MAX]);
        options.new_programs = dice.of(&[1, usize::MAX]);
        options.first = times == 1 || dice.one_in(2);
        let deferred = deferred_with(eager, options.clone());
        for time in 0..times {
            if let Err(why) = run(eager, &deferred, seed, !gpu) {
                panic!("program {seed}, time {time}, on {eager} with {options:?}\n{why}");
            }
        }
    }
}
