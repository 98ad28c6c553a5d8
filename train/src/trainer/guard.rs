//! The same input gives the same bits: where it does not, a device is at fault.

use crate::Result;
use anymesh_core::Tensor;
use std::{collections::BTreeMap, fmt};

/// A rank whose device gave two results for one computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// The rank of the mesh.
    pub rank: usize,
    /// Its device.
    pub device: String,
    /// The first gradient that differed, by the parameter's name.
    pub parameter: String,
}

impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            device,
            parameter,
        } = self;
        write!(
            f,
            "the gradient of '{parameter}' has other bits when it is computed again, first on rank {rank} ({device}): do not trust this device"
        )
    }
}

/// The first rank of this process, in the order of parameters, on which two runs differ.
pub(super) fn compare(
    first: &BTreeMap<String, Tensor>,
    second: &BTreeMap<String, Tensor>,
) -> Result<Option<Suspect>> {
    for (parameter, a) in first {
        let Some(b) = second.get(parameter) else {
            continue;
        };
        // Partial sums before they are added up: a sum would be wrong on every rank.
        for ((rank, a), (_, b)) in a.shards().iter().zip(b.shards()) {
            if a.to_bytes()? != b.to_bytes()? {
                return Ok(Some(Suspect {
                    rank: *rank,
                    device: a.device().to_string(),
                    parameter: parameter.clone(),
                }));
            }
        }
    }
    Ok(None)
}
