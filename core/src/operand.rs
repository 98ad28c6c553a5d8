//! Tensors and shardings as errors tell of them.

use crate::{Mesh, OperandType, Sharding, ShardingSpec, Tensor, TensorType};

impl From<&Tensor> for OperandType {
    fn from(tensor: &Tensor) -> Self {
        let sharding = match tensor.is_plain() {
            true => String::new(),
            false => sharding_text(tensor.sharding(), tensor.rank(), tensor.mesh()),
        };
        Self {
            sharding,
            ..(tensor.dtype(), tensor.shape()).into()
        }
    }
}

/// A type on a mesh.
pub(crate) fn type_on(ty: &TensorType, mesh: &Mesh) -> OperandType {
    OperandType {
        sharding: sharding_text(&ty.sharding, ty.shape.rank(), mesh),
        ..(ty.dtype, &ty.shape).into()
    }
}

/// A sharding by the names of axes, `[@dp, _]{sum:tp}`, also where it has more dimensions than its
/// tensor.
pub(crate) fn sharding_text(sharding: &Sharding, rank: usize, mesh: &Mesh) -> String {
    let rank = sharding
        .cuts()
        .fold(rank, |rank, (dim, _)| rank.max(dim + 1));
    ShardingSpec::of(sharding, mesh, rank).to_string()
}
