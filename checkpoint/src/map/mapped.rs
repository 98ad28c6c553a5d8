//! A source whose tensors are made of another source's.

use super::mapping::Mapping;
use super::names::Names;
use super::pieces::Piece;
use super::recipe::Recipe;
use crate::regions::slabs;
use crate::source::check_bytes;
use crate::{Result, Source, TensorInfo, copy_region};
use anymesh_core::Region;
use std::collections::BTreeMap;

/// How a mapping is applied to a source.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Drop the tensors that no statement names, instead of keeping them.
    pub only_mapped: bool,
    /// Apply the inverse: the source has the names on the right of the arrows.
    pub reverse: bool,
    /// Tensor-parallel degrees of source tensors, where they were fused in more than one part.
    pub source_degrees: BTreeMap<String, usize>,
    /// The tensors that are to be made, with their tensor-parallel degrees; where it is not given,
    /// all that the statements yield.
    pub destination: Option<BTreeMap<String, usize>>,
}

/// A source seen through a mapping. Reading a region reads only the regions that it is made of.
#[derive(Clone, Debug)]
pub struct Mapped<S> {
    source: S,
    recipe: Recipe,
    memory: usize,
}

impl<S: Source> Mapped<S> {
    /// Applies a mapping to a source.
    pub fn new(source: S, mapping: &Mapping, options: &Options) -> Result<Self> {
        let degree = |name: &String| {
            (
                name.clone(),
                options.source_degrees.get(name).copied().unwrap_or(1),
            )
        };
        let here: BTreeMap<String, usize> = source.tensors().keys().map(degree).collect();
        let there = options.destination.clone().unwrap_or_default();
        let names = if options.reverse {
            Names {
                left: there,
                right: here,
            }
        } else {
            Names {
                left: here,
                right: there,
            }
        };
        let mut program = mapping.expand(&names)?;
        if options.reverse {
            program = program.reverse()?;
        }
        let destination = options
            .destination
            .as_ref()
            .map(|names| names.keys().cloned().collect());
        let recipe = Recipe::new(
            &program,
            source.tensors(),
            destination.as_ref(),
            options.only_mapped,
        )?;
        Ok(Self {
            source,
            recipe,
            memory: usize::MAX,
        })
    }

    /// A source with a recipe that was made for its tensors.
    pub fn with_recipe(source: S, recipe: Recipe) -> Self {
        Self {
            source,
            recipe,
            memory: usize::MAX,
        }
    }

    /// Bytes that a read may take besides its target. What would take more is read in parts, which
    /// may read the same bytes of the source several times.
    pub fn within(mut self, memory: usize) -> Self {
        self.memory = memory;
        self
    }

    /// What the tensors are made of.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The source behind.
    pub fn source(&self) -> &S {
        &self.source
    }
}

impl<S: Source> Source for Mapped<S> {
    fn foreign(&self) -> Vec<(String, String)> {
        self.source.foreign()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.recipe.tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let size = self.info(name)?.dtype.size();
        let pieces = self.recipe.pieces(name, region)?;
        check_bytes(name, region.numel() * size, out.len())?;
        let need = pieces.iter().map(Piece::memory).max().unwrap_or(0);
        if need > self.memory && region.numel() > 1 {
            return self.read_in_parts(name, region, need, out);
        }
        self.fill(pieces, region, size, out)
    }
}

impl<S: Source> Mapped<S> {
    /// Reads a region in parts, as many as memory asks for.
    fn read_in_parts(
        &self,
        name: &str,
        region: &Region,
        need: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let size = self.info(name)?.dtype.size();
        let limit = ((out.len() as u128 * self.memory as u128 / need as u128) as usize).max(size);
        let mut at = 0;
        for mut part in slabs(region.shape.to_vec(), size, limit) {
            part.start
                .iter_mut()
                .zip(&region.start)
                .for_each(|(at, start)| *at += start);
            let end = at + part.numel() * size;
            self.fill(
                self.recipe.pieces(name, &part)?,
                &part,
                size,
                &mut out[at..end],
            )?;
            at = end;
        }
        Ok(())
    }

    /// Reads the pieces of a region.
    fn fill(&self, pieces: Vec<Piece>, region: &Region, size: usize, out: &mut [u8]) -> Result<()> {
        for piece in pieces {
            if piece.ops.is_empty() && piece.target == *region {
                return self.source.read(&piece.source, &piece.region, out);
            }
            let mut bytes = vec![0; piece.region.numel() * piece.dtype.size()];
            self.source.read(&piece.source, &piece.region, &mut bytes)?;
            let bytes = piece.finish(bytes);
            copy_region(&bytes, &piece.target, out, region, &piece.target, size);
        }
        Ok(())
    }
}
