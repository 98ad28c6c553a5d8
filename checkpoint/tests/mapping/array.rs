//! The reference: tensors that are held whole, and loops over their elements.

use anymesh_checkpoint::{Memory, Result, Source, TensorInfo};
use anymesh_core::{DType, F8E4M3, F8E5M2, Region, bf16, f16};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values that every float type holds: three significant bits.
const VALUES: [f64; 17] = [
    0.0, 1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0, 10.0, -12.0, 14.0, 16.0, 20.0, 24.0, 28.0, 0.25,
];

/// A tensor that is held whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
}

impl Array {
    pub(crate) fn counting(dtype: DType, shape: &[usize], first: usize) -> Self {
        let count: usize = shape.iter().product();
        Self {
            dtype,
            shape: shape.to_vec(),
            values: (0..count)
                .map(|i| VALUES[(i * 7 + first) % VALUES.len()])
                .collect(),
        }
    }

    pub(crate) fn info(&self) -> TensorInfo {
        TensorInfo {
            dtype: self.dtype,
            shape: self.shape.clone(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let one = |x: &f64| match self.dtype {
            DType::F8E4M3 => vec![F8E4M3::from_f32(*x as f32).0],
            DType::F8E5M2 => vec![F8E5M2::from_f32(*x as f32).0],
            DType::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(*x).to_le_bytes().to_vec(),
            DType::F32 => (*x as f32).to_le_bytes().to_vec(),
            DType::F64 => x.to_le_bytes().to_vec(),
            DType::I32 => (*x as i32).to_le_bytes().to_vec(),
            other => panic!("{other} is not used here"),
        };
        self.values.iter().flat_map(one).collect()
    }

    /// All positions in row-major order.
    fn positions(shape: &[usize]) -> Vec<Vec<usize>> {
        let mut out = vec![vec![]];
        for n in shape {
            out = out
                .into_iter()
                .flat_map(|at: Vec<usize>| (0..*n).map(move |i| [&at[..], &[i]].concat()))
                .collect();
        }
        out
    }

    fn at(&self, position: &[usize]) -> f64 {
        self.values[position
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (i, n)| flat * n + i)]
    }

    fn build(&self, shape: Vec<usize>, from: impl Fn(&[usize]) -> f64) -> Self {
        let values = Self::positions(&shape).iter().map(|at| from(at)).collect();
        Self {
            dtype: self.dtype,
            shape,
            values,
        }
    }

    pub(crate) fn slice(&self, start: &[usize], shape: &[usize]) -> Self {
        self.build(shape.to_vec(), |at| {
            self.at(&at.iter().zip(start).map(|(a, s)| a + s).collect::<Vec<_>>())
        })
    }

    pub(crate) fn cut(&self, axis: usize, sizes: &[usize]) -> Vec<Self> {
        let mut first = 0;
        let mut out = vec![];
        for size in sizes {
            let (mut start, mut shape) = (vec![0; self.shape.len()], self.shape.clone());
            (start[axis], shape[axis]) = (first, *size);
            out.push(self.slice(&start, &shape));
            first += size;
        }
        out
    }

    pub(crate) fn join(parts: &[Self], axis: usize) -> Self {
        let mut shape = parts[0].shape.clone();
        shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
        parts[0].build(shape, |at| {
            let mut at = at.to_vec();
            for part in parts {
                if at[axis] < part.shape[axis] {
                    return part.at(&at);
                }
                at[axis] -= part.shape[axis];
            }
            unreachable!("inside the joined tensor")
        })
    }

    pub(crate) fn permute(&self, order: &[usize]) -> Self {
        self.build(order.iter().map(|d| self.shape[*d]).collect(), |at| {
            let mut from = vec![0; order.len()];
            order.iter().enumerate().for_each(|(d, o)| from[*o] = at[d]);
            self.at(&from)
        })
    }

    pub(crate) fn reshape(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.values.len());
        Self {
            shape: shape.to_vec(),
            ..self.clone()
        }
    }

    pub(crate) fn cast(&self, dtype: DType) -> Self {
        Self {
            dtype,
            ..self.clone()
        }
    }
}

/// Tensors in memory, and how many elements were read.
pub(crate) struct Counting {
    memory: Memory,
    pub(crate) elements: AtomicUsize,
}

impl Counting {
    pub(crate) fn new(arrays: &BTreeMap<String, Array>) -> Self {
        let mut memory = Memory::default();
        for (name, array) in arrays {
            memory
                .insert(name, array.info(), array.bytes())
                .expect("as many bytes as it says");
        }
        Self {
            memory,
            elements: AtomicUsize::new(0),
        }
    }
}

impl Source for Counting {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.memory.tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.elements.fetch_add(region.numel(), Ordering::Relaxed);
        self.memory.read(name, region, out)
    }
}

pub(crate) fn region(start: &[usize], shape: &[usize]) -> Region {
    Region {
        start: start.iter().copied().collect(),
        shape: shape.iter().copied().collect(),
    }
}

pub(crate) fn arrays<const N: usize>(list: [(&str, Array); N]) -> BTreeMap<String, Array> {
    list.into_iter()
        .map(|(name, array)| (name.to_string(), array))
        .collect()
}
