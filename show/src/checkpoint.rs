//! What a checkpoint holds, from its manifest.

use crate::{Figure, Inventory, Show, StoredTensor};
use anymesh_checkpoint::manifest::{Manifest, Stored};

/// Its bytes: at most what fits into the number, as a manifest that nobody parsed may say anything.
fn bytes(stored: &Stored) -> u64 {
    let info = stored.info();
    let sizes = info.shape.iter().map(|n| *n as u64);
    match info.shape.contains(&0) {
        true => 0,
        false => sizes.fold(info.dtype.size() as u64, u64::saturating_mul),
    }
}

impl From<&Manifest> for Inventory {
    fn from(manifest: &Manifest) -> Self {
        let axes: Vec<String> = manifest
            .mesh
            .iter()
            .map(|(name, n)| format!("{name}={n}"))
            .collect();
        let from = match axes.is_empty() {
            true => "one device".to_string(),
            false => format!("mesh({})", axes.join(", ")),
        };
        let tensor = |(name, stored): (&String, &Stored)| StoredTensor {
            name: name.clone(),
            dtype: stored.dtype.clone(),
            shape: stored.shape.clone(),
            layout: stored.layout.clone(),
            bytes: bytes(stored),
            pieces: stored.regions.len(),
        };
        Self {
            title: format!("checkpoint of step {}, saved from {from}", manifest.step),
            tensors: manifest.tensors.iter().map(tensor).collect(),
            files: manifest
                .files
                .iter()
                .map(|(name, n)| (name.clone(), *n))
                .collect(),
            facts: manifest
                .state
                .iter()
                .map(|(key, v)| (key.clone(), v.to_string()))
                .collect(),
        }
    }
}

/// What it holds: tensors with their layouts and pieces, files, and the program's state.
impl Show for Manifest {
    fn figure(&self) -> Figure {
        Inventory::from(self).figure()
    }
}
