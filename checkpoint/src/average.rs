//! Running averages of tensors, on the host, region by region: each process keeps those of the
//! regions it saves.

use crate::{
    Checkpoint, Error, Result, Source, TensorInfo,
    element::floats,
    plan::{Placed, Tile},
    regions::copy_region,
};
use anymesh_core::{DType, Region};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The name under which the average of a tensor is stored.
pub(crate) fn average_name(tensor: &str) -> String {
    format!("ema.{tensor}")
}

/// An exponential average of every float tensor.
#[derive(Debug)]
pub(crate) struct Averages {
    decay: f64,
    /// Where averages go on from, where they were kept before.
    before: Option<Checkpoint>,
    shapes: BTreeMap<String, Vec<usize>>,
    /// A snapshot that is still being written shares them until the next save changes them.
    values: HashMap<Tile, Arc<Vec<f32>>>,
}

impl Averages {
    pub(crate) fn new(decay: f64, before: Option<Checkpoint>) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::Argument(format!(
                "the decay of an average must be in 0..1, got {decay}"
            )));
        }
        Ok(Self {
            decay,
            before,
            shapes: BTreeMap::new(),
            values: HashMap::new(),
        })
    }

    /// Makes ready for the tiles of a save. A tensor that is new or has another shape begins anew;
    /// one that only has another layout keeps its average.
    pub(crate) fn begin<'p>(
        &mut self,
        tiles: impl Iterator<Item = &'p Tile>,
        placed: &BTreeMap<String, Placed>,
    ) -> Result<()> {
        let mut known: BTreeMap<&str, Vec<(&Region, &Arc<Vec<f32>>)>> = BTreeMap::new();
        self.values.iter().for_each(|(tile, values)| {
            known
                .entry(&tile.tensor)
                .or_default()
                .push((&tile.region, values))
        });
        let mut next = HashMap::new();
        for tile in tiles.filter(|p| placed[&p.tensor].info.dtype.is_float()) {
            let (info, tensor) = (&placed[&tile.tensor].info, tile.tensor.as_str());
            let old = known
                .get(tensor)
                .filter(|_| self.shapes.get(tensor) == Some(&info.shape));
            let values = match (self.values.get(tile).filter(|_| old.is_some()), old) {
                (Some(values), _) => Some(values.clone()),
                (None, Some(old)) => Some(Arc::new(assemble(tensor, &tile.region, old)?)),
                (None, None) => self.stored(tensor, info, &tile.region)?.map(Arc::new),
            };
            if let Some(values) = values {
                next.insert(tile.clone(), values);
            }
        }
        self.shapes = placed
            .iter()
            .map(|(name, p)| (name.clone(), p.info.shape.clone()))
            .collect();
        self.values = next;
        Ok(())
    }

    /// An average that an earlier run has stored.
    fn stored(&self, tensor: &str, info: &TensorInfo, region: &Region) -> Result<Option<Vec<f32>>> {
        let name = average_name(tensor);
        let fits = |stored: &TensorInfo| stored.dtype == DType::F32 && stored.shape == info.shape;
        let Some(before) = self
            .before
            .as_ref()
            .filter(|b| b.tensors().get(&name).is_some_and(fits))
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; region.numel() * 4];
        before.read(&name, region, &mut bytes)?;
        Ok(Some(floats(&bytes, DType::F32)))
    }

    /// Takes a tile of a tensor into the average.
    pub(crate) fn add(&mut self, tile: &Tile, dtype: DType, bytes: &[u8]) {
        if !dtype.is_float() {
            return;
        }
        let new = floats(bytes, dtype);
        match self.values.get_mut(tile) {
            // An average begins with the first weights as they are.
            None => drop(self.values.insert(tile.clone(), Arc::new(new))),
            Some(values) => {
                for (average, value) in Arc::make_mut(values).iter_mut().zip(new) {
                    *average = (self.decay * f64::from(*average)
                        + (1.0 - self.decay) * f64::from(value))
                        as f32;
                }
            }
        }
    }

    /// The averages of a save, which is complete, by the tiles they are stored as.
    pub(crate) fn snapshot(&self) -> HashMap<Tile, Arc<Vec<f32>>> {
        self.values
            .iter()
            .map(|(tile, values)| {
                (
                    Tile {
                        tensor: average_name(&tile.tensor),
                        region: tile.region.clone(),
                    },
                    values.clone(),
                )
            })
            .collect()
    }
}

/// A region of an average from others that hold it.
fn assemble(tensor: &str, region: &Region, old: &[(&Region, &Arc<Vec<f32>>)]) -> Result<Vec<f32>> {
    let mut out = vec![0; region.numel() * 4];
    let mut found = 0;
    for (of, values) in old {
        if let Some(part) = of.intersect(region) {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            copy_region(&bytes, of, &mut out, region, &part, 4);
            found += part.numel();
        }
    }
    if found != region.numel() {
        let what = "has another layout than at the last save, and parts of its average are in other processes";
        return Err(Error::Argument(format!(
            "tensor '{tensor}' {what}: save once more as before, and go on from that checkpoint"
        )));
    }
    Ok(floats(&out, DType::F32))
}
