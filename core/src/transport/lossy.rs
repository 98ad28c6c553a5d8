//! A transport that loses reductions on purpose.

use super::{Message, Part, Transport};
use crate::{Mesh, Reduction, Result, Tensor, split};
use std::{fmt, sync::Arc};

/// A transport around another that does not add up what `loses` says: ranks keep their own terms, as
/// a program would that forgot a reduction. It is asked with the name of each, `all_reduce` or
/// `reduce_scatter`, in the order of the program.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, transport::{InProcess, Lossy}};
/// # use std::sync::Arc;
/// # let device = anymesh_backend_cpu::device();
/// let lossy = Lossy::new(Arc::new(InProcess), |_| true);
/// let mesh = Mesh::new("tp=2", &device)?.with_transport(Arc::new(lossy));
/// let x = Tensor::ones([4], DType::F32, (&mesh, "[@tp]"))?;
/// assert_eq!(x.sum_all()?.reshard("[]")?.item()?.to_f64(), 2.0);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub struct Lossy<F> {
    inner: Arc<dyn Transport>,
    loses: F,
}

impl<F: Fn(&'static str) -> bool + Send + Sync> Lossy<F> {
    /// The inner transport without these reductions.
    pub fn new(inner: Arc<dyn Transport>, loses: F) -> Self {
        Self { inner, loses }
    }
}

impl<F> fmt::Debug for Lossy<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lossy({:?})", self.inner)
    }
}

impl<F: Fn(&'static str) -> bool + Send + Sync> Transport for Lossy<F> {
    fn name(&self) -> &str {
        "lossy"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.inner.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.inner.barrier(mesh, group)
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        match (self.loses)("all_reduce") {
            true => Ok(parts.iter().map(|part| part.data.clone()).collect()),
            false => self.inner.all_reduce(mesh, parts, reduction),
        }
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        if !(self.loses)("reduce_scatter") {
            return self.inner.reduce_scatter(mesh, parts, reduction, dim);
        }
        let own = |(i, part): (usize, &Part)| {
            let Some(data) = &part.data else {
                return Ok(None);
            };
            let range = split(data.dims()[dim], i, parts.len());
            let piece = data.narrow(dim as i64, range.start, range.len())?;
            piece.contiguous().map(Some)
        };
        parts.iter().enumerate().map(own).collect()
    }
}
