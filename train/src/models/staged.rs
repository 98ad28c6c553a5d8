//! Models whose layers are in stages: what one stage computes, and all of them one after the other.

use super::tokens::Tokens;
use crate::{
    Pass, Result,
    nn::{Attend, Cache},
    pipeline::{Split, on_mesh},
    recompute::recompute,
};
use anymesh_core::Tensor;
use std::ops::Range;

/// What a stage reads beside the stream.
pub(crate) struct Reads<'a> {
    /// The tokens, on the mesh of the stage.
    pub(crate) tokens: &'a Tokens,
    /// How many tokens caches have.
    pub(crate) from: usize,
    pub(crate) pass: &'a Pass,
}

/// A layer of a stack.
pub(crate) trait Layer: Clone + Send + Sync + 'static {
    /// What it makes of the stream.
    fn run(
        &self,
        x: &Tensor,
        attend: &Attend,
        cache: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Tensor>;
}

/// Some of a model's layers, one after the other.
pub(crate) struct Layers<'a, L> {
    pub(crate) all: &'a [L],
    pub(crate) range: Range<usize>,
    /// Whether they forget what is inside of them and run again in the backward pass.
    pub(crate) recompute: bool,
}

impl<L: Layer> Layers<'_, L> {
    pub(crate) fn run(
        self,
        mut x: Tensor,
        attend: &Attend,
        pass: &Pass,
        mut caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        for i in self.range {
            let layer = &self.all[i];
            x = match caches.as_deref_mut() {
                Some(caches) => layer.run(&x, attend, caches.get_mut(i), pass)?,
                None => {
                    let (layer, attend, pass) = (layer.clone(), attend.clone(), *pass);
                    let run = move |x: &Tensor| layer.run(x, &attend, None, &pass);
                    recompute(self.recompute, &x, run)?
                }
            };
        }
        Ok(x)
    }
}

/// A stack of layers in stages.
pub(crate) trait Stack {
    fn split(&self) -> &Split;

    /// What a stage makes of the stream that came to it, `[b, s, width]`. The first stage is given
    /// none and begins with the tokens; the last ends with what the head reads.
    fn part(
        &self,
        stage: usize,
        stream: Option<&Tensor>,
        reads: &Reads<'_>,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor>;

    /// All stages one after the other.
    fn all_parts(
        &self,
        tokens: &Tokens,
        from: usize,
        pass: &Pass,
        mut caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        let split = self.split();
        let mut stream: Option<Tensor> = None;
        for stage in 0..split.stages() {
            let mesh = split.mesh_of(stage);
            let came = stream.map(|x| on_mesh(&x, mesh)).transpose()?;
            let reads = Reads {
                tokens: &tokens.on(mesh)?,
                from,
                pass,
            };
            let gave = self.part(stage, came.as_ref(), &reads, caches.as_deref_mut())?;
            stream = Some(gave);
        }
        // There is a stage at least.
        stream.ok_or_else(|| crate::Error::config("pipeline.split", "there must be a stage"))
    }
}
