//! One recorded call: its inputs, what we run for it, and what the other system needs.

use anymesh_conformance::{
    registry::{self, Fill, Input},
    sweep::{Precision, compare, lay_out, values},
};
use anymesh_core::{
    DType, Device, Mesh, Placement, Reduction, Result, Shape, Sharding, Tensor, meta,
    reshard::{Objective, plan},
    spmd::Ledger,
};
use serde_json::Value;

/// What we run for a recorded op.
pub(crate) type Program = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// One op of the registry.
pub(crate) fn op(name: &'static str, attrs: Value) -> Program {
    Box::new(move |x| {
        registry::call(
            name,
            &x.iter().cloned().map(Some).collect::<Vec<_>>(),
            &attrs,
            &x[0],
        )
    })
}

/// An op whose result `at` is compared.
pub(crate) fn nth(name: &'static str, attrs: Value, at: usize) -> Program {
    let all = op(name, attrs);
    Box::new(move |x| Ok(vec![all(x)?.swap_remove(at)]))
}

/// Methods of one tensor.
pub(crate) fn of(f: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Program {
    Box::new(move |x| Ok(vec![f(&x[0])?]))
}

/// Methods of two tensors.
pub(crate) fn of2(f: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + 'static) -> Program {
    Box::new(move |x| Ok(vec![f(&x[0], &x[1])?]))
}

/// Small integers of both signs: sums of them are the same in every order.
pub(crate) const SMALL: Fill = Fill::Int { lo: -4, hi: 4 };
/// For roots and powers.
pub(crate) const POSITIVE: Fill = Fill::Int { lo: 1, hi: 9 };

/// An input of a recorded call.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) input: Input,
    pub(crate) sharding: Sharding,
}

impl Operand {
    /// Numbers to compute with, or (`Index`, `Distinct`) positions.
    pub(crate) fn new(shape: &[usize], sharding: Sharding, fill: Fill) -> Self {
        let dtype = if matches!(fill, Fill::Index(_) | Fill::Distinct) {
            DType::I64
        } else {
            DType::F32
        };
        Self {
            input: Input {
                shape: shape.into(),
                dtype,
                fill,
            },
            sharding,
        }
    }
}

/// A call with what the other system needs for it.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) mesh: Vec<usize>,
    /// At the recorded sizes.
    pub(crate) inputs: Vec<Operand>,
    pub(crate) program: Program,
    /// The same call with sizes that a CPU can hold, where they differ.
    pub(crate) reduced: Option<(Vec<Operand>, Program)>,
    pub(crate) theirs: Option<Theirs>,
}

/// The bytes that the other system needs, and the reductions that it leaves undone: for each output
/// the sharding that it leaves.
pub(crate) struct Theirs {
    pub(crate) bytes: u64,
    pub(crate) outputs: Vec<Sharding>,
}

/// How we compare with the other system.
pub(crate) enum Verdict {
    NotCompared,
    Less,
    Equal,
    More(String),
}

pub(crate) fn mesh(sizes: &[usize], device: &Device) -> Mesh {
    let axes: Vec<String> = sizes
        .iter()
        .enumerate()
        .map(|(i, n)| format!("m{i}={n}"))
        .collect();
    Mesh::new(&axes.join(", "), device).expect("a mesh")
}

/// Bytes that finishing the reductions of a result takes at least: every partial axis is reduced to
/// all or cuts some dimension.
fn owed(mesh: &Mesh, shape: &Shape, dtype: DType, sharding: &Sharding) -> u64 {
    let mut ends = vec![sharding.whole()];
    for (axis, _) in sharding.partial() {
        let cut: Vec<Sharding> = ends
            .iter()
            .flat_map(|s| (0..shape.rank()).map(move |d| s.clone().cut(d, axis)))
            .collect();
        ends.extend(cut);
    }
    let bytes = |to: &Sharding| {
        plan(mesh, shape, dtype, sharding, to, Objective::Bytes)
            .expect("a plan")
            .recv_bytes
    };
    ends.iter().map(bytes).min().unwrap_or(0)
}

impl Case {
    /// Every rank holds what it should of the result of the call without a mesh.
    pub(crate) fn check_values(&self, cpu: &Device) -> Result<(), String> {
        let (inputs, program) = self
            .reduced
            .as_ref()
            .map_or((&self.inputs, &self.program), |(inputs, program)| {
                (inputs, program)
            });
        self.compare(inputs, program, cpu)
            .map_err(|e| format!("{}: {e}", self.name))
    }

    fn compare(&self, inputs: &[Operand], program: &Program, cpu: &Device) -> Result<(), String> {
        let text = |e: anymesh_core::Error| e.to_string();
        let mesh = mesh(&self.mesh, cpu);
        let plain = inputs
            .iter()
            .enumerate()
            .map(|(i, o)| o.input.make(i as u64 + 1, cpu))
            .collect::<Result<Vec<_>>>()
            .map_err(text)?;
        let laid = plain
            .iter()
            .zip(inputs)
            .map(|(x, o)| lay_out(x, &values(x)?, &mesh, o.sharding.clone()))
            .collect::<Result<Vec<_>>>()
            .map_err(text)?;
        let (expected, actual) = (
            program(&plain).map_err(text)?,
            program(&laid).map_err(text)?,
        );
        if expected.len() != actual.len() {
            return Err(format!(
                "{} results, expected {}",
                actual.len(),
                expected.len()
            ));
        }
        let one = std::slice::from_ref;
        for (actual, expected) in actual.iter().zip(&expected) {
            // Rounding of sums in another order, and one step of bf16 where the op rounds to it.
            let precision = if actual.dtype() == DType::BF16 {
                Precision::Rounded(1.0 / 128.0)
            } else {
                Precision::ROUNDED
            };
            compare(precision, one(actual), one(expected))?;
        }
        Ok(())
    }

    /// Compares the bytes that the worst rank receives, at the recorded sizes and without values.
    pub(crate) fn compare_bytes(&self) -> Verdict {
        let Some(theirs) = &self.theirs else {
            return Verdict::NotCompared;
        };
        let device = meta();
        let mesh = mesh(&self.mesh, &device);
        let make = |o: &Operand| {
            Tensor::zeros(o.input.shape.as_slice(), o.input.dtype, &device)?
                .to_mesh(&mesh, &o.sharding)
        };
        let inputs = self
            .inputs
            .iter()
            .map(make)
            .collect::<Result<Vec<_>>>()
            .expect("inputs without values");
        let (outputs, ledger) = Ledger::record(|| (self.program)(&inputs));
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) => return Verdict::More(format!("{}: {error}", self.name)),
        };
        let ours = ledger.bytes();
        let owed_ours: u64 = outputs
            .iter()
            .map(|t| owed(&mesh, t.shape(), t.dtype(), t.sharding()))
            .sum();
        let owed_theirs: u64 = outputs
            .iter()
            .zip(&theirs.outputs)
            .filter(|(t, s)| s.check(&mesh, t.rank()).is_ok())
            .map(|(t, s)| owed(&mesh, t.shape(), t.dtype(), s))
            .sum();
        let (all_ours, all_theirs) = (ours + owed_ours, theirs.bytes + owed_theirs);
        if ours < theirs.bytes || (ours > theirs.bytes && all_ours < all_theirs) {
            Verdict::Less
        } else if ours == theirs.bytes || all_ours == all_theirs {
            Verdict::Equal
        } else {
            let types = |all: &[Tensor]| {
                all.iter()
                    .map(Tensor::type_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            Verdict::More(format!(
                "{} ({}) -> ({}): ours {ours} + {owed_ours} owed, theirs {} + {owed_theirs} owed\n{ledger}",
                self.name,
                types(&inputs),
                types(&outputs),
                theirs.bytes
            ))
        }
    }
}

/// A placement such as `R`, `S0` or `P:sum` on the only axis of a mesh.
pub(crate) fn placement(text: &str) -> Sharding {
    Sharding::from_placements(&[match text {
        "R" => Placement::Replicate,
        partial if partial.starts_with("P:") => Placement::Partial(reduction(&partial[2..])),
        // A strided cut, such as `SS0,sf=8`, owes as little as any other.
        cut => Placement::Shard(
            cut.trim_start_matches('S')
                .split(',')
                .next()
                .and_then(|d| d.parse().ok())
                .expect("a dimension"),
        ),
    }])
}

pub(crate) fn reduction(name: &str) -> Reduction {
    match name {
        "max" => Reduction::Max,
        "min" => Reduction::Min,
        // What an average or a norm leaves undone takes the same bytes as a sum.
        _ => Reduction::Sum,
    }
}
