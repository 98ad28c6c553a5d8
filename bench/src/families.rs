//! Where the time of a piece of a program goes, by kernels that are alike.

use anymesh_core::{Device, Profiling, Timing};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Kernels that are alike: the op that asked for them, the kernel's family, and what it gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The op.
    pub op: &'static str,
    /// The family of the kernel.
    pub family: &'static str,
    /// The dtypes and shapes of its outputs.
    pub outputs: String,
    /// How often it was launched.
    pub count: usize,
    /// How long all launches took together.
    pub all: Duration,
    /// How long the fastest took.
    pub fastest: Duration,
}

impl Row {
    /// How long all launches had taken if each had been as fast as the fastest, which says more
    /// where other programs run too.
    pub fn at_best(&self) -> Duration {
        self.fastest * self.count as u32
    }
}

/// Kernels that are alike, by op, family and outputs.
type Seen = BTreeMap<(&'static str, &'static str, String), Row>;

/// Counts the launches of a device for as long as it lives. The device is waited for before and
/// after each of them.
///
/// ```
/// # use anymesh_bench::Families;
/// # use anymesh_core::Tensor;
/// # let device = anymesh_backend_cpu::device();
/// let families = Families::of(&device);
/// let x = Tensor::new(&[1f32, 2.0], &device)?;
/// (&x + &x)?;
/// let rows = families.rows();
/// assert_eq!((rows[0].op, rows[0].count, &rows[0].outputs[..]), ("add", 1, "f32[2]"));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Families {
    seen: Arc<Mutex<Seen>>,
    _profiling: Profiling,
}

impl Families {
    /// Counts from now on.
    pub fn of(device: &Device) -> Self {
        let seen = Arc::<Mutex<Seen>>::default();
        let own = seen.clone();
        let profiling = device.profile(Timing::Done, move |kernel, took| {
            let sizes: Vec<String> = (kernel.outputs().iter())
                .map(|(dtype, shape)| format!("{dtype}{shape}"))
                .collect();
            let (op, family, outputs) = (kernel.op(), kernel.family(), sizes.join(" "));
            let mut seen = own.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (op, family, outputs.clone());
            let row = seen.entry(key).or_insert_with(|| Row {
                op,
                family,
                outputs,
                count: 0,
                all: Duration::ZERO,
                fastest: Duration::MAX,
            });
            row.count += 1;
            row.all += took;
            row.fastest = row.fastest.min(took);
        });
        Self {
            seen,
            _profiling: profiling,
        }
    }

    /// What was seen, what took longest at its best first.
    pub fn rows(&self) -> Vec<Row> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<Row> = seen.values().cloned().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.at_best()));
        rows
    }
}
