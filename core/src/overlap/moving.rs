//! Tensors on their way to another mesh.

use crate::{
    IntoSharding, Mesh, Result, Tensor,
    ledger::{Begun, Clock},
    reshard::HandOver,
    transport::Pending,
};
use std::{fmt, time::Duration};

/// A tensor that [`Tensor::start_to_mesh`] takes to another mesh. It gets there whether or not anybody
/// waits for it.
pub struct Moving(State);

enum State {
    There(Tensor),
    Coming {
        pending: Box<dyn Pending>,
        hand_over: Box<HandOver>,
        begun: Begun,
    },
}

impl Moving {
    /// One that is there already.
    pub(crate) fn there(tensor: Tensor) -> Self {
        Self(State::There(tensor))
    }

    /// Begins to send. A process that only sends has nothing to wait for.
    pub(crate) fn start(mut hand_over: HandOver, begun: Begun) -> Result<Self> {
        let clock = Clock::start();
        let pending = hand_over.start()?;
        begun.add(Duration::ZERO, clock.elapsed());
        Ok(Self(match pending {
            Some(pending) => State::Coming {
                pending,
                hand_over: Box::new(hand_over),
                begun,
            },
            None => State::There(hand_over.land(vec![])?),
        }))
    }

    /// Whether nobody would have to wait for it.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            State::There(_) => true,
            State::Coming { pending, .. } => pending.is_done(),
        }
    }

    /// The tensor on the other mesh, when it is there.
    pub fn wait(self) -> Result<Tensor> {
        match self.0 {
            State::There(tensor) => Ok(tensor),
            State::Coming {
                pending,
                hand_over,
                begun,
            } => {
                let clock = Clock::start();
                let arrived = pending.wait()?;
                begun.add(arrived.ran, clock.elapsed());
                let _unseen = crate::observe::unseen();
                hand_over.land(arrived.answer)
            }
        }
    }
}

impl fmt::Debug for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_done() {
            "there"
        } else {
            "on its way"
        };
        write!(f, "Moving({state})")
    }
}

impl Tensor {
    /// Starts to take this tensor to another mesh, as [`to_mesh`](Tensor::to_mesh) does, while the
    /// program does something else: what a stage of a pipeline gives to the next. All processes that
    /// have ranks of one mesh or the other call it, those that send something and those that get
    /// something at the same point among their calls; nobody waits here.
    ///
    /// What is partial is added up first. The result has no past, so gradients do not go back through
    /// it. What is sent is released when it is sent, if nobody else has it. Where the
    /// [transport](crate::transport::Transport::overlaps) does nothing beside the program, the tensor
    /// is there when this returns.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, transport::{Background, InProcess}};
    /// # use std::sync::Arc;
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("pp=2, dp=2", &device)?.with_transport(Background::new(Arc::new(InProcess)));
    /// let (first, second) = (mesh.at("pp", 0)?, mesh.at("pp", 1)?);
    /// let x = Tensor::arange(0, 4, 1, DType::F32, (&first, "[@dp]"))?;
    /// let moving = x.start_to_mesh(&second, "[@dp]")?;
    /// // The program does something else, and then:
    /// assert_eq!(moving.wait()?.shards()[1].1.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn start_to_mesh(&self, mesh: &Mesh, sharding: impl IntoSharding) -> Result<Moving> {
        let sharding = sharding.into_sharding(mesh, self.rank())?;
        sharding.check(mesh, self.rank())?;
        let x = self.detach();
        if x.is_plain() {
            return x.to_mesh(mesh, sharding).map(Moving::there);
        }
        crate::reshard::start_to_mesh(&x, mesh, &sharding)
    }
}
