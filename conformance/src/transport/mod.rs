//! The conformance suite of transports: every collective, held against plain loops on the host.
//!
//! [`run`] takes a function that makes a mesh of so many ranks with the transport under test. Where
//! ranks are spread over several processes, each of them runs the suite with the mesh as it sees
//! it, and each checks the results of its own ranks. Results must have the right bits, in each of
//! two calls.
//!
//! ```
//! # use anymesh_conformance::transport as conformance;
//! # use anymesh_core::Mesh;
//! # let device = anymesh_backend_cpu::device();
//! let report = pollster::block_on(conformance::run(|ranks| Mesh::new(&format!("x={ranks}"), &device)));
//! assert!(report.failures.is_empty(), "{report}");
//! ```

mod bad_calls;
mod host;
mod moves;
mod reductions;
mod started;

use anymesh_core::transport::{Part, Transport};
use anymesh_core::{Error, F8E4M3, F8E5M2, Mesh, Result, Tensor, bf16, f16};
use host::{Array, Sample};
pub use started::Started;
use std::sync::Arc;

/// What a run showed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Checks that passed.
    pub passed: usize,
    /// Every failure, in words.
    pub failures: Vec<String>,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "{} passed, {} failed", self.passed, self.failures.len())
    }
}

/// Groups of one to four ranks, whole meshes in order and parts of meshes in any order: the size of
/// the mesh, and the members.
const GROUPS: [(usize, &[usize]); 8] = [
    (1, &[0]),
    (2, &[0, 1]),
    (3, &[0, 1, 2]),
    (4, &[0, 1, 2, 3]),
    (4, &[2]),
    (4, &[3, 1]),
    (4, &[1, 3, 0]),
    (4, &[3, 0, 2, 1]),
];

/// Holds the transport of the meshes that `mesh_of` makes (one axis, that many ranks) to everything
/// it promises.
pub async fn run(mesh_of: impl Fn(usize) -> Result<Mesh>) -> Report {
    let mut report = Report::default();
    for (ranks, group) in GROUPS {
        let made = mesh_of(ranks).and_then(|mesh| match mesh.transport() {
            Some(transport) => Ok((mesh.clone(), transport.clone())),
            None => Err(Error::mesh(mesh.axes(), "a single device has no transport")),
        });
        let (mesh, transport) = match made {
            Ok(made) => made,
            Err(e) => {
                report
                    .failures
                    .push(format!("a mesh of {ranks} ranks: {e}"));
                continue;
            }
        };
        let mut suite = Suite {
            mesh,
            transport,
            group,
            report: &mut report,
        };
        macro_rules! for_each_dtype {
            ($($t:ty),*) => {$(
                // A process without a rank of the mesh takes part in nothing.
                let held = suite.mesh.addressable().len() > 0;
                if !held || suite.mesh.device(0).supports(<$t>::DTYPE) {
                    moves::check::<$t>(&mut suite).await;
                    reductions::check::<$t>(&mut suite).await;
                }
            )*};
        }
        use anymesh_core::Element;
        for_each_dtype!(bool, u8, u32, i32, i64, F8E4M3, F8E5M2, f16, bf16, f32, f64);
        reductions::large(&mut suite).await;
        moves::barrier(&mut suite);
        bad_calls::check(&mut suite);
    }
    report
}

/// A group under test.
struct Suite<'a> {
    mesh: Mesh,
    transport: Arc<dyn Transport>,
    group: &'a [usize],
    report: &'a mut Report,
}

impl Suite<'_> {
    fn record(&mut self, what: &str, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.report.passed += 1,
            Err(e) => self.report.failures.push(format!(
                "{what} between {:?} of {} over {}: {e}",
                self.group,
                self.mesh,
                self.transport.name()
            )),
        }
    }

    /// What a rank gives: its array, where this process can address the rank. Every second rank
    /// holds it transposed in memory.
    fn part<T: Sample>(&self, rank: usize, array: &Array<T>) -> Result<Part> {
        match self.mesh.position_of(rank) {
            Some(at) => Ok(Part::new(
                rank,
                &array.tensor(self.mesh.device(at), rank % 2 == 1)?,
            )),
            None => Ok(Part::elsewhere(rank, T::DTYPE, &array.dims[..])),
        }
    }

    /// What the members give, in their order.
    fn parts<T: Sample>(&self, arrays: &[Array<T>]) -> Result<Vec<Part>> {
        self.group
            .iter()
            .zip(arrays)
            .map(|(rank, array)| self.part(*rank, array))
            .collect()
    }

    /// Calls a collective of the group twice: each addressable member gets the expected bits both
    /// times, and others nothing.
    async fn expect<T: Sample>(
        &mut self,
        what: &str,
        expected: &[Array<T>],
        call: impl Fn(&Self) -> Result<Vec<Option<Tensor>>>,
    ) {
        let what = format!("{what} of {}", T::DTYPE);
        for again in ["", " again"] {
            let outcome = match call(self) {
                Ok(got) if got.len() == expected.len() => self.compare(&got, expected).await,
                Ok(got) => Err(format!(
                    "{} results for {} members",
                    got.len(),
                    expected.len()
                )),
                Err(e) => Err(e.to_string()),
            };
            self.record(&format!("{what}{again}"), outcome);
        }
    }

    async fn compare<T: Sample>(
        &self,
        got: &[Option<Tensor>],
        expected: &[Array<T>],
    ) -> Result<(), String> {
        for ((rank, got), expected) in self.group.iter().zip(got).zip(expected) {
            match (got, self.mesh.position_of(*rank)) {
                (None, None) => {}
                (Some(got), Some(at)) if got.device() == self.mesh.device(at) => expected
                    .compare(got)
                    .await
                    .map_err(|e| format!("rank {rank}: {e}"))?,
                (Some(_), Some(_)) => {
                    return Err(format!("rank {rank}: the result is on another device"));
                }
                (Some(_), None) => {
                    return Err(format!(
                        "rank {rank}: a result for a rank of another process"
                    ));
                }
                (None, Some(_)) => return Err(format!("rank {rank}: no result")),
            }
        }
        Ok(())
    }

    /// Whether a mistaken call gives the right kind of error.
    fn refuses<A>(&mut self, what: &str, got: Result<A>, right: impl FnOnce(&Error) -> bool) {
        let outcome = match got {
            Ok(_) => Err("was accepted".into()),
            Err(e) if right(&e) => Ok(()),
            Err(e) => Err(format!("gave another error: {e}")),
        };
        self.record(what, outcome);
    }
}
