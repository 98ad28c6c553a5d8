//! Models whose layers are in stages: what one stage computes, and all of them one after the other.

use super::tokens::Tokens;
use crate::{
    Pass, Result,
    nn::{Attend, Cache},
    pipeline::{Split, on_mesh},
    recompute::recompute,
};
use anymesh_core::{Mesh, Tensor};
use std::{cell::RefCell, ops::Range};

/// What a stage reads beside the stream.
pub(crate) struct Reads<'a> {
    /// The tokens, on the mesh of the stage.
    pub(crate) tokens: &'a Tokens,
    /// How many tokens caches have.
    pub(crate) from: usize,
    pub(crate) pass: &'a Pass,
    /// What layers say beside.
    pub(crate) asides: &'a Asides,
}

/// What a layer says beside what it makes of the stream: a mixture of experts does.
#[derive(Clone, Debug)]
pub(crate) struct Aside {
    pub(crate) layer: usize,
    /// How many tokens each expert got, `[experts]`, and how many choices found no room.
    pub(crate) counts: Tensor,
    pub(crate) dropped: Tensor,
    /// A mean over the tokens of the micro-batch that training makes small beside the model's own
    /// loss.
    pub(crate) loss: Option<Tensor>,
}

/// All that was said beside.
#[derive(Debug, Default)]
pub(crate) struct Asides(RefCell<Vec<Aside>>);

impl Asides {
    pub(crate) fn take(&self) -> Vec<Aside> {
        self.0.take()
    }

    /// What a layer gave after the stream: counts, drops, and perhaps a loss.
    fn hear(&self, layer: usize, said: Vec<Tensor>) {
        let mut said = said.into_iter();
        if let (Some(counts), Some(dropped)) = (said.next(), said.next()) {
            self.0.borrow_mut().push(Aside {
                layer,
                counts,
                dropped,
                loss: said.next(),
            });
        }
    }
}

/// The losses of layers and what came before them, added up on a mesh.
pub(crate) fn added_up(
    before: Option<&Tensor>,
    said: &[Aside],
    mesh: &Mesh,
) -> Result<Option<Tensor>> {
    let mut sum = before.cloned();
    for loss in said.iter().filter_map(|aside| aside.loss.as_ref()) {
        let loss = on_mesh(loss, mesh)?;
        sum = Some(match sum {
            Some(sum) => sum.add(&loss)?,
            None => loss,
        });
    }
    Ok(sum)
}

/// The stream `[b, s, width]` between layers. What the last branch adds to it may still be to be
/// added, so that the next norm does both at once.
pub(crate) struct Open {
    pub(crate) x: Tensor,
    pub(crate) branch: Option<Tensor>,
}

impl From<Tensor> for Open {
    fn from(x: Tensor) -> Self {
        Self { x, branch: None }
    }
}

impl Open {
    /// With everything added.
    #[track_caller]
    pub(crate) fn closed(self) -> Result<Tensor> {
        Ok(match self.branch {
            Some(branch) => self.x.add(&branch)?,
            None => self.x,
        })
    }
}

/// What a layer gives.
pub(crate) struct Gave {
    pub(crate) stream: Open,
    /// What it says beside: counts, drops, a loss.
    pub(crate) said: Vec<Tensor>,
}

impl Gave {
    /// Nothing but the stream.
    pub(crate) fn stream(stream: Open) -> Self {
        let said = vec![];
        Self { stream, said }
    }
}

/// A layer of a stack.
pub(crate) trait Layer: Clone + Send + Sync + 'static {
    /// What it makes of the stream.
    fn run(
        &self,
        stream: Open,
        attend: &Attend,
        cache: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Gave>;
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
        x: Tensor,
        attend: &Attend,
        reads: &Reads<'_>,
        mut caches: Option<&mut [Cache]>,
    ) -> Result<Open> {
        let mut stream = Open::from(x);
        let again = self.recompute && caches.is_none();
        for i in self.range {
            let layer = &self.all[i];
            let cache = caches.as_deref_mut().and_then(|caches| caches.get_mut(i));
            let gave = match again {
                false => layer.run(stream, attend, cache, reads.pass)?,
                true => {
                    // One tensor is kept for each layer.
                    let (layer, attend, pass) = (layer.clone(), attend.clone(), *reads.pass);
                    let mut made = recompute(&stream.closed()?, move |x| {
                        let gave = layer.run(x.clone().into(), &attend, None, &pass)?;
                        let mut made = gave.said;
                        made.insert(0, gave.stream.closed()?);
                        Ok(made)
                    })?;
                    Gave {
                        stream: made.remove(0).into(),
                        said: made,
                    }
                }
            };
            stream = gave.stream;
            reads.asides.hear(i, gave.said);
        }
        Ok(stream)
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
        asides: &Asides,
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
                asides,
            };
            let gave = self.part(stage, came.as_ref(), &reads, caches.as_deref_mut())?;
            stream = Some(gave);
        }
        // There is a stage at least.
        stream.ok_or_else(|| crate::Error::config("pipeline.split", "there must be a stage"))
    }
}
