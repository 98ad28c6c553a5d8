//! Tensors that are brought before an op needs them.

use super::{Coming, Shipment};
use crate::{IntoSharding, Result, Sharding, Tensor, ledger, reshard::Begin};

/// What [`Tensor::prefetch`] brings: the value in another sharding. Ops find it as long as this is
/// there, or a tensor that has its memory.
#[derive(Debug)]
#[must_use = "what is brought goes when this is dropped"]
pub struct Ahead {
    of: Tensor,
    sharding: Sharding,
    coming: Coming,
}

impl Ahead {
    /// Whether it has arrived.
    pub fn is_done(&self) -> bool {
        self.coming.is_done()
    }

    /// The value in the other sharding, without a past, when it is there.
    pub fn wait(&self) -> Result<Tensor> {
        let brought = self.coming.wait()?;
        let form = self.of.in_form(&self.sharding)?;
        Ok(form.unwrap_or(brought))
    }
}

impl Tensor {
    /// Starts to bring the value into another sharding of its mesh, such as a parameter that is cut
    /// to where it is whole, while the program does something else. An op that reads the value then
    /// finds it there, and waits for it if it has to.
    ///
    /// It is at hand for ops from here on, whether or not it has arrived, so what ops decide does
    /// not depend on how fast it comes. Where the [transport](crate::transport::Transport::overlaps)
    /// does nothing beside the program, it is brought at once.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, spmd::Ledger, transport::{Background, InProcess}};
    /// # use std::sync::Arc;
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("dp=2", &device)?.with_transport(Background::new(Arc::new(InProcess)));
    /// let layer = |_| Tensor::ones([64, 64], DType::F32, (&mesh, "[@dp, _]"));
    /// let layers = (0..3).map(layer).collect::<Result<Vec<_>, _>>()?;
    /// let mut x = Tensor::ones([128, 64], DType::F32, (&mesh, "[@dp, _]"))?;
    /// let (result, ledger) = Ledger::record(|| {
    ///     let mut here = Some(layers[0].prefetch("[_, _]")?);
    ///     for (i, w) in layers.iter().enumerate() {
    ///         let next = layers.get(i + 1).map(|w| w.prefetch("[_, _]")).transpose()?;
    ///         x = x.matmul(w)?;
    ///         here = next;
    ///     }
    ///     drop(here);
    ///     Ok::<_, anymesh_core::Error>(())
    /// });
    /// result?;
    /// assert_eq!(ledger.entries.len(), 3, "each is gathered once");
    /// assert!(ledger.entries.iter().all(|e| e.op == "prefetch"));
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn prefetch(&self, sharding: impl IntoSharding) -> Result<Ahead> {
        let sharding = sharding.into_sharding(self.mesh(), self.rank())?;
        sharding.check(self.mesh(), self.rank())?;
        let of = self.detach();
        let _scope = ledger::on_behalf_of("prefetch", self);
        let coming = match Begin::to(&of, &sharding)? {
            Begin::There(tensor) => Coming::There(tensor),
            Begin::Ready(ready) => {
                let shipment = Shipment::start(vec![ready])?;
                of.add_coming_form(&sharding, &shipment);
                Coming::Shipped(shipment, 0)
            }
        };
        Ok(Ahead {
            of,
            sharding,
            coming,
        })
    }
}
