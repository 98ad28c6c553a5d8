//! Gradients of a sample, with and without a mesh.

use super::{
    compare::{Expected, Precision, compare_with},
    layouts::{Layouts, Plain},
    program::Program,
};
use anymesh_core::{
    Device, Mesh, Place, Result, Tensor,
    grad::{GradOptions, grad},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the gradients of a sample must be, however its operands lie.
pub(super) struct Backward {
    /// The gradients that a pass begins with, of each result that has one.
    seeds: Vec<Option<Plain>>,
    /// The gradients of each operand that has one.
    expected: Vec<Option<Expected>>,
}

impl Backward {
    /// The gradients without a mesh; `None` where there are none.
    pub(super) fn new(
        program: &Program<'_>,
        inputs: &[Option<Tensor>],
        device: &Device,
    ) -> Result<Option<Self>> {
        let leaves = leaves(inputs)?;
        let out = program.call(&leaves, &device.into())?;
        let mut seeds = vec![];
        for t in &out {
            let numbers: Vec<f32> = (0..t.numel()).map(|i| (i * 5 % 7) as f32 - 3.0).collect();
            seeds.push(if t.requires_grad() {
                let seed = Tensor::from_slice(&numbers, t.shape(), device)?.cast(t.dtype())?;
                Some(Plain::new(&seed)?)
            } else {
                None
            });
        }
        if seeds.iter().all(Option::is_none) {
            return Ok(None);
        }
        let found = pull(
            &out,
            &leaves,
            seeds
                .iter()
                .map(|s| s.as_ref().map(|seed| seed.tensor.clone())),
        )?;
        let expected = found
            .into_iter()
            .map(|g| g.map(|g| Expected::new(&g)).transpose());
        Ok(Some(Self {
            seeds,
            expected: expected.collect::<Result<_>>()?,
        }))
    }

    /// The ways in which its seeds can lie on a mesh.
    pub(super) fn seeds<'a>(&'a self, mesh: &'a Mesh) -> Vec<Layouts<'a>> {
        let ways = |seed: &'a Option<Plain>| Layouts::new(seed.as_ref(), mesh);
        self.seeds.iter().map(ways).collect()
    }

    /// Whether the gradients are right for operands on the mesh, from seeds that lie in the
    /// `case`-th way.
    pub(super) fn check(
        &self,
        program: &Program<'_>,
        operands: &[Option<Tensor>],
        place: &Place,
        seeds: &mut [Layouts<'_>],
        case: u64,
    ) -> Result<(), String> {
        let run = || -> Result<Vec<Option<Tensor>>> {
            let leaves = leaves(operands)?;
            let out = program.call(&leaves, place)?;
            let way = |ways: &mut Layouts<'_>| {
                ways.get((case.wrapping_mul(31) % ways.len() as u64) as usize)
            };
            let seeds = seeds.iter_mut().map(way).collect::<Result<Vec<_>>>()?;
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
