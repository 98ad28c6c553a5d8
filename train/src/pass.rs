//! What a forward pass is for.

use anymesh_core::ops::Rng;

/// What a forward pass is for: training, with random keys for dropout, or evaluation, without.
///
/// The key of a layer depends on the key of the pass and the layer's name, so that a layer drops
/// the same elements on every mesh, in recomputations, and however the model is split.
///
/// ```
/// # use anymesh_core::ops::Rng;
/// # use anymesh_train::Pass;
/// let pass = Pass::train(Rng::new(7));
/// assert_eq!(pass.rng("layers.0"), pass.rng("layers.0"));
/// assert_ne!(pass.rng("layers.0"), pass.rng("layers.1"));
/// assert_eq!(Pass::eval().rng("layers.0"), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    key: Option<Rng>,
}

impl Pass {
    /// Evaluation: nothing is dropped, statistics stay as they are.
    pub fn eval() -> Self {
        Self { key: None }
    }

    /// Training, with the random key of this micro-batch.
    pub fn train(key: Rng) -> Self {
        Self { key: Some(key) }
    }

    /// The same for a part of the batch that is passed on its own: with random keys of its own, the
    /// same ones for the same part.
    pub fn part(&self, index: usize) -> Self {
        let key = self.key.map(|key| Rng {
            seed: crate::key(key.seed, &format!("part {index}")).seed,
            stream: key.stream,
        });
        Self { key }
    }

    /// Whether this is training.
    pub fn is_training(&self) -> bool {
        self.key.is_some()
    }

    /// The random key of a layer; none in evaluation.
    pub fn rng(&self, layer: &str) -> Option<Rng> {
        let key = self.key?;
        let layer = crate::key(key.seed, layer);
        Some(Rng {
            seed: layer.seed,
            stream: key.stream,
        })
    }
}
