//! Rows onto a mesh.

use super::{Batch, Loader, Rows, Step};
use crate::Result;
use crate::data::{IGNORED, PADDING, Sample};
use anymesh_core::{DType, Mesh, Region, Shape, Sharding, Tensor, TensorType};
use std::{collections::HashMap, time::Duration};

/// The rows of a tensor that ranks of this process hold some of, ascending. Ranks without values
/// need none.
pub(super) fn rows_here(mesh: &Mesh, sharding: &Sharding, shape: &Shape) -> Vec<usize> {
    let mut here = vec![false; shape[0]];
    for (i, rank) in mesh.addressable().enumerate() {
        if !mesh.device(i).has_values() {
            continue;
        }
        let region = sharding.region(mesh, rank, shape);
        if region.numel() > 0 {
            here[region.start[0]..region.start[0] + region.shape[0]].fill(true);
        }
    }
    let rows = here.iter().enumerate();
    rows.filter(|(_, here)| **here)
        .map(|(row, _)| row)
        .collect()
}

impl Loader {
    /// Places what was read.
    pub(super) fn place(&self, read: &Rows, waited: Duration) -> Result<Step> {
        let rows = self.0.shape[0];
        let batch = |samples: &[Option<Sample>]| -> Result<Batch> {
            let pad = self.0.options.pad as i32;
            let several = self.0.has_documents;
            let optional = |fill, of: fn(&Sample) -> &[i32]| -> Result<Option<Tensor>> {
                several.then(|| self.tensor(samples, fill, of)).transpose()
            };
            Ok(Batch {
                ids: self.tensor(samples, pad, |s| &s.ids)?,
                labels: self.tensor(samples, IGNORED, |s| &s.labels)?,
                documents: optional(PADDING, |s| &s.documents)?,
                positions: optional(0, |s| &s.positions)?,
                order: self.0.options.order,
            })
        };
        Ok(Step {
            positions: read.positions.clone(),
            micro_batches: read
                .samples
                .chunks(rows)
                .map(batch)
                .collect::<Result<_>>()?,
            waited,
        })
    }

    /// One of a batch's tensors: what samples have, and `fill` behind it.
    fn tensor(
        &self,
        samples: &[Option<Sample>],
        fill: i32,
        of: fn(&Sample) -> &[i32],
    ) -> Result<Tensor> {
        let (mesh, sharding, shape) = (&self.0.mesh, &self.0.sharding, &self.0.shape);
        let (order, length) = (self.0.options.order, shape[1]);
        let values = |region: &Region| {
            let mut values = Vec::with_capacity(region.numel());
            for sample in &samples[region.start[0]..region.start[0] + region.shape[0]] {
                let row = sample.as_ref().map_or(&[][..], of);
                let columns = region.start[1]..region.start[1] + region.shape[1];
                let at = |column: usize| row.get(order.position(column, length));
                values.extend(columns.map(|c| at(c).copied().unwrap_or(fill)));
            }
            values
        };
        let here = mesh.addressable().len();
        if mesh.is_single() || (0..here).any(|i| !mesh.device(i).has_values()) {
            // A device is a mesh whose tensors are plain; one without values needs none.
            return match mesh.device(0).has_values() {
                true => {
                    let whole = sharding.region(mesh, 0, shape);
                    Ok(Tensor::from_slice(
                        &values(&whole),
                        shape.clone(),
                        mesh.device(0),
                    )?)
                }
                false => Ok(Tensor::zeros(shape.clone(), DType::I32, (mesh, sharding))?),
            };
        }
        let mut parts: Vec<Tensor> = Vec::with_capacity(here);
        // Tensors are values: ranks of one device that hold the same share it.
        let mut made: HashMap<Region, Vec<usize>> = HashMap::new();
        for (i, rank) in mesh.addressable().enumerate() {
            let region = sharding.region(mesh, rank, shape);
            let device = mesh.device(i);
            let there = made.entry(region.clone()).or_default();
            let part = match there.iter().find(|j| mesh.device(**j) == device) {
                Some(j) => parts[*j].clone(),
                None => {
                    there.push(i);
                    let part = Shape::from(region.shape.clone());
                    Tensor::from_slice(&values(&region), part, device)?
                }
            };
            parts.push(part);
        }
        let ty = TensorType {
            dtype: DType::I32,
            shape: shape.clone(),
            sharding: sharding.clone(),
        };
        Ok(Tensor::from_shards(&ty, mesh, &parts)?)
    }
}
