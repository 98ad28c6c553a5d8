//! What a mapping must yield, found element by element: no regions, no pieces, none of the code
//! that is tested.

use anymesh_checkpoint::map::{Derivation, Expr};
use anymesh_checkpoint::{Memory, Result, Source, TensorInfo};
use anymesh_core::{DType, F8E4M3, F8E5M2, Region, bf16, f16};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Values that every float type holds: three significant bits. So no cast between floats changes
/// one, and an inverse must lead back to the same bytes.
const VALUES: [f64; 17] = [
    0.0, 1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0, 10.0, -12.0, 14.0, 16.0, 20.0, 24.0, 28.0, 0.25,
];

/// The tensors that mappings are applied to: layers, experts, heads, optimizer states, a scalar,
/// one without elements, whole numbers.
const TENSORS: [(&str, DType, &[usize]); 26] = [
    ("a", DType::F32, &[4, 4]),
    ("b", DType::F32, &[4, 4]),
    ("c", DType::BF16, &[4, 6]),
    ("d", DType::F16, &[2, 3, 4]),
    ("e", DType::F64, &[12]),
    ("f", DType::F8E4M3, &[6, 2]),
    ("g", DType::F8E5M2, &[3, 4]),
    ("i", DType::I32, &[4, 4]),
    ("u", DType::U8, &[24]),
    ("s", DType::F32, &[]),
    ("z", DType::F32, &[0, 4]),
    ("q", DType::F32, &[2, 8]),
    ("k", DType::F32, &[2, 4]),
    ("v", DType::F32, &[2, 4]),
    ("qkv", DType::F32, &[2, 16]),
    ("l.0.w", DType::F32, &[4, 4]),
    ("l.1.w", DType::F32, &[4, 4]),
    ("l.10.w", DType::F32, &[4, 4]),
    ("m.0.x.0", DType::F32, &[2, 2]),
    ("m.0.x.1", DType::F32, &[2, 2]),
    ("m.1.x.0", DType::F32, &[2, 2]),
    ("p_0", DType::BF16, &[3]),
    ("p_1", DType::BF16, &[3]),
    ("a.w_0", DType::F32, &[4, 4]),
    ("b.w_0", DType::F32, &[4, 4]),
    ("a.beta1_pow_acc_0", DType::F32, &[1]),
];

/// Those tensors, shared by all runs.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(&'static Memory);

impl Fixed {
    pub fn get() -> Self {
        static MEMORY: OnceLock<Memory> = OnceLock::new();
        Self(MEMORY.get_or_init(|| {
            let mut memory = Memory::default();
            for (name, dtype, shape) in TENSORS {
                let info = TensorInfo {
                    dtype,
                    shape: shape.to_vec(),
                };
                let bytes = (0..info.numel())
                    .flat_map(|at| encode(value(name, at), dtype))
                    .collect();
                memory
                    .insert(name, info, bytes)
                    .expect("as many bytes as it says");
            }
            memory
        }))
    }
}

impl Source for Fixed {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.0.tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.0.read(name, region, out)
    }
}

/// The element at a flat position of a tensor.
fn value(name: &str, at: usize) -> f64 {
    let first: usize = name.bytes().map(usize::from).sum();
    VALUES[(at * 7 + first) % VALUES.len()].abs()
}

fn encode(x: f64, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F8E4M3 => vec![F8E4M3::from_f32(x as f32).0],
        DType::F8E5M2 => vec![F8E5M2::from_f32(x as f32).0],
        DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::U32 => (x as u32).to_le_bytes().to_vec(),
        DType::I64 => (x as i64).to_le_bytes().to_vec(),
        DType::U8 => vec![x as u8],
        DType::Bool => vec![u8::from(x != 0.0)],
    }
}

/// What one of the values is in another type.
fn held(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::Bool => f64::from(u8::from(x != 0.0)),
        _ if dtype.is_float() => x,
        _ => x.trunc(),
    }
}

/// The bytes of a region; `None` where that takes more than `steps`.
pub fn bytes(expr: &Expr, part: &Region, steps: &mut usize) -> Option<Vec<u8>> {
    let mut out = vec![];
    for flat in 0..part.numel() {
        let at = unflatten(flat, &part.shape)
            .iter()
            .zip(&part.start)
            .map(|(i, start)| i + start)
            .collect();
        let (name, flat, types) = origin(expr, at, steps)?;
        let x = types.into_iter().rev().fold(value(name, flat), held);
        out.extend(encode(x, expr.info.dtype));
    }
    Some(out)
}

/// The source tensor and the flat position in it that an element comes from, and the types it has
/// on the way, the first last.
fn origin<'e>(
    mut expr: &'e Expr,
    mut at: Vec<usize>,
    steps: &mut usize,
) -> Option<(&'e str, usize, Vec<DType>)> {
    let mut types = vec![];
    loop {
        *steps = steps.checked_sub(1)?;
        match &expr.derivation {
            Derivation::Source(name) => {
                types.push(expr.info.dtype);
                return Some((name, flatten(&at, &expr.info.shape), types));
            }
            Derivation::Cast(of) => {
                types.push(expr.info.dtype);
                expr = of;
            }
            Derivation::Slice { of, start } => {
                at.iter_mut().zip(start).for_each(|(i, first)| *i += first);
                expr = of;
            }
            Derivation::Concat { parts, axis } => {
                let mut parts = parts.iter();
                expr = loop {
                    *steps = steps.checked_sub(1)?;
                    let part = parts.next().expect("an element of one of the parts");
                    match at[*axis].checked_sub(part.info.shape[*axis]) {
                        Some(rest) => at[*axis] = rest,
                        None => break part,
                    }
                };
            }
            Derivation::Permute { of, order } => {
                let mut inner = vec![0; order.len()];
                order.iter().zip(&at).for_each(|(d, i)| inner[*d] = *i);
                (expr, at) = (of, inner);
            }
            Derivation::Reshape(of) => {
                at = unflatten(flatten(&at, &expr.info.shape), &of.info.shape);
                expr = of;
            }
        }
    }
}

fn flatten(at: &[usize], shape: &[usize]) -> usize {
    at.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i)
}

fn unflatten(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut out = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        (out[d], flat) = (flat % shape[d], flat / shape[d]);
    }
    out
}
