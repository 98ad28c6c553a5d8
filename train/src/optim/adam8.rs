//! AdamW with moments of 8 bits.

use super::{
    AdamW,
    codes::{self, BLOCK},
    rule::{Step, Updated, settled, states, wide, zeros},
};
use crate::Result;
use anymesh_core::{DType, Mesh, Scalar, Sharding, Tensor, ops::Expr, ops::PadMode, ops::Side};
use serde::{Deserialize, Serialize};

/// [`AdamW`] whose moments are kept in 8 bits: blocks of 256 values share a scale, the largest of
/// them, and each value is the nearest of a fixed list. Values are updated with the moments before
/// they are rounded. Parameters of fewer than 4096 values keep theirs in f32.
///
/// Blocks are counted in the order of the whole parameter, not of what a rank holds, so every mesh
/// gives the same numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adam8 {
    /// The learning rate.
    pub lr: f64,
    /// How much of each average stays.
    pub betas: [f64; 2],
    /// Added to the root.
    pub eps: f64,
    /// Weight decay.
    pub decay: f64,
    /// Whether decay is added to the gradient instead of taken from the value.
    pub coupled: bool,
    /// Parameters of fewer values keep their moments in f32.
    pub min_size: usize,
}

impl Default for Adam8 {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            decay: 1e-2,
            coupled: false,
            min_size: 4096,
        }
    }
}

impl Adam8 {
    /// The rule that this is a smaller form of.
    fn full(&self) -> AdamW {
        AdamW {
            lr: self.lr,
            betas: self.betas,
            eps: self.eps,
            decay: self.decay,
            coupled: self.coupled,
            ..AdamW::default()
        }
    }

    pub(super) fn check(&self, key: &str) -> Result<()> {
        self.full().check(key)
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        if value.numel() < self.min_size {
            return Ok(vec![("adam8.m", zeros(value)?), ("adam8.v", zeros(value)?)]);
        }
        let blocks = Blocks::of(value);
        let place = || (value.mesh(), blocks.sharding.clone());
        let mut scales = blocks.dims.clone();
        scales.pop();
        scales.push(1);
        // The code of zero, and the least scale: what zeros are rounded to.
        let coded = |map: &[f32]| -> Result<Tensor> {
            let zero = codes::code_of_zero(map);
            Ok(Tensor::full(&blocks.dims[..], zero, DType::U8, place())?)
        };
        let scale = || Tensor::full(&scales[..], LEAST, DType::F32, place());
        Ok(vec![
            ("adam8.m", coded(&codes::signed())?),
            ("adam8.m_scale", scale()?),
            ("adam8.v", coded(&codes::unsigned())?),
            ("adam8.v_scale", scale()?),
        ])
    }

    pub(super) fn update(
        &self,
        tables: &mut Tables,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let full = self.full();
        if value.numel() < self.min_size {
            return full.update(step, value, gradient, state);
        }
        let [m, m_scale, v, v_scale] = states(state)?;
        let (dtype, numbers) = (wide(value.dtype()), full.numbers(step));
        let blocks = Blocks::of(value);
        let [signed, unsigned] = tables.on(value.mesh())?;

        let [m, v] = [signed.decode(m, m_scale)?, unsigned.decode(v, v_scale)?];
        let gradient = match self.coupled {
            false => blocks.cut(gradient)?,
            true => {
                let with_decay = Expr::new("adam8", &[gradient, value])
                    .params(&[step.scale, self.decay])
                    .map(dtype, |a| a.x[0] * a.p[0] + a.x[1] * a.p[1])?;
                blocks.cut(&with_decay)?
            }
        };
        let mut numbers_here = numbers;
        // What is added to the gradient is in it already.
        numbers_here[1] = 0.0;
        if self.coupled {
            numbers_here[0] = 1.0;
        }
        let [direction, m, v] = Expr::new("adam8", &[&gradient, &m, &v])
            .params(&numbers_here)
            .maps([dtype; 3], |a| {
                let n = super::adamw::numbers(a);
                let [m, v] = n.moments(a.x[0] * n.scale, [a.x[1], a.x[2]]);
                [n.direction([m, v]), m, v]
            })?;
        let [m, m_scale] = signed.encode(&m)?;
        let [v, v_scale] = unsigned.encode(&v)?;
        let direction = blocks.join(&direction, value)?;
        let next = Expr::new("adam8", &[value, &direction])
            .params(&numbers)
            .map(dtype, |a| super::adamw::numbers(a).stepped(a.x[0], a.x[1]))?;
        Ok((next, vec![m, m_scale, v, v_scale]))
    }
}

/// The least scale of a block.
const LEAST: f64 = 1e-12;

/// The blocks of a parameter, 256 values in the order of the whole parameter.
struct Blocks {
    /// `[.., blocks, 256]`.
    dims: Vec<usize>,
    /// How they lie: over the axes that the value is cut over.
    sharding: Sharding,
    /// Whether no block has values of two rows.
    in_rows: bool,
}

impl Blocks {
    fn of(value: &Tensor) -> Self {
        let cuts = value.sharding().whole();
        match value.dims() {
            // Blocks stay where their values are, unless a cut goes through one.
            [lead @ .., last] if last % BLOCK == 0 => Self {
                dims: [lead, &[last / BLOCK, BLOCK]].concat(),
                sharding: cuts,
                in_rows: true,
            },
            _ => Self {
                dims: vec![value.numel().div_ceil(BLOCK), BLOCK],
                sharding: in_front(&cuts),
                in_rows: false,
            },
        }
    }

    /// Something that lies as the parameter does, in blocks. What fills the last one is zero.
    fn cut(&self, x: &Tensor) -> Result<Tensor> {
        if self.in_rows {
            return Ok(x.reshape(&self.dims[..])?.reshard(self.sharding.clone())?);
        }
        let count = self.dims[0] * BLOCK;
        let flat = x.reshard(self.sharding.clone())?.reshape([x.numel()])?;
        let flat = match count - x.numel() {
            0 => flat,
            more => flat.pad(&[(0, more)], PadMode::Constant(Scalar::Float(0.0)))?,
        };
        Ok(flat
            .reshape(&self.dims[..])?
            .reshard(self.sharding.clone())?)
    }

    /// The opposite of [`cut`](Self::cut), for something that is to lie as `value` does.
    fn join(&self, blocks: &Tensor, value: &Tensor) -> Result<Tensor> {
        let x = match self.in_rows {
            true => blocks.reshape(value.shape())?,
            false => {
                let flat = blocks.reshape([blocks.numel()])?;
                flat.narrow(0, 0, value.numel())?.reshape(value.shape())?
            }
        };
        Ok(x.reshard(value.sharding().whole())?)
    }
}

/// All cuts in the first dimension.
fn in_front(cuts: &Sharding) -> Sharding {
    (cuts.cuts()).fold(Sharding::replicated(), |s, (_, axis)| s.cut(0, axis))
}

/// The lists of values, on the meshes that asked for them.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables(Vec<(Mesh, [Table; 2])>);

impl Tables {
    fn on(&mut self, mesh: &Mesh) -> Result<[Table; 2]> {
        if let Some((_, tables)) = self.0.iter().find(|(m, _)| m == mesh) {
            return Ok(tables.clone());
        }
        let table = |map: [f32; 256]| -> Result<Table> {
            let bounds = codes::bounds(&map);
            Ok(Table {
                values: Tensor::from_slice(&map, [256], mesh)?,
                bounds: Tensor::from_slice(&bounds, [255], mesh)?,
            })
        };
        let tables = [table(codes::signed())?, table(codes::unsigned())?];
        self.0.push((mesh.clone(), tables.clone()));
        Ok(tables)
    }
}

/// A list of 256 values, and from where on each is the nearest.
#[derive(Clone, Debug)]
struct Table {
    values: Tensor,
    bounds: Tensor,
}

impl Table {
    /// Blocks as numbers.
    fn decode(&self, codes: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let values = self.values.index_get(&[&codes.cast(DType::I32)?])?;
        Ok(values.mul(scale)?)
    }

    /// Numbers in blocks as codes, and the scale of each block.
    fn encode(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let scale =
            Expr::new("adam8", &[x]).max(&[-1], true, DType::F32, |a| a.x[0].abs().max(LEAST))?;
        let scale = settled(scale)?;
        let unit = Expr::new("adam8", &[x, &scale]).map(DType::F32, |a| a.x[0] / a.x[1])?;
        let codes = self.bounds.searchsorted(&unit, Side::Right)?;
        Ok([codes.cast(DType::U8)?, scale])
    }
}
