//! Losses over all micro-batches at once.

use super::{Pipeline, Staged};
use crate::{Error, Pass, Result, optim::Accumulator};
use anymesh_core::{Tensor, grad::Gradients};

/// What [`Pipeline::run_cached`] gives.
#[derive(Debug)]
pub struct Cached {
    /// The loss, without its past, on the mesh of the last stage.
    pub loss: Tensor,
    /// The gradients of the model's parameters, added up as they lie.
    pub gradients: Accumulator,
    /// Those of what the loss itself learns, such as a temperature.
    pub of_loss: Gradients,
}

impl Pipeline {
    /// The gradients of a loss that compares what all micro-batches give, such as the vectors of an
    /// encoder ([GradCache](crate::objective::GradCache) with stages): they go through the stages
    /// once without a graph, the loss gives the gradient of each result, and they go through the
    /// schedule with it. It costs a second forward pass, and no more memory than a loss for each.
    ///
    /// `loss` gets one tensor for each micro-batch, on the mesh of the last stage. The gradients are
    /// those of the loss, not an estimate: `pass` gives a micro-batch the same random keys both times.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, ops::Rng};
    /// # use anymesh_schedule::build;
    /// # use anymesh_train::{Build, Encoder, Module, Pass, Policy, Pooling, Sentences, data::Tokenizer};
    /// # use anymesh_train::{models::{BertConfig, ModelConfig}, objective::{Contrastive, contrastive}, pipeline::Pipeline};
    /// # let device = anymesh_backend_cpu::device();
    /// # let config = BertConfig { vocab_size: 32, hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 16, max_position_embeddings: 8, ..Default::default() };
    /// # let (tokenizer, pooling) = (Tokenizer::bytes(), Pooling::Mean);
    /// let mesh = Mesh::new("pp=2, dp=2", &device)?;
    /// let model = ModelConfig::Bert(config).build(&Build::new(&mesh, Policy::f32(), 1))?;
    /// let encoder = Encoder { model, tokenizer, pooling, normalize: false, lower_case: false, batch: 4 };
    /// // Two micro-batches of queries, two of passages.
    /// let texts = |i: u32| Sentences::new(&mesh, &[vec![1 + i, 2, 3], vec![4, 5 + i]], 0);
    /// let batches = (0..4).map(texts).collect::<Result<Vec<_>, _>>()?;
    /// let pipeline = Pipeline::new(&build("1f1b", 2, 1, 4)?)?;
    /// let pass = |i: usize| Pass::train(Rng::new(i as u64));
    /// let found = pipeline.run_cached(&encoder, &batches, &pass, |vectors| {
    ///     let [q1, q2, p1, p2] = vectors else { unreachable!("as many as batches") };
    ///     let (q, p) = (Tensor::concat(&[q1, q2], 0)?, Tensor::concat(&[p1, p2], 0)?);
    ///     contrastive(&q, &p, &Contrastive::default())
    /// })?;
    /// assert!(found.gradients.sums().contains_key("encoder.layer.1.output.dense.weight"));
    /// # Ok::<(), anymesh_train::Error>(())
    /// ```
    pub fn run_cached<S: Staged + ?Sized>(
        &self,
        model: &S,
        batches: &[S::Batch],
        pass: &dyn Fn(usize) -> Pass,
        loss: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Cached> {
        let leaf = |gave: Vec<Tensor>| match &gave[..] {
            [x] => Ok(x.detach().require_grad()?),
            _ => {
                let detail = format!(
                    "the last stage must give one result, it gave {}",
                    gave.len()
                );
                Err(Error::config("pipeline", detail))
            }
        };
        let found = self.outputs(model, batches, pass)?;
        let found = found.into_iter().map(leaf).collect::<Result<Vec<_>>>()?;
        let loss = loss(&found)?;
        let mut of_loss = loss.backward()?;
        let seeds = found.iter().map(|x| of_loss.take(x));
        let seeds = seeds.collect::<anymesh_core::Result<Vec<_>>>()?;
        drop(found);
        Ok(Cached {
            loss: loss.detach(),
            gradients: self.backward_with(model, batches, &seeds, pass)?,
            of_loss,
        })
    }
}
