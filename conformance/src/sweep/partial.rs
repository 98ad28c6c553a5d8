//! Tensors on meshes, also ones whose ranks hold parts of a reduction.

use anymesh_core::{DType, Mesh, Reduction, Region, Result, Shape, Sharding, Tensor, TensorType};

/// A tensor on a mesh. Ranks of a partial value hold different parts, which combine to the value
/// exactly and are not the value itself where that can be helped. `plain` has the values.
///
/// Logical reductions answer with 0 and 1, so of other dtypes than bool only such values can be
/// partial with them.
pub fn lay_out(x: &Tensor, plain: &[f64], mesh: &Mesh, sharding: Sharding) -> Result<Tensor> {
    sharding.check(mesh, x.rank())?;
    let Some((_, reduction)) = sharding.partial().next() else {
        return x.to_mesh(mesh, sharding);
    };
    let axes: Vec<usize> = sharding.partial().map(|(axis, _)| axis).collect();
    let members: usize = axes.iter().map(|a| mesh.size(*a)).product();
    let parts = mesh.addressable().enumerate().map(|(i, rank)| {
        let region = sharding.region(mesh, rank, x.shape());
        let member = axes
            .iter()
            .fold(0, |m, a| m * mesh.size(*a) + mesh.coordinate(rank, *a));
        let part: Vec<f32> = positions(&region, x.dims())
            .map(|at| {
                let share = Share {
                    at,
                    member,
                    members,
                };
                share.of(plain[at], reduction, x.dtype()) as f32
            })
            .collect();
        Tensor::from_slice(&part, Shape::from(region.shape), mesh.device(i))?.cast(x.dtype())
    });
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let ty = TensorType {
        dtype: x.dtype(),
        shape: x.shape().clone(),
        sharding,
    };
    Tensor::from_shards(&ty, mesh, &parts)
}

/// Which of the ranks that share a value one is.
#[derive(Clone, Copy)]
struct Share {
    /// Where the value is in its tensor.
    at: usize,
    member: usize,
    members: usize,
}

impl Share {
    /// What this rank holds of a value.
    fn of(self, value: f64, reduction: Reduction, dtype: DType) -> f64 {
        let own = self.place() == 0;
        match (reduction, dtype) {
            (Reduction::Or, _) | (Reduction::Sum | Reduction::Max, DType::Bool) => {
                truth(value != 0.0 && (own || self.noise(2) == 0))
            }
            (Reduction::And, _) | (Reduction::Prod | Reduction::Min, DType::Bool) => {
                truth(value != 0.0 || (!own && self.noise(2) == 0))
            }
            (Reduction::Max, _) if own => value,
            (Reduction::Max, _) => value - 1.0 - self.noise(3) as f64,
            (Reduction::Min, _) if own => value,
            (Reduction::Min, _) => value + 1.0 + self.noise(3) as f64,
            (Reduction::Sum, DType::U8 | DType::U32) => {
                let upto = |member: usize| (value * member as f64 / self.members as f64).floor();
                upto(self.member + 1) - upto(self.member)
            }
            (Reduction::Sum, _) => self.term(value, dtype),
            (Reduction::Prod, _) if dtype.is_float() => self.factor(value),
            (Reduction::Prod, _) => self.whole_factor(value, dtype),
        }
    }

    /// The place counted from the rank that holds the value, which is another one for each value.
    fn place(self) -> usize {
        (self.member + self.members - self.at % self.members) % self.members
    }

    /// Some number below `n`.
    fn noise(self, n: usize) -> usize {
        let mixed =
            (self.at as u64 * 31 + self.member as u64 * 17 + 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 33) as usize % n
    }

    /// The two ranks that undo each other's noise: its number, and whether this is the first of
    /// them. None for a last one without a partner.
    fn pair(self) -> Option<(usize, bool)> {
        let first = self.place().is_multiple_of(2);
        let alone = first && self.place() + 1 == self.members;
        (!alone).then_some((self.at * 5 + self.place() / 2 * 3 + self.at / 7, first))
    }

    /// A term of a sum. Sums of some terms are exact as well, in whatever order they are added.
    fn term(self, value: f64, dtype: DType) -> f64 {
        let own = if self.place() == 0 { value } else { 0.0 };
        let Some((noise, first)) = self.pair() else {
            return own;
        };
        let more = (1 + noise % 2) as f32;
        // With 3 bits, whole numbers are exact up to 8: there is room for one pair.
        let narrow = matches!(dtype, DType::F8E4M3 | DType::F8E5M2);
        if narrow && (self.place() >= 2 || value.fract() != 0.0 || value.abs() > 6.0) {
            return own;
        }
        if self.place() < 2 && !undone(value, |v| v + more, |v| v - more) {
            own
        } else if first {
            own + f64::from(more)
        } else {
            own - f64::from(more)
        }
    }

    /// A factor of a product of floats: powers of two round nothing.
    fn factor(self, value: f64) -> f64 {
        let own = if self.place() == 0 { value } else { 1.0 };
        let Some((noise, first)) = self.pair() else {
            return own;
        };
        let by = [2f32, -2.0, 0.5][noise % 3];
        if self.place() < 2 && !undone(value, |v| v * by, |v| v / by) {
            own
        } else if first {
            own * f64::from(by)
        } else {
            own / f64::from(by)
        }
    }

    /// A factor of a product of whole numbers.
    fn whole_factor(self, value: f64, dtype: DType) -> f64 {
        let own = if self.place() == 0 { value } else { 1.0 };
        let Some((noise, _)) = self.pair() else {
            return own;
        };
        let unsigned = matches!(dtype, DType::U8 | DType::U32);
        match self.place() {
            0 if value % 2.0 == 0.0 => value / 2.0,
            1 if value % 2.0 == 0.0 => 2.0,
            _ if unsigned => own,
            0 | 1 => -own,
            _ if noise % 2 == 0 => own,
            _ => -1.0,
        }
    }
}

/// Whether a value survives a change and its undoing.
fn undone(value: f64, change: impl Fn(f32) -> f32, undo: impl Fn(f32) -> f32) -> bool {
    undo(change(value as f32)) == value as f32
}

fn truth(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// Row-major positions of a box in a tensor with these dimensions.
pub(super) fn positions<'a>(
    region: &'a Region,
    dims: &'a [usize],
) -> impl Iterator<Item = usize> + 'a {
    (0..region.numel()).map(move |mut i| {
        let (mut at, mut stride) = (0, 1);
        for d in (0..dims.len()).rev() {
            at += (region.start[d] + i % region.shape[d]) * stride;
            i /= region.shape[d];
            stride *= dims[d];
        }
        at
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::values;

    /// So many that no two ranks hold the same of them by chance.
    const TRUTHS: [f32; 16] = [
        0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0,
    ];

    /// Every reduction of every dtype, on meshes of one to seven members.
    #[test]
    fn parts_of_every_reduction_combine_to_the_tensor() -> Result<()> {
        let device = anymesh_backend_cpu::device();
        for members in 1..=7 {
            let mesh = Mesh::new(&format!("a={members}"), &device)?;
            for dtype in DType::ALL {
                for reduction in Reduction::ALL {
                    let logical = matches!(reduction, Reduction::And | Reduction::Or);
                    let numbers: &[f32] = match dtype {
                        DType::Bool => &TRUTHS,
                        _ if logical => &TRUTHS,
                        DType::U8 | DType::U32 => &[0.0, 1.0, 2.0, 5.0, 6.0],
                        _ => &[0.0, 1.0, -2.0, 3.0, -3.0],
                    };
                    let x = Tensor::from_slice(numbers, [numbers.len()], &device)?.cast(dtype)?;
                    let plain = values(&x)?;
                    let sharding = Sharding::replicated().partial_over(0, reduction);
                    let parts = lay_out(&x, &plain, &mesh, sharding)?;
                    assert_eq!(
                        values(&parts.full_tensor()?)?,
                        plain,
                        "{} over {members}",
                        parts.type_string()
                    );
                    let same =
                        |(_, part): &(usize, Tensor)| values(part).is_ok_and(|part| part == plain);
                    assert!(
                        members == 1 || !parts.shards().iter().all(same),
                        "the parts of {} over {members} are all the value",
                        parts.type_string()
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn values_that_noise_would_round_are_held_by_one_rank() -> Result<()> {
        let device = anymesh_backend_cpu::device();
        let mesh = Mesh::new("a=2", &device)?;
        let numbers = [
            1e30f32,
            1e-40,
            f32::MAX,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.1,
        ];
        let x = Tensor::from_slice(&numbers, [6], &device)?;
        for reduction in [
            Reduction::Sum,
            Reduction::Max,
            Reduction::Min,
            Reduction::Prod,
        ] {
            let sharding = Sharding::replicated().partial_over(0, reduction);
            let parts = lay_out(&x, &values(&x)?, &mesh, sharding)?;
            assert_eq!(
                parts.full_tensor()?.to_vec::<f32>()?,
                numbers,
                "{reduction}"
            );
        }
        Ok(())
    }
}
