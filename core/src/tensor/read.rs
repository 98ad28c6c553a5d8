//! Values of tensors on the host.

use crate::{
    DType, Device, Dry, Element, Error, NoGradient, Result, Scalar, Tensor, transport::told,
    wait::wait,
};

impl Tensor {
    /// Its values on one device, without a past: what is read. A future would not know who called,
    /// so this is done before there is one.
    #[track_caller]
    fn to_read(&self) -> Result<Self> {
        Dry::check("reading values")?;
        if self.is_plain() || self.numel() == 0 {
            Ok(self.detach())
        } else {
            self.detach().full_tensor()
        }
    }

    /// The stored bytes in row-major order. This is where faults of earlier kernels surface.
    #[track_caller]
    pub fn to_bytes_async(&self) -> impl Future<Output = Result<Vec<u8>>> + use<> {
        let (whole, mesh) = (self.to_read(), self.mesh().clone());
        async move { told(&mesh, None, whole?.read().await) }
    }

    /// The stored bytes of what was gathered.
    async fn read(&self) -> Result<Vec<u8>> {
        if self.numel() == 0 {
            // There is nothing to read but what went wrong.
            self.device().sync_async().await?;
            return Ok(Vec::new());
        }
        let dense = {
            let _unseen = crate::observe::unseen();
            self.contiguous()?
        };
        let view = dense.view()?;
        let size = self.dtype().size();
        let start = view.layout.offset * size;
        let _reading = crate::profile::reading(self.numel() * size);
        self.device()
            .backend()
            .download(&view.buffer, start..start + self.numel() * size)
            .await
    }

    /// The elements in row-major order. `T` must be the tensor's dtype; cast first to convert.
    #[track_caller]
    pub fn to_vec_async<T: Element>(&self) -> impl Future<Output = Result<Vec<T>>> + use<T> {
        let whole = if T::DTYPE == self.dtype() {
            self.to_read()
        } else {
            Err(Error::DType {
                op: "to_vec",
                dtype: self.dtype(),
                expected: T::DTYPE.name(),
            })
        };
        let mesh = self.mesh().clone();
        async move {
            let bytes = told(&mesh, None, whole?.read().await)?;
            Ok(T::from_bytes(&bytes))
        }
    }

    /// The stored bytes in row-major order.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        wait("to_bytes", self.to_bytes_async())
    }

    /// Writes the stored bytes in row-major order to memory that is there already, which has
    /// exactly their size.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::arange(0, 6, 1, DType::U8, &device)?.reshape([2, 3])?.transpose(0, 1)?;
    /// let mut bytes = [0; 6];
    /// x.copy_bytes(&mut bytes)?;
    /// assert_eq!(bytes, [0, 3, 1, 4, 2, 5]);
    /// assert!(x.copy_bytes(&mut [0; 7]).is_err());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn copy_bytes(&self, out: &mut [u8]) -> Result<()> {
        let size = self.dtype().size();
        if out.len() != self.numel() * size {
            let detail = format!(
                "{} has {} bytes, the memory has {}",
                self.type_string(),
                self.numel() * size,
                out.len()
            );
            return Err(Error::argument("copy_bytes", "out", detail).of([self]));
        }
        Dry::check("reading values")?;
        let in_place = if self.is_plain() {
            self.shard()
                .buffer
                .as_ref()
                .and_then(|b| self.device().backend().in_place(b))
        } else {
            None
        };
        let Some(bytes) = in_place.filter(|_| !out.is_empty()) else {
            out.copy_from_slice(&self.to_bytes()?);
            return Ok(());
        };
        let (run, first) = self.shard().layout.runs();
        for (to, at) in out.chunks_exact_mut(run * size).zip(first.positions()) {
            to.copy_from_slice(&bytes[at * size..(at + run) * size]);
        }
        Ok(())
    }

    /// The elements in row-major order. `T` must be the tensor's dtype; cast first to convert.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        wait("to_vec", self.to_vec_async())
    }

    /// The only element, of any dtype.
    #[track_caller]
    pub fn item_async(&self) -> impl Future<Output = Result<Scalar>> + use<> {
        let whole = if self.numel() == 1 {
            self.to_read()
        } else {
            Err(Error::shape(
                "item",
                [self],
                format!(
                    "{} has {} elements, exactly one is needed",
                    self.type_string(),
                    self.numel()
                ),
            ))
        };
        let mesh = self.mesh().clone();
        async move { told(&mesh, None, whole?.only_element().await) }
    }

    /// The element of a plain tensor that has one.
    async fn only_element(&self) -> Result<Scalar> {
        let x = self.cast(self.dtype().kind().dtype())?;
        Ok(match x.dtype() {
            DType::Bool => Scalar::Bool(x.to_vec_async::<bool>().await?[0]),
            DType::I64 => Scalar::Int(x.to_vec_async::<i64>().await?[0]),
            DType::F64 => Scalar::Float(x.to_vec_async::<f64>().await?[0]),
            DType::U32 => x.to_vec_async::<u32>().await?[0].into(),
            DType::I32 => x.to_vec_async::<i32>().await?[0].into(),
            _ => x.to_vec_async::<f32>().await?[0].into(),
        })
    }

    /// The only element, of any dtype.
    #[track_caller]
    pub fn item(&self) -> Result<Scalar> {
        wait("item", self.item_async())
    }

    /// The same values on another device, through the host.
    pub async fn to_device_async(&self, device: &Device) -> Result<Self> {
        if device == self.device() && self.is_plain() {
            return Ok(self.clone());
        }
        if crate::grad::is_recording(&[self]) {
            let detail = "a tracked tensor cannot be moved while waiting: `detach()` it first, or use `to_mesh`";
            return Err(
                Error::gradient("to_device", NoGradient::NotDifferentiable, detail).of([self]),
            );
        }
        Self::from_bytes(
            &self.to_bytes_async().await?,
            self.dtype(),
            self.shape(),
            device,
        )
    }
}
