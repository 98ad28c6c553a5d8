//! Gradients of a sample, with and without a mesh.

use super::{
    compare::{Expected, Precision, compare_with},
    layouts::{reductions, shardings},
    partial::lay_out,
    program::Program,
};
use anymesh_core::{
    Mesh, Place, Result, Sharding, Tensor,
    grad::{GradOptions, grad},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the gradients of a sample must be, however its operands lie.
pub(super) struct Backward {
    /// The seeds of each result that has a gradient.
    seeds: Vec<Option<Seed>>,
    /// The gradients of each operand that has one.
    expected: Vec<Option<Expected>>,
}

/// The gradient that a pass begins with: plain, its values, and ways to lie on the mesh.
type Seed = (Tensor, Vec<f64>, Vec<Sharding>);

impl Backward {
    /// The gradients without a mesh; `None` where there are none.
    pub(super) fn new(
        program: &Program<'_>,
        inputs: &[Option<Tensor>],
        mesh: &Mesh,
    ) -> Result<Option<Self>> {
        let device = mesh.device(0);
        let leaves = leaves(inputs)?;
        let out = program.call(&leaves, &device.into())?;
        let mut seeds = vec![];
        for t in &out {
            let numbers: Vec<f32> = (0..t.numel()).map(|i| (i * 5 % 7) as f32 - 3.0).collect();
            let seed = if t.requires_grad() {
                Some(Tensor::from_slice(&numbers, t.shape(), device)?.cast(t.dtype())?)
            } else {
                None
            };
            let plain: Vec<f64> = numbers.iter().map(|v| f64::from(*v)).collect();
            seeds.push(seed.map(|seed| {
                (
                    seed,
                    plain,
                    shardings(t.rank(), mesh.axes().len(), reductions(t.dtype())),
                )
            }));
        }
        if seeds.iter().all(Option::is_none) {
            return Ok(None);
        }
        let found = pull(
            &out,
            &leaves,
            seeds
                .iter()
                .map(|s| s.as_ref().map(|(seed, ..)| seed.clone())),
        )?;
        let expected = found
            .into_iter()
            .map(|g| g.map(|g| Expected::new(&g)).transpose());
        Ok(Some(Self {
            seeds,
            expected: expected.collect::<Result<_>>()?,
        }))
    }

    /// Whether the gradients are right for operands on the mesh, from seeds that lie in the
    /// `case`-th way.
    pub(super) fn check(
        &self,
        program: &Program<'_>,
        operands: &[Option<Tensor>],
        place: &Place,
        case: u64,
    ) -> Result<(), String> {
        let run = || -> Result<Vec<Option<Tensor>>> {
            let leaves = leaves(operands)?;
            let out = program.call(&leaves, place)?;
            let mut seeds = vec![];
            for seed in &self.seeds {
                let Some((seed, plain, ways)) = seed else {
                    seeds.push(None);
                    continue;
                };
                seeds.push(Some(lay_out(
                    seed,
                    plain,
                    &place.mesh,
                    ways[(case.wrapping_mul(31) % ways.len() as u64) as usize].clone(),
                )?));
            }
            pull(&out, &leaves, seeds.into_iter())
        };
        let found = catch_unwind(AssertUnwindSafe(run))
            .map_err(|_| "panicked")?
            .map_err(|e| e.to_string())?;
        for (i, (actual, expected)) in found.iter().zip(&self.expected).enumerate() {
            let (Some(actual), Some(expected)) = (actual, expected) else {
                if actual.is_some() != expected.is_some() {
                    return Err(format!("operand {i} has a gradient in one case only"));
                }
                continue;
            };
            let whole = operands[i]
                .as_ref()
                .map(|x| x.sharding().whole())
                .unwrap_or_default();
            if *actual.sharding() != whole {
                return Err(format!(
                    "operand {i}: its gradient {} does not lie as the operand does",
                    actual.type_string()
                ));
            }
            compare_with(
                Precision::ROUNDED,
                std::slice::from_ref(actual),
                std::slice::from_ref(expected),
            )
            .map_err(|e| format!("operand {i}: {e}"))?;
        }
        Ok(())
    }
}

/// Operands that gradients are wanted for, where they can have one.
fn leaves(inputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let leaf = |x: &Option<Tensor>| {
        x.as_ref()
            .map(|x| {
                if x.dtype().is_float() {
                    x.require_grad()
                } else {
                    Ok(x.clone())
                }
            })
            .transpose()
    };
    inputs.iter().map(leaf).collect()
}

/// The gradient of each leaf, in its sharding.
fn pull(
    out: &[Tensor],
    leaves: &[Option<Tensor>],
    seeds: impl Iterator<Item = Option<Tensor>>,
) -> Result<Vec<Option<Tensor>>> {
    let pairs: Vec<(&Tensor, Tensor)> = out
        .iter()
        .zip(seeds)
        .filter_map(|(t, seed)| seed.map(|s| (t, s)))
        .collect();
    let (outputs, seeds): (Vec<&Tensor>, Vec<Tensor>) = pairs.into_iter().unzip();
    let inputs: Vec<&Tensor> = leaves
        .iter()
        .flatten()
        .filter(|x| x.requires_grad())
        .collect();
    let options = GradOptions {
        seeds: Some(seeds),
        allow_unused: true,
        ..GradOptions::default()
    };
    let mut found = grad(&outputs, &inputs, &options)?.into_iter();
    Ok(leaves
        .iter()
        .map(|x| {
            x.as_ref()
                .filter(|x| x.requires_grad())
                .and_then(|_| found.next())
        })
        .collect())
}
