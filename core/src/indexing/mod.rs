//! Indexing with NumPy's meaning: [`Tensor::get`], [`Tensor::set`] and [`Tensor::add_at`] with the
//! expressions that [`i!`](crate::i) lists.
//!
//! Everything mixes: integers, slices with any step, `...`, new axes, masks of any rank and integer
//! tensors, which broadcast together. Their dimensions take the place of the axes they index where
//! those entries (integers among them) are neighbours, and come first otherwise.
//!
//! What differs from NumPy:
//! - Tensors are values. Slices and integers give views without copying, but nothing is ever
//!   written through a view: `set` returns a new tensor.
//! - Where a place is set several times, the last value in row-major order of the indices wins, on
//!   every device. `add_at` adds all of them.
//! - Numbers are stored exactly: one that an integer tensor does not hold is an error, as is a
//!   value whose dtype does not promote to the tensor's.
//! - A place outside its axis is [`Error::IndexOutOfRange`](crate::Error::IndexOutOfRange): at once
//!   for an integer, and for an index tensor on a GPU at the next read.
//! - A mask has its number of true elements read from the device: hence the `async` forms, the only
//!   ones in a browser. Setting one value wherever a mask holds reads nothing.
//!
//! ```
//! # use anymesh_core::{DType, Tensor, i};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::zeros([3, 4], DType::I64, &device)?;
//! let x = x.set(i![1.., ..;2], (1i64 << 53) + 1)?;
//! assert_eq!(x.get(i![2])?.to_vec::<i64>()?, [9007199254740993, 0, 9007199254740993, 0]);
//! let twice = Tensor::from_slice(&[0i32, 0], [2], &device)?;
//! let values = Tensor::from_slice(&[7i64, 8], [2], &device)?;
//! assert_eq!(x.set(i![0, &twice], &values)?.get(i![0, 0])?.to_vec::<i64>()?, [8]);
//! assert_eq!(x.add_at(i![0, &twice], &values)?.get(i![0, 0])?.to_vec::<i64>()?, [15]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod get;
mod index;
mod lookups;
mod selection;
mod set;

pub use index::{Index, Position, Span};

use crate::wait::wait;
use crate::{Arg, Result, Tensor, ledger::on_behalf_of_caller};
use lookups::look_up_places;
use selection::Selection;
use set::Mode;
use std::panic::Location;

impl Tensor {
    /// What an index expression selects. Integers, slices and new axes alone give a view.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, i};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::arange(0, 6, 1, DType::I32, &device)?.reshape([2, 3])?;
    /// assert_eq!(x.get(i![.., ..;-2])?.to_vec::<i32>()?, [2, 0, 5, 3]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn get(&self, index: impl AsRef<[Index]>) -> Result<Tensor> {
        wait("get", self.get_async(index))
    }

    /// [`get`](Tensor::get) without waiting: a mask has its number of true elements read from the
    /// device.
    #[track_caller]
    pub fn get_async<I: AsRef<[Index]>>(
        &self,
        index: I,
    ) -> impl Future<Output = Result<Tensor>> + use<I> {
        let (op, caller, x) = ("get", Location::caller(), self.clone());
        let selection = Selection::new(op, x.shape(), index.as_ref());
        async move {
            let selection = selection?;
            let lookups = look_up_places(op, &selection, caller).await?;
            let _scope = on_behalf_of_caller(op, &x, caller);
            get::get(op, &x, &selection, &lookups)
        }
    }

    /// This tensor with a value (a number, or a tensor that expands to the shape of what is
    /// selected) where the index expression selects. Where a place is selected several times the
    /// last value wins.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, i};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::zeros([2, 3], DType::I32, &device)?;
    /// let row = Tensor::from_slice(&[1i32, 2], [2], &device)?;
    /// assert_eq!(x.set(i![.., 1..], &row)?.to_vec::<i32>()?, [0, 1, 2, 0, 1, 2]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn set<'a>(&self, index: impl AsRef<[Index]>, value: impl Into<Arg<'a>>) -> Result<Tensor> {
        wait("set", self.set_async(index, value))
    }

    /// [`set`](Tensor::set) without waiting.
    #[track_caller]
    pub fn set_async<'a, I: AsRef<[Index]>, V: Into<Arg<'a>>>(
        &self,
        index: I,
        value: V,
    ) -> impl Future<Output = Result<Tensor>> + use<'a, I, V> {
        self.write("set", index.as_ref(), value.into(), Mode::Set)
    }

    /// [`set`](Tensor::set) for a variable: it becomes the new tensor. Other handles of the old one
    /// keep it. A tensor that gradients are computed for (see
    /// [`require_grad`](Tensor::require_grad)) is refused: its handle is how the gradient is found.
    #[track_caller]
    pub fn set_<'a>(
        &mut self,
        index: impl AsRef<[Index]>,
        value: impl Into<Arg<'a>>,
    ) -> Result<()> {
        if self.is_leaf() || (self.requires_grad() && !crate::grad::is_recording(&[self])) {
            let detail = "the variable would lose its place on the tape: use `set` and keep both, or `detach()` it first";
            return Err(
                crate::Error::gradient("set_", crate::NoGradient::Detached, detail).of([&*self]),
            );
        }
        *self = self.set(index, value)?;
        Ok(())
    }

    /// This tensor with a value added where the index expression selects, as often as it does.
    #[track_caller]
    pub fn add_at<'a>(
        &self,
        index: impl AsRef<[Index]>,
        value: impl Into<Arg<'a>>,
    ) -> Result<Tensor> {
        wait("add_at", self.add_at_async(index, value))
    }

    /// [`add_at`](Tensor::add_at) without waiting.
    #[track_caller]
    pub fn add_at_async<'a, I: AsRef<[Index]>, V: Into<Arg<'a>>>(
        &self,
        index: I,
        value: V,
    ) -> impl Future<Output = Result<Tensor>> + use<'a, I, V> {
        self.write("add_at", index.as_ref(), value.into(), Mode::Add)
    }

    #[track_caller]
    fn write(
        &self,
        op: &'static str,
        index: &[Index],
        value: Arg<'_>,
        mode: Mode,
    ) -> impl Future<Output = Result<Tensor>> + use<> {
        let (caller, x) = (Location::caller(), self.clone());
        let selection = Selection::new(op, x.shape(), index);
        let value = set::value(op, self, value, mode);
        async move {
            let (selection, value) = (selection?, value?);
            {
                let _scope = on_behalf_of_caller(op, &x, caller);
                if let Some(written) = set::masked(op, &x, &selection, &value, mode)? {
                    return Ok(written);
                }
            }
            let lookups = look_up_places(op, &selection, caller).await?;
            let _scope = on_behalf_of_caller(op, &x, caller);
            set::set(op, &x, &selection, &lookups, &value, mode)
        }
    }
}
