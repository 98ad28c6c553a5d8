//! Tensors that gradients are computed for, and what may be asked of them.

use super::{
    no_grad,
    tape::{Edge, HookHandle, Mode},
};
use crate::{Error, NoGradient, Result, Tensor, tensor::plain};
use std::sync::Arc;

impl Tensor {
    /// The same values as a leaf that gradients are computed for. Floats only.
    #[track_caller]
    pub fn require_grad(&self) -> Result<Tensor> {
        if !self.dtype().is_float() {
            return Err(Error::DType {
                op: "require_grad",
                dtype: self.dtype(),
                expected: "floats: integers and bools have no gradient",
            });
        }
        let mut leaf = self.clone();
        leaf.attach(Edge::leaf(self));
        Ok(leaf)
    }

    /// Whether ops on this tensor are recorded.
    pub fn requires_grad(&self) -> bool {
        self.edge().is_some()
    }

    /// Whether [`require_grad`](Self::require_grad) made it, and not an op.
    pub fn is_leaf(&self) -> bool {
        self.edge().is_some_and(|edge| edge.node.is_leaf())
    }

    /// Changes a parameter: `f` computes its new values, without recording, and the variable
    /// becomes a parameter with them. What [`with_values`](Self::with_values) says holds for it;
    /// where `f` fails the variable stays as it was.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let mut w = Tensor::new(3f32, &device)?.require_grad()?;
    /// for _ in 0..50 {
    ///     let grads = w.square()?.backward()?;
    ///     w.update(|w| w.sub(&grads.of(w)?.mul(0.1)?))?;
    /// }
    /// assert!(w.item()?.to_f64().abs() < 1e-3);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn update(&mut self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<()> {
        let values = no_grad(|| f(self))?;
        *self = self.with_values(&values)?;
        Ok(())
    }

    /// A tensor like this one with other values of its shape: rounded to its dtype, in its
    /// sharding, and a leaf with the same hooks if this is one. The values' own past is left
    /// behind. For optimizers that compute several tensors at once; see [`update`](Self::update).
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let w = Tensor::zeros([2], DType::BF16, &device)?.require_grad()?;
    /// let next = w.with_values(&Tensor::ones([2], DType::F32, &device)?)?;
    /// assert!(next.is_leaf() && next.dtype() == DType::BF16);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn with_values(&self, values: &Tensor) -> Result<Tensor> {
        self.taking(values.clone())
    }

    /// [`with_values`](Self::with_values) of values that the caller does not need: they become the
    /// tensor, and nothing is described a second time.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let w = Tensor::new(&[1f32, 2.0], &device)?.require_grad()?;
    /// let next = w.taking(Tensor::new(&[3f32, 4.0], &device)?)?;
    /// assert!(next.is_leaf() && next.to_vec::<f32>()? == [3.0, 4.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn taking(&self, values: Tensor) -> Result<Tensor> {
        let op = "with_values";
        let edge = self.edge();
        if let Some(edge) = edge.filter(|edge| !edge.node.is_leaf()) {
            let detail = format!(
                "{} is the result of `{}` at {} and would lose its past: use the new values as they are, or `detach()` it first",
                self.type_string(),
                edge.node.op,
                edge.node.caller
            );
            return Err(Error::gradient(op, NoGradient::Detached, detail).of([self]));
        }
        let is_plain = plain(op, &[self, &values])?;
        if values.shape() != self.shape() {
            let detail = format!(
                "{} cannot take the values of {}",
                self.type_string(),
                values.type_string()
            );
            return Err(Error::shape(op, [self, &values], detail));
        }
        if values.dtype() != self.dtype() && !(self.dtype().is_float() && values.dtype().is_float())
        {
            return Err(Error::DType {
                op,
                dtype: values.dtype(),
                expected: "the dtype of the tensor, or floats for floats",
            });
        }
        let _off = Mode::Off.enter();
        let mut next = values.without_past();
        if next.dtype() != self.dtype() {
            next = next.cast(self.dtype())?;
        }
        if !is_plain {
            next = next.reshard(self.sharding().whole())?;
        }
        if let Some(edge) = edge {
            next.attach(edge.renewed(&next));
        }
        Ok(next)
    }

    /// Has passes keep the gradient of this tensor although it is the result of an op, so that
    /// [`Gradients::of`](super::Gradients::of) finds it. Those of leaves are kept anyway.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(3f32, &device)?.require_grad()?;
    /// let y = x.square()?;
    /// y.retain_grad()?;
    /// let grads = y.mul(5.0)?.backward()?;
    /// assert_eq!(grads.of(&y)?.to_vec::<f32>()?, [5.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn retain_grad(&self) -> Result<()> {
        let edge = self.watchable("retain_grad", "there is no gradient to keep")?;
        edge.node.retain(edge.slot);
        Ok(())
    }

    /// Has `hook` see the gradient of this tensor when it is complete, in every pass, and replace
    /// it where it returns another one. The hooks of a parameter stay with it when it is
    /// [updated](Self::update).
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(2f32, &device)?.require_grad()?;
    /// let hook = x.on_gradient(|g| g.clip(-1, 1).map(Some))?;
    /// assert_eq!(x.pow(3.0)?.backward()?.of(&x)?.to_vec::<f32>()?, [1.0]);
    /// hook.remove();
    /// assert_eq!(x.pow(3.0)?.backward()?.of(&x)?.to_vec::<f32>()?, [12.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn on_gradient(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let edge = self.watchable("on_gradient", "nothing would ever call the hook")?;
        Ok(edge.node.add_hook(edge.slot, Arc::new(hook)))
    }

    /// Where it came from, if gradients flow there.
    fn watchable(&self, op: &'static str, otherwise: &str) -> Result<&Edge> {
        self.edge().ok_or_else(|| {
            Error::gradient(
                op,
                NoGradient::Untracked,
                format!("{} is not tracked: {otherwise}", self.type_string()),
            )
            .of([self])
        })
    }
}
