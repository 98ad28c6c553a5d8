//! What a program keeps: tensors, tensors in fused buffers, and state.

use crate::{
    Error, Result, TensorInfo,
    plan::{Placed, Slot},
};
use anymesh_core::{Region, Tensor};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// What the name of a master weight begins with: `master.w` is the copy of `w` that the optimizer
/// works on.
pub const MASTER: &str = "master.";

/// What a checkpoint is to hold.
///
/// ```
/// # use anymesh_checkpoint::{Contents, Weights};
/// # use anymesh_core::{DType, Tensor};
/// # let device = anymesh_backend_cpu::device();
/// let master = Tensor::ones([4], DType::F32, &device)?;
/// let w = master.cast(DType::BF16)?;
/// let contents = Contents {
///     step: 100,
///     tensors: [("w".to_string(), w), ("master.w".to_string(), master)].into(),
///     weights: Weights::Masters, // w is not stored: a load makes it of master.w
///     ..Contents::default()
/// };
/// assert_eq!(contents.names()?.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// The training step.
    pub step: u64,
    /// Tensors by name, however they lie.
    pub tensors: BTreeMap<String, Tensor>,
    /// Tensors that lie in fused buffers.
    pub fused: Vec<Fused>,
    /// Whatever else is to be found again; [`Training`](crate::Training) is a ready form of it.
    pub state: Map<String, Value>,
    /// What is stored of weights that have a master copy.
    pub weights: Weights,
}

impl Contents {
    /// Tensors at a step, and nothing else.
    pub fn new(step: u64, tensors: BTreeMap<String, Tensor>) -> Self {
        Self {
            step,
            tensors,
            ..Self::default()
        }
    }
}

/// What is stored where there is a weight `w` and its master copy `master.w`. A load that is told
/// to ([`Load::rebuild`](crate::Load::rebuild)) makes the one of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// Both.
    #[default]
    Both,
    /// The weights: their masters are dropped, and made of the weights again, with the digits that
    /// those have.
    Model,
    /// The masters: the weights are skipped, and made of the masters again, to the bit if they were
    /// cast from them.
    Masters,
}

/// Tensors behind each other in one flat buffer, which is cut over ranks wherever that falls: how
/// sharded optimizers keep their state. Each tensor is stored under its name in its own shape, so
/// it can be loaded into any other layout, fused or not.
#[derive(Clone, Debug)]
pub struct Fused {
    /// The buffer: one dimension, cut along it or replicated.
    pub buffer: Tensor,
    /// What is in it. The rest is padding, which is not stored.
    pub parts: Vec<FusedPart>,
}

/// A tensor in a fused buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedPart {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its first element in the buffer.
    pub offset: usize,
}

impl Fused {
    /// Places for tensors of these shapes behind each other, each at a multiple of `align`
    /// elements, and the length of the buffer, which is one too.
    pub fn places<'s>(
        shapes: impl IntoIterator<Item = (&'s str, &'s [usize])>,
        align: usize,
    ) -> (Vec<FusedPart>, usize) {
        let (mut parts, mut end) = (vec![], 0usize);
        for (name, shape) in shapes {
            parts.push(FusedPart {
                name: name.into(),
                shape: shape.to_vec(),
                offset: end,
            });
            end = (end + shape.iter().product::<usize>()).next_multiple_of(align.max(1));
        }
        (parts, end)
    }

    fn placed(&self, part: &FusedPart) -> Placed {
        let info = TensorInfo {
            dtype: self.buffer.dtype(),
            shape: part.shape.clone(),
        };
        let fused = Some(Slot {
            offset: part.offset,
            length: self.buffer.numel(),
        });
        Placed {
            info,
            fused,
            ..Placed::of(&self.buffer)
        }
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: String| {
            Err(Error::FusedBuffer {
                layout: self.buffer.type_string(),
                detail: what,
            })
        };
        if self.buffer.dims().len() != 1 {
            return wrong("it needs one dimension: flatten it".into());
        }
        if self.buffer.sharding().is_partial() {
            return wrong(
                "it is a partial value: reshard it first, which says what it sends".into(),
            );
        }
        let mut order: Vec<&FusedPart> = self.parts.iter().collect();
        order.sort_by_key(|p| p.offset);
        let mut end = 0;
        for part in order {
            let numel = crate::regions::checked_numel(&part.shape);
            let stop = numel
                .and_then(|n| part.offset.checked_add(n))
                .filter(|stop| *stop <= self.buffer.numel());
            let Some(stop) = stop else {
                return wrong(format!(
                    "'{}' of shape {:?} at {} does not lie inside it",
                    part.name, part.shape, part.offset
                ));
            };
            if part.offset < end {
                return wrong(format!(
                    "'{}' at {} begins before the one in front of it ends, at {end}",
                    part.name, part.offset
                ));
            }
            end = stop;
        }
        Ok(())
    }
}

/// A tensor of a program and how it lies.
#[derive(Clone, Debug)]
pub(crate) struct PlacedTensor {
    pub(crate) placed: Placed,
    /// The tensor, or the buffer it is in.
    pub(crate) tensor: Tensor,
}

impl Contents {
    /// Every tensor by name, fused or not. An error where a name comes twice or a buffer does not
    /// hold what it should.
    pub(crate) fn placed_tensors(&self) -> Result<BTreeMap<String, PlacedTensor>> {
        let mut out = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            out.insert(
                name.clone(),
                PlacedTensor {
                    placed: Placed::of(tensor),
                    tensor: tensor.clone(),
                },
            );
        }
        for fused in &self.fused {
            fused.check()?;
            for part in &fused.parts {
                if out
                    .insert(
                        part.name.clone(),
                        PlacedTensor {
                            placed: fused.placed(part),
                            tensor: fused.buffer.clone(),
                        },
                    )
                    .is_some()
                {
                    return Err(Error::DuplicateName {
                        name: part.name.clone(),
                        detail: "give each a name of its own".into(),
                    });
                }
            }
        }
        Ok(out)
    }

    /// What of it is stored.
    pub(crate) fn stored_tensors(&self) -> Result<BTreeMap<String, PlacedTensor>> {
        let mut tensors = self.placed_tensors()?;
        let names = self.names()?;
        tensors.retain(|name, _| names.contains(name));
        for (name, tensor) in &tensors {
            if tensor.placed.sharding.is_partial() {
                return Err(Error::Partial {
                    tensor: name.clone(),
                    layout: tensor.tensor.type_string(),
                });
            }
        }
        Ok(tensors)
    }

    /// The names that are stored.
    pub fn names(&self) -> Result<BTreeSet<String>> {
        let all: BTreeSet<String> = self.placed_tensors()?.into_keys().collect();
        let goes = |name: &String| match self.weights {
            Weights::Both => false,
            Weights::Model => name
                .strip_prefix(MASTER)
                .is_some_and(|weight| all.contains(weight)),
            Weights::Masters => all.contains(&format!("{MASTER}{name}")),
        };
        Ok(all.iter().filter(|name| !goes(name)).cloned().collect())
    }
}

impl PlacedTensor {
    /// Copies the bytes of a region from a rank of this process that holds it.
    pub(crate) fn copy(&self, region: &Region, out: &mut [u8]) -> Result<()> {
        let holds = |of: &Region| {
            (0..region.start.len()).all(|d| {
                of.start[d] <= region.start[d]
                    && region.start[d] + region.shape[d] <= of.start[d] + of.shape[d]
            })
        };
        for (rank, part) in self.tensor.shards() {
            let Some((of, at)) = self
                .placed
                .regions(rank)
                .into_iter()
                .find(|(of, _)| holds(of))
            else {
                continue;
            };
            let whole = match at {
                Some(at) => part.narrow(0, at, of.numel())?.reshape(&of.shape[..])?,
                None => part,
            };
            let cut = |part: Tensor, d: usize| {
                part.narrow(d as i64, region.start[d] - of.start[d], region.shape[d])
            };
            return Ok((0..region.start.len())
                .try_fold(whole, cut)?
                .copy_bytes(out)?);
        }
        Err(Error::Argument(format!(
            "no rank of this process holds the region {region:?} of {}",
            self.placed.layout()
        )))
    }
}
