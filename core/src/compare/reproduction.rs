//! An op alone, with what it read and gave.

use super::{Difference, Given, Tolerance, judge::Judge, value};
use crate::{DType, Error, IntoSharding, Mesh, OperandType, Result, Shape, Tensor};
use serde_json::Value as Json;

/// A tensor that was written down: whole, and how it lay.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Shape,
    /// How it lay on the mesh of the second run, such as `[@dp, _]{sum:tp}`; empty where that was a
    /// single device, or is not known.
    pub sharding: String,
    /// Its elements, row-major and little-endian.
    pub bytes: Vec<u8>,
}

impl Saved {
    pub(super) fn of(x: &Tensor) -> Result<Self> {
        let whole = value::Value::of(x, &value::parts(x)?);
        Ok(Self {
            dtype: whole.dtype,
            shape: whole.shape,
            sharding: OperandType::from(x).sharding,
            bytes: whole.bytes,
        })
    }

    /// The tensor on a mesh, as it lay there; plain on a single device.
    pub fn place(&self, mesh: &Mesh) -> Result<Tensor> {
        let shape = self.shape.clone();
        if mesh.is_single() || self.sharding.is_empty() {
            return Tensor::from_bytes(&self.bytes, self.dtype, shape, mesh);
        }
        let sharding = self.sharding.as_str().into_sharding(mesh, shape.rank())?;
        sharding.check(mesh, shape.rank())?;
        Tensor::from_bytes(&self.bytes, self.dtype, shape, (mesh, &sharding))
    }
}

/// The op at which two runs parted, with all it takes to call it alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Reproduction {
    /// The op.
    pub op: String,
    /// Which of its values differed.
    pub given: Given,
    /// The line that called it.
    pub caller: String,
    /// What it was told beside its operands, by the op's own names for it, as far as that is known.
    pub attributes: Json,
    /// Its operands, in the order in which it takes them; those that it was not given are not there.
    pub operands: Vec<Saved>,
    /// The gradients of its results, where the gradient of an operand differed.
    pub gradients: Vec<Saved>,
    /// What the first run had.
    pub expected: Saved,
    /// What the second had.
    pub found: Saved,
    /// Where the first ran, in words.
    pub a: String,
    /// Where the second ran, in words.
    pub b: String,
    /// The axes of the second run's mesh, such as `dp=2, tp=2`; empty for a single device.
    pub mesh: String,
    /// How far apart values may be.
    pub tolerance: Tolerance,
}

impl Reproduction {
    /// How a value that the op gave again differs from what it should be.
    pub fn judge(&self, again: &Tensor) -> Result<Option<Difference>> {
        let Saved {
            dtype,
            shape,
            bytes,
            ..
        } = &self.expected;
        if again.dtype() != *dtype || again.shape() != shape {
            let detail = format!(
                "the op gave {}, and the run it is from {dtype}{shape}: it was called in another way",
                again.type_string()
            );
            return Err(Error::argument("replay", "attributes", detail).of([again]));
        }
        let expected = value::Value {
            dtype: *dtype,
            shape: shape.clone(),
            bytes: bytes.clone(),
        };
        let judge = Judge {
            tolerance: self.tolerance,
            least_scale: &|| 0.0,
        };
        Ok(judge.difference(&expected, &value::parts(again)?))
    }
}

/// The axes of a mesh, as they are written.
pub(super) fn axes_of(mesh: &Mesh) -> String {
    let axes: Vec<String> = (mesh.axes().iter())
        .map(|(name, size)| format!("{name}={size}"))
        .collect();
    axes.join(", ")
}
