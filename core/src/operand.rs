//! Tensors and shardings as errors tell of them.

use crate::{Mesh, OperandType, Sharding, Tensor, TensorType};

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

/// A sharding by the names of axes, `[@dp, _]{sum:tp}`, also where it does not fit its mesh: an
/// axis that is not there is `?`.
pub(crate) fn sharding_text(sharding: &Sharding, rank: usize, mesh: &Mesh) -> String {
    let name = |axis: usize| mesh.axes().get(axis).map_or("?", |(n, _)| n.as_str());
    let rank = sharding
        .cuts()
        .fold(rank, |rank, (dim, _)| rank.max(dim + 1));
    let dims: Vec<String> = (0..rank)
        .map(|d| match sharding.axes_of(d).next() {
            None => "_".into(),
            Some(_) => sharding
                .axes_of(d)
                .map(|a| format!("@{}", name(a)))
                .collect(),
        })
        .collect();
    let partial: Vec<String> = (sharding.partial())
        .map(|(axis, r)| format!("{}:{}", r.name(), name(axis)))
        .collect();
    let suffix = match partial.is_empty() {
        true => String::new(),
        false => format!("{{{}}}", partial.join(", ")),
    };
    format!("[{}]{suffix}", dims.join(", "))
}
