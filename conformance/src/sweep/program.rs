//! One program under shardings of its operands.

use super::{
    Coverage, Options, Precision, Report,
    backward::Backward,
    compare::{Expected, compare_with},
    layouts::{Layouts, Plain, picked, shardings},
};
use anymesh_core::{
    Device, Error, Mesh, Place, Result, Tensor,
    spmd::{Held, with_held},
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
};

/// A function of operands; results of those without any go to the place.
type Run<'a> = Box<dyn Fn(&[Option<Tensor>], &Place) -> Result<Vec<Tensor>> + 'a>;

/// What is held against itself.
pub(super) struct Program<'a> {
    /// What failures call it.
    pub(super) name: String,
    pub(super) precision: Precision,
    /// What it does with its operands.
    pub(super) run: Run<'a>,
}

impl Program<'_> {
    /// Runs it; a panic is one wrong case and not the end of the sweep.
    pub(super) fn call(&self, operands: &[Option<Tensor>], place: &Place) -> Result<Vec<Tensor>> {
        catch_unwind(AssertUnwindSafe(|| (self.run)(operands, place)))
            .unwrap_or_else(|_| Err(Error::argument("sweep", "operands", "panicked")))
    }
}

/// A program with plain operands, and what it gives for them.
pub(super) struct Reference<'a> {
    program: Program<'a>,
    inputs: Vec<Option<Plain>>,
    expected: Result<Vec<Expected>>,
    backward: Option<Backward>,
}

impl<'a> Reference<'a> {
    /// Runs it. An error of the program is an error here only if it cannot run on the device:
    /// otherwise it must be the same on a mesh.
    pub(super) fn new(
        program: Program<'a>,
        inputs: &[Option<Tensor>],
        device: &Device,
        gradients: bool,
    ) -> Result<Self> {
        let expected = match program.call(inputs, &device.into()) {
            Ok(results) => Ok(results
                .iter()
                .map(Expected::new)
                .collect::<Result<Vec<_>>>()?),
            Err(error @ Error::Unsupported { .. }) => return Err(error),
            Err(error) => Err(error),
        };
        let backward = if gradients && expected.is_ok() && inputs.iter().any(Option::is_some) {
            Backward::new(&program, inputs, device)?
        } else {
            None
        };
        let plain = |x: &Option<Tensor>| x.as_ref().map(Plain::new).transpose();
        Ok(Self {
            inputs: inputs.iter().map(plain).collect::<Result<_>>()?,
            program,
            expected,
            backward,
        })
    }
}

/// Failures of one op that are written out.
const SHOWN: u64 = 3;

/// The sweep of one op.
pub(super) struct Sweep<'a> {
    pub(super) options: &'a Options,
    /// Whether the processes that sweep together are no longer at the same case.
    pub(super) lost: bool,
    report: Report,
    coverage: Coverage,
}

impl<'a> Sweep<'a> {
    pub(super) fn new(op: &str, options: &'a Options) -> Self {
        Self {
            options,
            lost: false,
            report: Report::default(),
            coverage: Coverage {
                op: op.into(),
                cases: 0,
                possible: 0,
            },
        }
    }

    /// What was found.
    pub(super) fn finish(mut self) -> Report {
        self.report.ops.push(self.coverage);
        self.report
    }

    pub(super) fn fail(&mut self, failure: String) {
        self.report.failed += 1;
        if self.report.failed <= SHOWN {
            self.report.failures.push(failure);
        }
    }

    /// Notes that the device says it cannot run something.
    pub(super) fn unsupported(&mut self) {
        self.report.unsupported += 1;
    }

    /// Notes that there are `possible` cases of something on a mesh, and picks some.
    fn pick(
        &mut self,
        possible: u64,
        mesh: &Mesh,
        which: usize,
    ) -> impl ExactSizeIterator<Item = u64> + use<> {
        // Samples and meshes do not all look at the same corner.
        let mut hasher = DefaultHasher::new();
        (
            self.options.seed,
            &self.coverage.op,
            mesh.to_string(),
            which,
        )
            .hash(&mut hasher);
        let picked = picked(possible, self.options.limit, hasher.finish());
        self.coverage.possible = self.coverage.possible.saturating_add(possible);
        self.coverage.cases += picked.len() as u64;
        picked
    }

    /// Holds a program against itself on a mesh; `which` of the op's samples it is.
    pub(super) fn program(
        &mut self,
        reference: &Reference<'_>,
        mesh: &Mesh,
        which: usize,
    ) -> Result<()> {
        let Reference {
            program,
            inputs,
            expected,
            backward,
        } = reference;
        if inputs.iter().all(Option::is_none) {
            // Nothing to lay out but the result itself.
            let rank = expected.as_ref().ok().and_then(|all| all.first());
            let ways = shardings(rank.map_or(0, |e| e.shape.len()), mesh.axes().len(), &[]);
            for case in self.pick(ways.len() as u64, mesh, which) {
                let place = Place {
                    mesh: mesh.clone(),
                    sharding: ways[case as usize].clone(),
                };
                self.check(program, &[], program.call(&[], &place), expected);
            }
            return Ok(());
        }
        let mut layouts: Vec<Layouts<'_>> = inputs
            .iter()
            .map(|x| Layouts::new(x.as_ref(), mesh))
            .collect();
        let mut seeds = backward.as_ref().map_or(vec![], |b| b.seeds(mesh));
        let possible = layouts
            .iter()
            .fold(1u64, |n, list| n.saturating_mul(list.len() as u64));
        let place = Place::from(mesh);
        for case in self.pick(possible, mesh, which) {
            if self.lost {
                return Ok(());
            }
            let mut at = case;
            let mut operands = Vec::with_capacity(layouts.len());
            for list in &mut layouts {
                operands.push(list.get((at % list.len() as u64) as usize)?);
                at /= list.len() as u64;
            }
            // Operands are the same tensors in many cases: in every other one they come as earlier
            // cases had them brought, else as they lie. Both must give the same.
            let held = match case.is_multiple_of(2) {
                true => Held { calls: 0, bytes: 0 },
                false => Held::default(),
            };
            let actual = with_held(held, || program.call(&operands, &place));
            let known = !matches!(&actual, Err(error) if unknown(error, &operands));
            self.check(program, &operands, actual, expected);
            let backward = backward.as_ref().filter(|_| known && !self.lost);
            if let Some(backward) = backward {
                self.report.gradients += 1;
                let check = || backward.check(program, &operands, &place, &mut seeds, case);
                if let Err(why) = with_held(held, check) {
                    self.fail(format!(
                        "gradient of {} of {}: {why}",
                        program.name,
                        types(&operands)
                    ));
                }
            }
        }
        Ok(())
    }

    fn check(
        &mut self,
        program: &Program<'_>,
        operands: &[Option<Tensor>],
        actual: Result<Vec<Tensor>>,
        expected: &Result<Vec<Expected>>,
    ) {
        // Other processes may have ended the case otherwise.
        let failed = actual.is_err();
        let result = match (actual, expected) {
            (Err(error), Ok(_)) if unknown(&error, operands) => Ok(()),
            (Ok(actual), Ok(expected)) => compare_with(program.precision, &actual, expected),
            (Err(actual), Err(expected)) if same_error(&actual, expected) => Ok(()),
            (Err(actual), Err(expected)) => {
                Err(format!("is the error '{actual}', expected '{expected}'"))
            }
            (Err(error), Ok(_)) => Err(error.to_string()),
            (Ok(_), Err(error)) => Err(format!("worked, expected the error '{error}'")),
        };
        if let Err(why) = result {
            self.lost |= failed && operands.iter().flatten().any(|x| !x.mesh().is_local());
            self.fail(format!("{} of {}: {why}", program.name, types(operands)));
        }
    }
}

/// Whether an op needed values where this process has none: a size that depends on them is known only
/// where they are.
fn unknown(error: &Error, operands: &[Option<Tensor>]) -> bool {
    let elsewhere = |x: &Tensor| x.mesh().addressable().len() == 0;
    matches!(error, Error::Mesh { .. }) && operands.iter().flatten().any(elsewhere)
}

fn types(operands: &[Option<Tensor>]) -> String {
    operands
        .iter()
        .flatten()
        .map(Tensor::type_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether two errors say the same, but for how operands lie on a mesh.
fn same_error(a: &Error, b: &Error) -> bool {
    std::mem::discriminant(a) == std::mem::discriminant(b)
        && without_shardings(&a.to_string()) == without_shardings(&b.to_string())
}

/// `f32[5@a, 4]{sum:b}` as `f32[5, 4]`.
fn without_shardings(text: &str) -> String {
    let (mut out, mut partial, mut axis) = (String::new(), false, false);
    for c in text.chars() {
        partial |= c == '{';
        axis = c == '@' || (axis && (c.is_alphanumeric() || c == '_'));
        if !partial && !axis {
            out.push(c);
        }
        partial &= c != '}';
    }
    out
}
