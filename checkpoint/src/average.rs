//! Running averages of tensors, on the host.

use crate::{
    Error, Result, TensorInfo,
    plan::{Piece, Placed},
    read::runs,
};
use anymesh_core::{DType, F8E4M3, F8E5M2, Region, bf16, f16};
use std::{collections::BTreeMap, sync::Arc};

/// An exponential average of every float tensor.
#[derive(Debug)]
pub(crate) struct Averages {
    decay: f64,
    /// Values of whole tensors, with the shape they are for. A snapshot that is still being written shares them until the next save changes them.
    values: BTreeMap<String, (Vec<usize>, Arc<Vec<f32>>)>,
    /// Tensors that are new in this save: they begin with their own values.
    fresh: Vec<String>,
}

impl Averages {
    pub(crate) fn new(decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::Argument(format!("the decay of an average must be in 0..1, got {decay}")));
        }
        Ok(Self { decay, values: BTreeMap::new(), fresh: vec![] })
    }

    /// Takes a piece of a tensor into the average.
    pub(crate) fn add(&mut self, piece: &Piece, info: &TensorInfo, bytes: &[u8]) {
        if !info.dtype.is_float() {
            return;
        }
        // A tensor of another shape is another tensor.
        if self.values.get(&piece.tensor).is_none_or(|(shape, _)| *shape != info.shape) {
            self.values.insert(piece.tensor.clone(), (info.shape.clone(), Arc::new(vec![0.0; info.numel()])));
            self.fresh.push(piece.tensor.clone());
        }
        let decay = if self.fresh.contains(&piece.tensor) { 0.0 } else { self.decay };
        let Some((_, values)) = self.values.get_mut(&piece.tensor) else { return };
        let (values, new) = (Arc::make_mut(values), floats(bytes, info.dtype));
        for (to, from, n) in runs(&piece.region, &info.whole(), &piece.region, 1) {
            let (to, from, n) = (to as usize, from as usize, n as usize);
            for (average, value) in values[to..to + n].iter_mut().zip(&new[from..from + n]) {
                *average = if decay == 0.0 { *value } else { (decay * f64::from(*average) + (1.0 - decay) * f64::from(*value)) as f32 };
            }
        }
    }

    /// The averages of the tensors of a save, which is complete.
    pub(crate) fn snapshot(&mut self, tensors: &BTreeMap<String, Placed>) -> BTreeMap<String, Arc<Vec<f32>>> {
        self.fresh.clear();
        self.values.retain(|name, _| tensors.contains_key(name));
        self.values.iter().map(|(name, (_, values))| (name.clone(), values.clone())).collect()
    }
}

/// A box of an average, as stored bytes.
pub(crate) fn part(values: &[f32], info: &TensorInfo, region: &Region) -> Vec<u8> {
    let mut out = Vec::with_capacity(region.numel() * 4);
    for (from, _, n) in runs(region, &info.whole(), region, 1) {
        values[from as usize..(from + n) as usize].iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
    out
}

/// Stored floats as f32.
fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        DType::F64 => bytes.chunks_exact(8).map(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32).collect(),
        DType::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        DType::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        DType::F8E4M3 => bytes.iter().map(|b| F8E4M3(*b).to_f32()).collect(),
        DType::F8E5M2 => bytes.iter().map(|b| F8E5M2(*b).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}
