//! The configuration of a run as one struct: what `anymesh train` reads.

mod measured;
mod run;
mod start;
mod text;

pub use run::{
    BatchConfig, DataConfig, LoraConfig, MeshConfig, ModelChoice, PipelineConfig, RunConfig,
    SplitBy,
};
pub use start::Prepared;
pub use text::{parse, print, read};
