//! Tensors as bytes of the host: what transports that know nothing of devices send and receive.

use crate::{Buffer, DType, Device, Error, Result, Shape, Tensor};
use anymesh_kernel::{Layout, Receiving};

/// The bytes of a tensor, in row-major order. They are not copied where the host can read them where
/// they are, and stay as long as this does.
#[derive(Debug)]
pub struct Outgoing(Bytes);

#[derive(Debug)]
enum Bytes {
    There {
        device: Device,
        buffer: Buffer,
        start: usize,
        len: usize,
    },
    Copied(Vec<u8>),
}

impl Outgoing {
    /// Of a plain tensor.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        let dense = tensor.contiguous()?;
        let there = dense.memory().and_then(|(buffer, layout)| {
            let (start, len) = (
                layout.offset * dense.dtype().size(),
                dense.numel() * dense.dtype().size(),
            );
            let bytes = dense.device().backend().in_place(buffer)?;
            (bytes.len() >= start + len).then(|| Bytes::There {
                device: dense.device().clone(),
                buffer: buffer.clone(),
                start,
                len,
            })
        });
        Ok(Self(match there {
            Some(there) => there,
            None => Bytes::Copied(dense.to_bytes()?),
        }))
    }
}

/// Bytes that are not those of a tensor.
impl From<Vec<u8>> for Outgoing {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::Copied(bytes))
    }
}

impl AsRef<[u8]> for Outgoing {
    fn as_ref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Copied(bytes) => bytes,
            Bytes::There {
                device,
                buffer,
                start,
                len,
            } => device
                .backend()
                .in_place(buffer)
                .and_then(|bytes| bytes.get(*start..start + len))
                .unwrap_or_default(),
        }
    }
}

/// Where the elements of a plain tensor lie on its device, dense and in row-major order: for
/// transports that move memory of devices. The tensor's memory stays as long as this does.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    /// The memory.
    pub buffer: Buffer,
    /// Where the elements start, in bytes.
    pub start: usize,
    /// How many bytes they take.
    pub bytes: usize,
}

impl DeviceMemory {
    /// Of a plain tensor, which a kernel copies where it is not dense; `None` where it has no
    /// elements.
    pub fn of(tensor: &Tensor) -> Result<Option<Self>> {
        let dense = tensor.contiguous()?;
        let size = dense.dtype().size();
        let of = |(buffer, layout): (&Buffer, &Layout)| {
            Ok(Self {
                buffer: dense.device().backend().resolve(buffer)?,
                start: layout.offset * size,
                bytes: dense.numel() * size,
            })
        };
        dense.memory().map(of).transpose()
    }

    /// The tensor of a buffer that is filled, or will be before any kernel reads it.
    pub fn filled(buffer: Buffer, dtype: DType, shape: Shape, device: &Device) -> Result<Tensor> {
        let bytes = shape.checked_numel("receive")? as u64 * dtype.size() as u64;
        if bytes > buffer.bytes() {
            return Err(Error::argument(
                "receive",
                "buffer",
                format!("{dtype}{shape} does not fit in {} bytes", buffer.bytes()),
            ));
        }
        Ok(Tensor::of_memory(buffer, dtype, shape, device))
    }

    /// A tensor without elements.
    pub fn nothing(dtype: DType, shape: Shape, device: &Device) -> Tensor {
        Tensor::nothing(dtype, shape, device)
    }
}

/// Host memory for a tensor that comes from elsewhere: filled, it becomes the tensor, without
/// another copy where the device's memory is the host's.
#[derive(Debug)]
pub struct Incoming {
    dtype: DType,
    shape: Shape,
    device: Device,
    /// Nothing for a tensor without elements.
    memory: Option<Receiving>,
}

impl Incoming {
    /// For a plain tensor of this type on a device.
    pub fn new(dtype: DType, shape: Shape, device: &Device) -> Result<Self> {
        let elements = shape.checked_numel("receive")?;
        device.check(dtype, elements)?;
        let memory = match elements.checked_mul(dtype.size()) {
            Some(0) => None,
            Some(bytes) => Some(device.receive(bytes)?),
            None => {
                return Err(Error::SizeOverflow {
                    op: "receive",
                    shape: shape.into(),
                });
            }
        };
        Ok(Self {
            dtype,
            shape,
            device: device.clone(),
            memory,
        })
    }

    /// Its bytes, in row-major order, with any contents.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Some(memory) => memory.bytes(),
            None => &mut [],
        }
    }

    /// The tensor, once every byte is written.
    pub fn finish(self) -> Result<Tensor> {
        match self.memory {
            Some(memory) => Ok(Tensor::of_memory(
                memory.finish()?,
                self.dtype,
                self.shape,
                &self.device,
            )),
            None => Ok(Tensor::nothing(self.dtype, self.shape, &self.device)),
        }
    }
}
