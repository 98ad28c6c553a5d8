//! `anymesh layout`: how to lay a model out on many ranks.

use crate::{picture::PictureArgs, request::bad};
use anymesh::{
    Error, Result,
    cost::CostModel,
    layout::{Layout, Llama, Report, Search},
    show::Show,
};
use clap::Args;
use std::path::{Path, PathBuf};

/// Arguments of `anymesh layout`.
#[derive(Args)]
pub(crate) struct LayoutCommand {
    /// Ranks of the mesh.
    #[arg(long)]
    ranks: usize,
    /// Ranks of a node; as the cost model says if nothing is said.
    #[arg(long)]
    node: Option<usize>,
    /// The machine: a preset such as h100, h100/hdr or a100-80, or a file such as cost.toml.
    #[arg(long)]
    cost: String,
    /// A config.json of Hugging Face for a model of the llama family.
    #[arg(long)]
    model: PathBuf,
    /// Tokens of a step, over all ranks.
    #[arg(long)]
    tokens: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 4096)]
    length: usize,
    /// Bytes of optimizer state for each parameter; 12 for Adam with f32 masters.
    #[arg(long, default_value_t = 12.0)]
    optimizer: f64,
    /// Only this many layers.
    #[arg(long)]
    layers: Option<usize>,
    /// Price this layout (a file) instead of looking for one.
    #[arg(long)]
    layout: Option<PathBuf>,
    /// Run so many of the best on a mesh without values, and compare what they send and hold with the
    /// closed form.
    #[arg(long, default_value_t = 1)]
    verify: usize,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| Error::Parse {
        what: "file",
        text: path.display().to_string(),
        expected: format!("a file that can be read ({error})"),
    })
}

impl LayoutCommand {
    pub(crate) fn run(&self) -> Result<()> {
        let mut cost = CostModel::named(&self.cost)?;
        if let (Some(ranks), Some(node)) = (self.node, &mut cost.node) {
            if ranks == 0 {
                return Err(bad("--node must be at least 1"));
            }
            node.ranks = ranks;
        }
        let mut model = Llama::from_config(&read(&self.model)?, self.length)?;
        model.layers = self.layers.unwrap_or(model.layers).max(1);
        if self.length == 0 || self.tokens == 0 || !self.tokens.is_multiple_of(self.length) {
            return Err(bad(format!(
                "--tokens {} must be a multiple of --length {}",
                self.tokens, self.length
            )));
        }
        let search = Search {
            model: &model,
            cost: &cost,
            ranks: self.ranks,
            sequences: self.tokens / self.length,
            optimizer: self.optimizer,
        };
        let report = match &self.layout {
            None => search.run()?,
            Some(path) => {
                let layout: Layout = read(path)?.parse()?;
                Report {
                    candidates: vec![search.price(&layout)?],
                    ..search.report()
                }
            }
        };
        let best: Vec<_> = report
            .candidates
            .iter()
            .filter(|c| c.fits)
            .take(self.verify)
            .collect();
        let checks = best
            .iter()
            .map(|c| search.verify(c))
            .collect::<Result<Vec<_>>>()?;
        let figures = || {
            let runs = best.iter().zip(&checks).map(|(candidate, check)| {
                let mut run = check.run.figure();
                run.title = format!("{}: {}", candidate.layout.summary(), run.title);
                run
            });
            [report.figure()].into_iter().chain(runs).collect()
        };
        if self.picture.write(figures)? {
            return Ok(());
        }
        if self.json {
            let runs: Vec<_> = checks.iter().map(|check| check.to_json()).collect();
            println!(
                "{}",
                serde_json::json!({"layouts": report.to_json(), "runs": runs})
            );
            return Ok(());
        }
        println!("{report}");
        for (candidate, check) in best.iter().zip(&checks) {
            println!("\n{}\n{check}", candidate.layout.summary());
        }
        Ok(())
    }
}
