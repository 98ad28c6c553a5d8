//! What the layers of a run cost, by a clock.

use super::{RunConfig, SplitBy};
use crate::{
    Build, Result,
    data::Batch,
    models::ModelConfig,
    objective::Language,
    pipeline::{LayerCosts, measure},
    trainer::LanguageModel,
};
use anymesh_core::{DType, Tensor};

/// Passes of each layer, of which the fastest counts.
const ROUNDS: usize = 3;

impl RunConfig {
    /// With stages by what layers cost on the devices of the run, where that is asked for. Every rank of
    /// `pp` measures its share of the layers, so a model that needs all of them is no larger here.
    pub(super) fn with_measured_costs(&self, config: &ModelConfig, build: Build) -> Result<Build> {
        let mesh = build.mesh().clone();
        let size = |name: &str| mesh.axis(name).map_or(1, |axis| mesh.size(axis));
        let given = self.pipeline.layers.is_some();
        if self.pipeline.split != SplitBy::Measured || size("pp") == 1 || given {
            return Ok(build);
        }
        let batch = self.batch.spec((size("dp") * size("ep")) as u64).solve()?;
        let rows = (batch.global / batch.accumulation.max(1)).max(1) as usize;
        let mut model = config.build(&build.clone().layer_by_layer())?;
        model.set_recompute(self.mesh.recompute);
        let language = Language {
            output: build.policy().output,
            ..Language::default()
        };
        let task = LanguageModel::new(model, language, self.batch.length);
        let shape = [rows, self.batch.length];
        let ids = Tensor::zeros(shape, DType::I32, (&mesh, "[@dp?@ep?, @cp?]"))?;
        let order = task.model.order(self.batch.length)?;
        let batch = Batch {
            order,
            ..Batch::new(ids.clone(), ids)
        };
        let seconds = measure(&task, &batch, &mesh, ROUNDS)?;
        let (first, rest) = seconds.split_first().unwrap_or((&0.0, &[]));
        let (last, layers) = rest.split_last().unwrap_or((&0.0, &[]));
        Ok(build.with_costs(LayerCosts {
            first: *first,
            layers: layers.to_vec(),
            last: *last,
        }))
    }
}
