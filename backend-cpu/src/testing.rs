//! Helpers of this crate's tests: operands of any dtype and layout, and their values as `f64`.

use crate::{
    element::{Held, Stored, with_stored},
    memory::{Memory, bytes_of, typed},
};
use anymesh_kernel::{Buffer, DType, Layout, Scalar, Shape, View};

/// `n` reproducible values in [-4, 4); with `whole`, integers.
pub(crate) fn random(n: usize, seed: u64, whole: bool) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f64 / (1u64 << 21) as f64 - 4.0;
            if whole { value.floor() } else { value }
        })
        .collect()
}

/// Memory with these values as `dtype`.
pub(crate) fn upload(values: &[f64], dtype: DType) -> Buffer {
    let mut memory = Memory::new(values.len() * dtype.size()).expect("small");
    with_stored!(dtype, S => {
        let out = memory.typed_mut::<S>();
        out.iter_mut().zip(values).for_each(|(out, v)| *out = S::store(<S as Stored>::Held::from_scalar(Scalar::Float(*v))));
    });
    memory.buffer()
}

/// The values of a whole buffer.
#[allow(clippy::unnecessary_cast)]
pub(crate) fn read(buffer: &Buffer, dtype: DType) -> Vec<f64> {
    with_stored!(dtype, S => typed::<S>(bytes_of(buffer).expect("own")).iter().map(|v| v.load() as f64).collect())
}

/// A dense operand.
pub(crate) fn dense_view(values: &[f64], dtype: DType, shape: impl Into<Shape>) -> View {
    let layout = Layout::contiguous(shape.into());
    assert_eq!(layout.shape.numel(), values.len());
    View {
        buffer: upload(values, dtype),
        dtype,
        layout,
    }
}

/// The operand's values in row-major order.
pub(crate) fn values(view: &View) -> Vec<f64> {
    let all = read(&view.buffer, view.dtype);
    view.layout.positions().map(|at| all[at]).collect()
}

/// Operands of one shape with random values that lie in memory in every way a view can.
pub(crate) fn views(shape: &[usize], dtype: DType, seed: u64, whole: bool) -> Vec<View> {
    let rank = shape.len();
    let make = |memory: Vec<usize>, layout: &dyn Fn(Layout) -> Layout| {
        let base = Layout::contiguous(memory.into());
        View {
            buffer: upload(&random(base.shape.numel(), seed, whole), dtype),
            dtype,
            layout: layout(base),
        }
    };
    let mut out = vec![make(shape.to_vec(), &|l| l)];
    if rank == 0 {
        return out;
    }
    let reversed: Vec<usize> = shape.iter().rev().copied().collect();
    out.push(make(reversed, &|l| {
        l.permute(&(0..rank).rev().collect::<Vec<_>>())
    }));
    out.push(make(shape.iter().map(|d| 2 * d + 1).collect(), &|l| {
        (0..rank).fold(l, |l, axis| l.slice(axis, 1, 2, shape[axis]))
    }));
    out.push(make(shape.to_vec(), &|l| {
        (0..rank).fold(l, |l, axis| l.slice(axis, shape[axis] - 1, -1, shape[axis]))
    }));
    for axis in 0..rank {
        let mut memory = shape.to_vec();
        memory[axis] = 1;
        out.push(make(memory, &|l| l.expand(&shape.into())));
    }
    out
}

/// Every position of a shape, in row-major order.
pub(crate) fn coordinates(shape: &[usize]) -> Vec<Vec<usize>> {
    let layout = Layout::contiguous(shape.into());
    let strides = layout.strides.clone();
    (0..layout.shape.numel())
        .map(|i| {
            strides
                .iter()
                .zip(shape)
                .map(|(s, n)| i / *s as usize % n)
                .collect()
        })
        .collect()
}

/// Fails where two lists differ by more than `tolerance` relative to the larger of 1 and the
/// expected value.
pub(crate) fn assert_close(got: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let equal =
            g == e || (g.is_nan() && e.is_nan()) || (g - e).abs() <= tolerance * e.abs().max(1.0);
        assert!(equal, "{what}: element {i} is {g}, expected {e}");
    }
}
