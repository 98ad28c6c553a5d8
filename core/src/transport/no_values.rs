//! Ranks without values: nothing is sent, and everybody answers.

use super::{Message, Transport, check::check_group};
use crate::{Mesh, Result, Tensor};

/// The transport of meshes on devices [without values](crate::meta()).
///
/// What a rank receives has a type and nothing else, so this process answers for every rank of the
/// mesh, also for those that it cannot address. Nobody is waited for, so there is no deadline.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoValues;

impl Transport for NoValues {
    fn name(&self) -> &str {
        "no-values"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let answer = |Message { part, to }: &Message| {
            let at = mesh.position_of(*to);
            at.map(|at| Tensor::placeholder(part.dtype, &part.shape, mesh.local_mesh(at)))
                .transpose()
        };
        messages.iter().try_for_each(|m| m.check(mesh))?;
        messages.iter().map(answer).collect()
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        check_group("barrier", mesh, group.iter().copied())
    }
}
