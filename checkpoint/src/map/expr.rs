//! What a destination tensor is made of: an expression over source tensors that is never computed
//! as a whole.

use crate::TensorInfo;
use crate::regions::checked_numel;
use anymesh_core::{DType, Region};
use std::sync::Arc;

/// Operations one inside the other, at most: a bound on recursion.
const DEEPEST: usize = 100;

/// Parts of a join of joins, at most: longer ones stay joins of joins, because a name that is
/// joined with itself again and again would soon have millions.
const MOST_PARTS: usize = 1 << 10;

/// A tensor that is described, not held.
#[derive(Clone, Debug)]
pub struct Expr {
    /// Its element type and shape.
    pub info: TensorInfo,
    /// How it is made.
    pub derivation: Derivation,
    depth: usize,
}

/// How a described tensor is made.
#[derive(Clone, Debug)]
pub enum Derivation {
    /// A tensor of the source.
    Source(String),
    /// A region of another, from `start` on.
    Slice {
        /// Of what.
        of: Arc<Expr>,
        /// The first element.
        start: Vec<usize>,
    },
    /// Several one after the other along a dimension.
    Concat {
        /// In this order.
        parts: Vec<Arc<Expr>>,
        /// Along this dimension.
        axis: usize,
    },
    /// Dimension `d` is dimension `order[d]` of another.
    Permute {
        /// Of what.
        of: Arc<Expr>,
        /// The order.
        order: Vec<usize>,
    },
    /// The same elements in another shape.
    Reshape(Arc<Expr>),
    /// The same values in another element type.
    Cast(Arc<Expr>),
}

type Made = Result<Arc<Expr>, String>;

impl Expr {
    /// A tensor of the source.
    pub(super) fn source(name: &str, info: &TensorInfo) -> Arc<Self> {
        Arc::new(Self {
            info: info.clone(),
            derivation: Derivation::Source(name.into()),
            depth: 0,
        })
    }

    fn make(info: TensorInfo, derivation: Derivation, below: usize) -> Made {
        if below >= DEEPEST {
            return Err(format!(
                "more than {DEEPEST} operations one after the other on one tensor"
            ));
        }
        Ok(Arc::new(Self {
            info,
            derivation,
            depth: below + 1,
        }))
    }

    /// Part of a tensor along one dimension.
    pub(super) fn slice(self: &Arc<Self>, axis: usize, first: usize, length: usize) -> Made {
        let mut shape = self.info.shape.clone();
        shape[axis] = length;
        let mut start = vec![0; shape.len()];
        start[axis] = first;
        self.region_of(start, shape)
    }

    fn region_of(self: &Arc<Self>, mut start: Vec<usize>, shape: Vec<usize>) -> Made {
        if shape == self.info.shape {
            return Ok(self.clone());
        }
        let info = TensorInfo {
            dtype: self.info.dtype,
            shape,
        };
        if let Derivation::Slice { of, start: inner } = &self.derivation {
            start.iter_mut().zip(inner).for_each(|(s, i)| *s += i);
            return Self::make(
                info,
                Derivation::Slice {
                    of: of.clone(),
                    start,
                },
                of.depth,
            );
        }
        Self::make(
            info,
            Derivation::Slice {
                of: self.clone(),
                start,
            },
            self.depth,
        )
    }

    /// Tensors one after the other, of one element type and of one shape but for the dimension they
    /// are joined along.
    pub(super) fn concat(parts: &[Arc<Self>], axis: usize) -> Made {
        let Some(first) = parts.first() else {
            return Err("nothing to join".into());
        };
        let mut total = 0usize;
        for part in parts {
            if part.info.dtype != first.info.dtype {
                return Err(format!(
                    "{} and {} cannot be joined: cast one of them before axis=",
                    first.info.dtype, part.info.dtype
                ));
            }
            let (a, b) = (&first.info.shape, &part.info.shape);
            if a.len() != b.len() || (0..a.len()).any(|d| d != axis && a[d] != b[d]) {
                return Err(format!(
                    "shapes {a:?} and {b:?} cannot be joined along dimension {axis}"
                ));
            }
            total = total
                .checked_add(b[axis])
                .ok_or("the joined tensor is too large")?;
        }
        // A join of joins is one join, and neighbours that were cut from one tensor are one region
        // of it again: fewer and longer reads.
        let short = parts.iter().fold(0usize, |sum, part| {
            sum.saturating_add(part.joined(axis).len())
        }) <= MOST_PARTS;
        let mut flat: Vec<Arc<Self>> = Vec::with_capacity(parts.len());
        for part in parts.iter().flat_map(|part| {
            if short {
                part.joined(axis)
            } else {
                std::slice::from_ref(part)
            }
        }) {
            match flat.last().and_then(|last| last.followed_by(part, axis)) {
                Some(both) => {
                    flat.pop();
                    flat.push(both?);
                }
                None => flat.push(part.clone()),
            }
        }
        if let [one] = &flat[..] {
            return Ok(one.clone());
        }
        let mut info = first.info.clone();
        info.shape[axis] = total;
        numel(&info.shape)?;
        let below = flat.iter().map(|part| part.depth).max().unwrap_or(0);
        Self::make(info, Derivation::Concat { parts: flat, axis }, below)
    }

    /// What it is joined of along a dimension, or itself.
    fn joined(self: &Arc<Self>, axis: usize) -> &[Arc<Self>] {
        match &self.derivation {
            Derivation::Concat { parts, axis: along } if *along == axis => parts,
            _ => std::slice::from_ref(self),
        }
    }

    /// Both as one region of the tensor that they are neighbouring regions of.
    fn followed_by(self: &Arc<Self>, next: &Arc<Self>, axis: usize) -> Option<Made> {
        let (
            Derivation::Slice { of, start },
            Derivation::Slice {
                of: other,
                start: there,
            },
        ) = (&self.derivation, &next.derivation)
        else {
            return None;
        };
        let meet = |d: usize| start[d] + if d == axis { self.info.shape[d] } else { 0 } == there[d];
        if !Arc::ptr_eq(of, other) || !(0..start.len()).all(meet) {
            return None;
        }
        let mut shape = self.info.shape.clone();
        shape[axis] += next.info.shape[axis];
        Some(of.region_of(start.clone(), shape))
    }

    /// The dimensions in another order; none means all reversed.
    pub(super) fn permute(self: &Arc<Self>, order: &[usize]) -> Made {
        let rank = self.info.shape.len();
        let order: Vec<usize> = if order.is_empty() {
            (0..rank).rev().collect()
        } else {
            order.to_vec()
        };
        if order.len() != rank {
            return Err(format!(
                "permute={order:?} is for rank {}, the tensor is {:?}",
                order.len(),
                self.info.shape
            ));
        }
        if order.iter().enumerate().all(|(d, from)| d == *from) {
            return Ok(self.clone());
        }
        if let Derivation::Permute { of, order: inner } = &self.derivation {
            return of.permute(&order.iter().map(|d| inner[*d]).collect::<Vec<_>>());
        }
        let info = TensorInfo {
            dtype: self.info.dtype,
            shape: order.iter().map(|d| self.info.shape[*d]).collect(),
        };
        Self::make(
            info,
            Derivation::Permute {
                of: self.clone(),
                order,
            },
            self.depth,
        )
    }

    /// The elements in another shape, in which one size may be -1.
    pub(super) fn reshape(self: &Arc<Self>, to: &[i64]) -> Made {
        let shape = resolve(&self.info.shape, to)?;
        if shape == self.info.shape {
            return Ok(self.clone());
        }
        if let Derivation::Reshape(of) = &self.derivation {
            return of.reshape(to);
        }
        Self::make(
            TensorInfo {
                dtype: self.info.dtype,
                shape,
            },
            Derivation::Reshape(self.clone()),
            self.depth,
        )
    }

    /// The values in another element type, as [`Op::Cast`](super::Op::Cast) says.
    pub(super) fn cast(self: &Arc<Self>, to: DType) -> Made {
        let from = self.info.dtype;
        if from == to {
            return Ok(self.clone());
        }
        Self::make(
            TensorInfo {
                dtype: to,
                shape: self.info.shape.clone(),
            },
            Derivation::Cast(self.clone()),
            self.depth,
        )
    }
}

/// A dimension that may count from the end.
pub(super) fn resolve_axis(shape: &[usize], axis: i64) -> Result<usize, String> {
    let rank = shape.len() as i64;
    let resolved = if axis < 0 {
        axis.checked_add(rank)
    } else {
        Some(axis)
    };
    resolved
        .filter(|a| (0..rank).contains(a))
        .map(|a| a as usize)
        .ok_or_else(|| format!("axis={axis} is no dimension of the shape {shape:?}"))
}

fn numel(shape: &[usize]) -> Result<usize, String> {
    checked_numel(shape).ok_or_else(|| format!("the shape {shape:?} is too large"))
}

/// The shape that a list means for a tensor of another shape.
fn resolve(from: &[usize], to: &[i64]) -> Result<Vec<usize>, String> {
    let error = || format!("the shape {from:?} cannot become {to:?}");
    let total = numel(from)?;
    let open = to.iter().filter(|n| **n == -1).count();
    let given: Vec<usize> = to
        .iter()
        .filter(|n| **n != -1)
        .map(|n| usize::try_from(*n).map_err(|_| error()))
        .collect::<Result<_, _>>()?;
    let known = numel(&given)?;
    let missing = match open {
        0 if known == total => 0,
        1 if known > 0 && total % known == 0 => total / known,
        _ => return Err(error()),
    };
    Ok(to
        .iter()
        .map(|n| usize::try_from(*n).unwrap_or(missing))
        .collect())
}

/// A region from its parts.
pub(super) fn region(
    start: impl IntoIterator<Item = usize>,
    shape: impl IntoIterator<Item = usize>,
) -> Region {
    Region {
        start: start.into_iter().collect(),
        shape: shape.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beside_a_zero_must_be_addressable_too() {
        let nothing = Expr::source(
            "z",
            &TensorInfo {
                dtype: DType::F32,
                shape: vec![0, 4],
            },
        );
        assert!(nothing.reshape(&[1 << 40, 0]).is_ok());
        for to in [[1 << 40, 1 << 40, 0], [0, 1 << 40, 1 << 40]] {
            let error = nothing
                .reshape(&to)
                .expect_err("numbers of bytes would overflow");
            assert!(error.contains("too large"), "{error}");
        }
    }

    #[test]
    fn a_tensor_that_is_joined_with_itself_again_and_again_stays_small_and_can_be_read() {
        let mut expr = Expr::source(
            "a",
            &TensorInfo {
                dtype: DType::U8,
                shape: vec![3],
            },
        );
        for _ in 0..50 {
            expr = Expr::concat(&[expr.clone(), expr], 0).expect("joins");
        }
        assert_eq!(expr.info.shape, [3 << 50]);
        let Derivation::Concat { parts, .. } = &expr.derivation else {
            panic!("{:?}", expr.info)
        };
        assert!(parts.len() <= MOST_PARTS);
        let found = super::super::pieces::pieces(&expr, &region([(1 << 50) + 1], [4]));
        // Between multiples of three: 2^50 + 1 is 2 more than one.
        let places: Vec<(usize, usize)> = found
            .iter()
            .map(|piece| (piece.region.start[0], piece.region.shape[0]))
            .collect();
        assert_eq!(places, [(2, 1), (0, 3)]);
    }
}
