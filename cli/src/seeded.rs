//! Runs a request on the CPU with made-up data, sharded and not.

use crate::{
    request::bad,
    rule::{Outcome, Request},
};
use anymesh::conformance::sweep;
use anymesh::{Device, Kind, Mesh, Place, Reduction, Result, Tensor, TensorType};

/// The most elements of operands and results together, times ranks. Some collectives give every rank
/// a copy of its own, so that this is about half a gigabyte.
const MAX_ELEMENTS: usize = 1 << 26;

/// The operands of a request with values.
pub(crate) struct Seeded<'a> {
    request: &'a Request,
    mesh: Mesh,
    plain: Vec<Option<Tensor>>,
    sharded: Vec<Option<Tensor>>,
}

impl<'a> Seeded<'a> {
    /// Makes the operands. `outputs` are the types of the results, where they are known.
    pub(crate) fn new(
        request: &'a Request,
        outputs: Option<&[Tensor]>,
        cpu: &Device,
    ) -> Result<Self> {
        request.check_memory(outputs)?;
        let mesh = request.mesh.on(cpu)?;
        let (mut plain, mut sharded) = (vec![], vec![]);
        for (at, ty) in request.inputs.iter().enumerate() {
            let Some(ty) = ty else {
                plain.push(None);
                sharded.push(None);
                continue;
            };
            let values = request.values(at, ty);
            let x = Tensor::from_slice(&values, &ty.shape, cpu)?.cast(ty.dtype)?;
            let laid_out = sweep::lay_out(&x, &sweep::values(&x)?, &mesh, ty.sharding.clone())?;
            sharded.push(Some(laid_out));
            plain.push(Some(x));
        }
        Ok(Self {
            request,
            mesh,
            plain,
            sharded,
        })
    }

    /// What the op does on the mesh.
    pub(crate) fn outcome(&self) -> Result<Outcome> {
        self.request.call(&self.sharded, &self.mesh)
    }

    /// The largest difference between the results on the mesh and those without it; infinite where
    /// one is infinite, no number or of another shape and the other is not.
    pub(crate) fn difference(&self, outputs: &[Tensor], cpu: &Device) -> Result<f64> {
        let Request { entry, attrs, .. } = self.request;
        let expected = entry.call(&self.plain, attrs, &Place::from(cpu))?;
        let mut worst = 0f64;
        for (actual, expected) in outputs.iter().zip(&expected) {
            if actual.dims() != expected.dims() || actual.dtype() != expected.dtype() {
                return Ok(f64::INFINITY);
            }
            let actual = sweep::values(&actual.full_tensor()?)?;
            for (a, e) in actual.iter().zip(sweep::values(expected)?) {
                if *a != e && !(a.is_nan() && e.is_nan()) {
                    let difference = (a - e).abs();
                    worst = worst.max(if difference.is_nan() {
                        f64::INFINITY
                    } else {
                        difference
                    });
                }
            }
        }
        Ok(worst)
    }
}

impl Request {
    /// Refuses what would not fit into memory, before any of it is taken.
    fn check_memory(&self, outputs: Option<&[Tensor]>) -> Result<()> {
        let inputs = self.inputs.iter().flatten().map(|t| t.shape.numel());
        let elements = inputs
            .chain(outputs.unwrap_or_default().iter().map(Tensor::numel))
            .fold(0usize, usize::saturating_add)
            .saturating_mul(self.mesh.ranks());
        if elements > MAX_ELEMENTS {
            return Err(bad(format!(
                "a run with {elements} elements, counted in operands and results on every rank: at most {MAX_ELEMENTS}, make it smaller or do not run it"
            )));
        }
        // Results whose sizes only the values tell are as large as the attributes say.
        let largest = self.attrs.largest();
        if outputs.is_none() && largest > MAX_ELEMENTS as f64 {
            return Err(bad(format!(
                "an attribute of {largest} in a run: at most {MAX_ELEMENTS}"
            )));
        }
        Ok(())
    }

    /// Made-up values for operand `at`: floats are small whole numbers, so that sums are exact,
    /// positions are anywhere in the dimension that they index, other integers are small and never
    /// zero, so that they divide.
    pub(crate) fn values(&self, at: usize, ty: &TensorType) -> Vec<f32> {
        let shapes: Vec<Option<&[usize]>> = self
            .inputs
            .iter()
            .map(|t| t.as_ref().map(|t| t.shape.dims()))
            .collect();
        let positions = self
            .entry
            .positions(at, &shapes, &self.attrs)
            .filter(|sizes| !sizes.is_empty());
        // Logical reductions only have truth values.
        let logical = ty
            .sharding
            .partial()
            .any(|(_, r)| matches!(r, Reduction::And | Reduction::Or));
        (0..ty.shape.numel())
            .map(|i| {
                let n = (i as u64 + 1 + 1000 * at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
                match (ty.dtype.kind(), &positions) {
                    (Kind::Bool, _) => (n % 2) as f32,
                    _ if logical => (n % 2) as f32,
                    (Kind::F32 | Kind::F64, _) => (n % 7) as f32 - 3.0,
                    // Beyond this floats skip whole numbers.
                    (_, Some(sizes)) => {
                        (n % sizes[i % sizes.len()].clamp(1, 1 << 24) as u64) as f32
                    }
                    (_, None) => (1 + n % 7) as f32,
                }
            })
            .collect()
    }
}
