//! Results whose dimensions are made of those of operands, element by element: slices, joins,
//! paddings, rolls. Where such a dimension is cut over ranks, each fetches what it lacks.

use super::{OpInfo, PadMode, create, shape::VIEWED};
use crate::{
    Device, Dims, Result, Scalar, Tensor,
    reshard::{self, Fetched, Recipe},
    spmd::{
        Call, Local,
        assemble::{ASSEMBLE, assemble_data},
        built::view_data,
    },
};
use smallvec::{SmallVec, smallvec};

/// The step of this file.
pub(super) const STEPS: &[OpInfo] = &[ASSEMBLED];

const ASSEMBLED: OpInfo = OpInfo::new("assemble", ASSEMBLE);

/// Dimensions that are made, and how.
pub(super) type Recipes = SmallVec<[(usize, Recipe); 1]>;

impl Tensor {
    /// Whether ranks hold different parts of a dimension.
    pub(super) fn is_cut(&self, dim: usize) -> bool {
        self.sharding().axes_of(dim).next().is_some()
    }

    /// What an op makes of a tensor on a mesh; `local` does the same on one rank, for dimensions
    /// that are whole.
    #[track_caller]
    pub(super) fn made(
        &self,
        op: &'static str,
        recipes: &Recipes,
        local: impl Fn(&Local<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if recipes.iter().any(|(dim, _)| self.is_cut(*dim)) {
            return assembled(op, &[self], recipes, None, local);
        }
        let touched: Dims = recipes.iter().map(|(dim, _)| *dim).collect();
        Call::of(&VIEWED, &[self])
            .on_behalf_of(op)
            .data(&view_data(&self.without(&touched)))
            .run1(local)
    }
}

/// What an op makes of tensors on a mesh that have one dtype, where one of the dimensions is cut.
/// Places are filled with zero or with a value that the dtype can hold.
#[track_caller]
pub(super) fn assembled(
    op: &'static str,
    inputs: &[&Tensor],
    recipes: &Recipes,
    fill: Option<Scalar>,
    local: impl Fn(&Local<'_>) -> Result<Tensor>,
) -> Result<Tensor> {
    let value = fill.unwrap_or(create::zero_scalar(inputs[0].dtype()));
    Call::of(&ASSEMBLED, inputs)
        .on_behalf_of(op)
        .data(&assemble_data(recipes, fill.map(Scalar::to_f64)))
        .run1_or(local, |inputs| {
            reshard::assemble(inputs, recipes, |fetched, device| {
                put(fetched, value, device)
            })
        })
}

/// A rank's part, of what it fetched.
fn put(fetched: &Fetched, fill: Scalar, device: &Device) -> Result<Tensor> {
    let mut pairs: Dims<(usize, usize)> = smallvec![(0, 0); fetched.shape.rank()];
    let mut made: Option<Tensor> = None;
    for (dim, share) in &fetched.shares {
        pairs[*dim] = (share.before, share.after);
        let mut pieces: SmallVec<[Tensor; 3]> = SmallVec::new();
        for piece in &share.pieces {
            let Some(x) = made.as_ref().or(fetched.operands[piece.operand].as_ref()) else {
                continue;
            };
            let layout = x.layout().slice(*dim, piece.start, piece.step, piece.len);
            pieces.push(x.with_layout(layout).apart(*dim, piece.apart, fill)?);
        }
        made = match &pieces[..] {
            [] => None,
            [one] => Some(one.clone()),
            some => Some(Tensor::concat(
                &some.iter().collect::<SmallVec<[&Tensor; 3]>>(),
                *dim as i64,
            )?),
        };
        if made.is_none() {
            break;
        }
    }
    match made {
        Some(made) => made.pad(&pairs, PadMode::Constant(fill)),
        None => Tensor::full(fetched.shape.clone(), fill, fetched.dtype, device),
    }
}

impl Tensor {
    /// The elements of a dimension of a plain tensor with places that are filled between them.
    pub(super) fn apart(&self, axis: usize, apart: usize, fill: Scalar) -> Result<Tensor> {
        let len = self.dims()[axis];
        if apart == 1 || len < 2 {
            return Ok(self.clone());
        }
        // A dimension of filled places behind each element, all but the last of which are the step.
        let mut pairs: Dims<(usize, usize)> = smallvec![(0, 0); self.rank() + 1];
        pairs[axis + 1] = (0, apart - 1);
        self.unsqueeze(axis as i64 + 1)?
            .pad(&pairs, PadMode::Constant(fill))?
            .reshape(self.shape().with(axis, len * apart))?
            .narrow(axis as i64, 0, (len - 1) * apart + 1)
    }
}
