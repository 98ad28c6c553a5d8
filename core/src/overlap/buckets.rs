//! Reductions that go on beside a backward pass, several small ones as one.

use super::{Coming, Shipment};
use crate::{
    Result, Sharding, Tensor,
    ledger::Ledgers,
    reshard::{Begin, Ready},
    scoped::Scoped,
};
use std::{cell::RefCell, collections::VecDeque, sync::Arc};

/// How a backward pass reduces the gradients of parameters while it goes on, where the
/// [transport](crate::transport::Transport::overlaps) works beside the program.
///
/// A gradient that is complete and smaller than a bucket waits there until the bucket is full; then
/// all that it holds is sent as one, because every call costs time however little it sends. A
/// larger one is sent at once and as it is. The order is that in which gradients become complete,
/// and values have the same bits as if each were sent by itself.
///
/// ```
/// # use anymesh_core::{Mesh, DType, Tensor, grad::{Buckets, with_buckets}, transport::{Background, InProcess}};
/// # use std::sync::Arc;
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2", &device)?.with_transport(Background::new(Arc::new(InProcess)));
/// let w = Tensor::ones([4, 4], DType::F32, (&mesh, "[@dp, _]"))?.require_grad()?;
/// let x = Tensor::ones([8, 4], DType::F32, (&mesh, "[@dp, _]"))?;
/// let loss = x.matmul(&w)?.sum(&[], false)?;
/// let small = Buckets { bytes: 1 << 20, ..Buckets::default() };
/// let grads = with_buckets(small, || loss.backward())?;
/// assert_eq!(grads.of(&w)?.to_vec::<f32>()?, [8.0; 16]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// What a bucket holds before it is sent, in bytes of the rank that holds most. All buckets
    /// that are being filled hold no more than this together. With 0 each gradient goes by itself.
    ///
    /// A call costs some tens of microseconds, in which a fast link carries a few MiB: well above
    /// that little is lost to calls. Far above it the last bucket, behind which there is nothing
    /// left to compute, takes long. So the default is 25 MiB.
    pub bytes: u64,
    /// How much may be on its way, as gradients that are not reduced yet: the pass waits for the
    /// oldest before it sends more. The default is 100 MiB.
    pub in_flight: u64,
    /// Whether sums over ranks that hold a parameter whole are added up in the pass too, instead of
    /// by [`Gradients::of`](crate::grad::Gradients::of): for steps of one batch, or the last of
    /// several micro-batches. Gradients that are added before they are reduced are reduced once.
    pub whole: bool,
}

impl Default for Buckets {
    fn default() -> Self {
        Self {
            bytes: 25 << 20,
            in_flight: 100 << 20,
            whole: false,
        }
    }
}

thread_local! {
    static BUCKETS: RefCell<Buckets> = RefCell::new(Buckets::default());
}

/// Runs `f` with other [buckets](Buckets). It holds on this thread until `f` returns or panics;
/// other threads take it along with a [`Context`](crate::Context). Processes must agree on it.
pub fn with_buckets<T>(buckets: Buckets, f: impl FnOnce() -> T) -> T {
    let _scope = enter(buckets);
    f()
}

/// Those of this thread.
pub(crate) fn capture() -> Buckets {
    BUCKETS.with_borrow(|buckets| *buckets)
}

/// Until it is dropped, other ones.
pub(crate) fn enter(buckets: Buckets) -> Scoped<Buckets> {
    Scoped::set(&BUCKETS, buckets)
}

/// Reductions that will go as one.
struct Bucket<K> {
    keys: Vec<K>,
    readies: Vec<Ready>,
    bytes: u64,
    /// On whose behalf the last one came.
    of: Ledgers,
}

/// Reductions under way, by what they are for.
pub(crate) struct Reductions<K> {
    options: Buckets,
    /// Being filled, the oldest first.
    filling: Vec<Bucket<K>>,
    sent: Vec<(K, Coming)>,
    flying: VecDeque<(Arc<Shipment>, u64)>,
}

impl<K: PartialEq> Reductions<K> {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self {
            options: capture(),
            filling: vec![],
            sent: vec![],
            flying: VecDeque::new(),
        }
    }

    /// Takes a tensor into a sharding: it is returned where it is there already, or else comes
    /// later.
    #[track_caller]
    pub(crate) fn reduce(&mut self, key: K, x: Tensor, to: &Sharding) -> Result<Option<Tensor>> {
        let ready = match Begin::to(&x, to)? {
            Begin::There(tensor) => return Ok(Some(tensor)),
            Begin::Ready(ready) => ready,
        };
        drop(x);
        let bytes = ready.held_bytes();
        let goes = |bucket: &Bucket<K>| bucket.readies[0].goes_with(&ready);
        let alone = bytes >= self.options.bytes || !ready.is_packable();
        let found = self.filling.iter().position(goes).filter(|_| !alone);
        let mut bucket = match found {
            Some(at) => self.filling.remove(at),
            None => Bucket {
                keys: vec![],
                readies: vec![],
                bytes: 0,
                of: Ledgers::none(),
            },
        };
        bucket.keys.push(key);
        bucket.readies.push(ready);
        bucket.bytes += bytes;
        bucket.of = Ledgers::none();
        if alone || bucket.bytes >= self.options.bytes {
            self.send(bucket)?;
            return Ok(None);
        }
        match found {
            Some(at) => self.filling.insert(at, bucket),
            None => self.filling.push(bucket),
        }
        // The oldest makes room.
        let held = |all: &[Bucket<K>]| all.iter().map(|b| b.bytes).sum::<u64>();
        while held(&self.filling) > self.options.bytes {
            let oldest = self.filling.remove(0);
            self.send(oldest)?;
        }
        Ok(None)
    }

    fn send(&mut self, bucket: Bucket<K>) -> Result<()> {
        let _scope = bucket.of.enter();
        let flying = |all: &VecDeque<(Arc<Shipment>, u64)>| all.iter().map(|f| f.1).sum::<u64>();
        while let Some((oldest, _)) = self.flying.front()
            && (oldest.is_done() || flying(&self.flying) + bucket.bytes > self.options.in_flight)
        {
            oldest.wait()?;
            self.flying.pop_front();
        }
        let shipment = Shipment::start(bucket.readies)?;
        for (i, key) in bucket.keys.into_iter().enumerate() {
            self.sent.push((key, Coming::Shipped(shipment.clone(), i)));
        }
        self.flying.push_back((shipment, bucket.bytes));
        Ok(())
    }

    /// Sends all that still waits to be.
    fn flush(&mut self) -> Result<()> {
        let filling = std::mem::take(&mut self.filling);
        filling.into_iter().try_for_each(|bucket| self.send(bucket))
    }

    /// Waits for one of them; nothing where there is none.
    pub(crate) fn take(&mut self, key: &K) -> Result<Option<Tensor>> {
        if self.filling.iter().any(|bucket| bucket.keys.contains(key)) {
            self.flush()?;
        }
        let found = self.sent.iter().position(|(k, _)| k == key);
        found.map(|at| self.sent.remove(at).1.wait()).transpose()
    }

    /// All of them, sent; an error where one has failed already.
    pub(crate) fn finish(mut self) -> Result<Vec<(K, Coming)>> {
        self.flush()?;
        for (shipment, _) in self.flying.iter().filter(|(s, _)| s.is_done()) {
            shipment.wait()?;
        }
        Ok(self.sent)
    }
}
