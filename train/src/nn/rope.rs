//! Rotary positions.

use crate::{Error, Result};
use anymesh_core::{
    DType, Mesh, Tensor,
    grad::no_grad,
    ops::{RopeStyle, SequenceOrder},
};
use std::sync::{Arc, Mutex, PoisonError};

/// Cosines and sines for queries and keys, made once and kept: a model has one of these for all of
/// its layers.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Angles from one position to the next.
    frequencies: Arc<[f64]>,
    style: RopeStyle,
    dtype: DType,
    /// `[positions, size / 2]`, for as many positions as were asked for; one for each mesh, because
    /// the stages of a pipeline take turns.
    tables: Arc<Mutex<Vec<[Tensor; 2]>>>,
    /// The same in another order, cut as the sequence is.
    ordered: Arc<Mutex<Vec<(SequenceOrder, [Tensor; 2])>>>,
}

impl Rope {
    /// For heads of twice as many values as there are frequencies, in a model that computes in
    /// `dtype`. Tables are f32 or wider.
    pub fn new(frequencies: Vec<f64>, style: RopeStyle, dtype: DType) -> Self {
        Self {
            frequencies: frequencies.into(),
            style,
            dtype: match dtype {
                DType::F64 => DType::F64,
                _ => DType::F32,
            },
            tables: Arc::default(),
            ordered: Arc::default(),
        }
    }

    /// `base^(-2i / size)`, the frequencies of a head of `size` values.
    pub fn frequencies(size: usize, base: f64) -> Result<Vec<f64>> {
        if !size.is_multiple_of(2) || size == 0 {
            let detail = format!("heads of {size} values have no pairs to rotate");
            return Err(Error::config("head_dim", detail));
        }
        let power = |i: usize| base.powf(-2.0 * i as f64 / size as f64);
        Ok((0..size / 2).map(power).collect())
    }

    /// The tables of positions `from .. from + count`, which all samples have.
    pub fn counting(
        &self,
        mesh: &Mesh,
        from: usize,
        count: usize,
    ) -> Result<(Tensor, Tensor, RopeStyle)> {
        let [cos, sin] = self.below(mesh, from + count)?;
        let rows = |t: Tensor| t.narrow(0, from, count);
        Ok((rows(cos)?, rows(sin)?, self.style))
    }

    /// The tables of the positions of a sequence in some order, cut over `cp` as it is.
    pub fn ordered(
        &self,
        mesh: &Mesh,
        order: SequenceOrder,
        count: usize,
    ) -> Result<(Tensor, Tensor, RopeStyle)> {
        if order == SequenceOrder::Straight {
            return self.counting(mesh, 0, count);
        }
        order.check(count)?;
        let mut kept = self.ordered.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |(_, tables): &&(_, [Tensor; 2])| tables[0].mesh() == mesh;
        let [cos, sin] = match kept.iter().find(here) {
            Some((of, tables)) if *of == order && tables[0].dims()[0] == count => tables.clone(),
            _ => {
                let tables = self.make(mesh, "[@cp?, _]", count, |at| order.position(at, count))?;
                kept.retain(|entry| !here(&entry));
                kept.push((order, tables.clone()));
                tables
            }
        };
        Ok((cos, sin, self.style))
    }

    /// The tables of positions `[b, s]`, all of which are smaller than `below`.
    pub fn at(&self, positions: &Tensor, below: usize) -> Result<(Tensor, Tensor, RopeStyle)> {
        let [cos, sin] = self.below(positions.mesh(), below)?;
        // One for all heads.
        let rows = |t: Tensor| t.embedding(positions)?.unsqueeze(1);
        Ok((rows(cos)?, rows(sin)?, self.style))
    }

    /// The kept tables, which are made anew where they are too short.
    fn below(&self, mesh: &Mesh, positions: usize) -> Result<[Tensor; 2]> {
        let mut kept = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |tables: &&[Tensor; 2]| tables[0].mesh() == mesh;
        if let Some(tables) = kept.iter().find(here)
            && tables[0].dims()[0] >= positions
        {
            return Ok(tables.clone());
        }
        let positions = positions.next_power_of_two().max(64);
        let tables = self.make(mesh, "[_, _]", positions, |at| at)?;
        kept.retain(|tables| !here(&tables));
        kept.push(tables.clone());
        Ok(tables)
    }

    /// Tables of as many rows, each of some position.
    fn make(
        &self,
        mesh: &Mesh,
        sharding: &str,
        rows: usize,
        position: impl Fn(usize) -> usize,
    ) -> Result<[Tensor; 2]> {
        let (shape, place) = ([rows, self.frequencies.len()], (mesh, sharding));
        let table = |f: fn(f64) -> f64| {
            let angle = |at: &[usize]| f(position(at[0]) as f64 * self.frequencies[at[1]]);
            match self.dtype {
                DType::F64 => Tensor::from_fn(shape, place, angle),
                _ => Tensor::from_fn(shape, place, |at| angle(at) as f32),
            }
        };
        no_grad(|| Ok([table(f64::cos)?, table(f64::sin)?]))
    }
}
