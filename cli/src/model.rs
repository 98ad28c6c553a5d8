//! What commands that run a model share: where it goes and in which dtype.

use anymesh::{
    Mesh,
    train::{Build, Policy, Result},
};
use clap::Args;
use std::process::ExitCode;

/// Where a model goes.
#[derive(Args)]
pub(crate) struct Placed {
    /// Ranks to cut the model over, such as tp=3 or dp=2,tp=2; simulated on one device.
    #[arg(long)]
    mesh: Option<String>,
    /// The device: cpu, wgpu, cuda:0, ... (`anymesh doctor` lists them).
    #[arg(long)]
    device: Option<String>,
    /// What weights are kept and computed in: f32, bf16, f16 or f64.
    #[arg(long, default_value = "f32")]
    dtype: String,
}

impl Placed {
    /// What the model is built with.
    pub(crate) fn build(&self) -> Result<Build> {
        let device = match &self.device {
            Some(name) => anymesh::device(name)?,
            None => anymesh::default_device()?,
        };
        let mesh = match &self.mesh {
            Some(axes) => Mesh::new(axes, &device)?,
            None => Mesh::single(&device),
        };
        let mut policy = Policy::named(&self.dtype)?;
        // Nothing is trained: one copy of the weights is enough.
        policy.parameter = policy.compute;
        Ok(Build::new(&mesh, policy, 0))
    }
}

/// The end of a command.
pub(crate) fn finish(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
