//! Models whose layers are in stages: what one stage computes, and all of them one after the other.

use super::tokens::Tokens;
use crate::{
    Pass, Result,
    nn::Cache,
    pipeline::{Split, on_mesh},
};
use anymesh_core::Tensor;

/// What a stage reads beside the stream.
pub(crate) struct Reads<'a> {
    /// The tokens, on the mesh of the stage.
    pub(crate) tokens: &'a Tokens,
    /// How many tokens caches have.
    pub(crate) from: usize,
    pub(crate) pass: &'a Pass,
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
