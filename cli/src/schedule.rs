//! `anymesh schedule`: a pipeline schedule, proven and timed.

use crate::{picture::PictureArgs, request::bad};
use anymesh::{
    Result,
    schedule::{Costs, Limits, Name, Placement, Schedule, Search, Timing, build, digits},
    show::{Show, rank_table},
};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};

/// Waits that are printed if not all are asked for.
const WAITS: usize = 8;

/// Arguments of `anymesh schedule`.
#[derive(Args)]
pub(crate) struct ScheduleCommand {
    /// fthenb, 1f1b, eager-1f1b, interleaved, looped-bfs, zbh1, interleaved-zb, zbv, dualpipev or
    /// searched; the names that torch and Paddle have for them do too.
    #[arg(required_unless_present_any = ["csv", "json", "paddle"], conflicts_with_all = ["csv", "json", "paddle"])]
    name: Option<String>,
    /// Stages of the pipeline.
    #[arg(long)]
    stages: Option<usize>,
    /// Ranks; stages / chunks if nothing is said.
    #[arg(long)]
    ranks: Option<usize>,
    /// Stages on each rank; one, or two where the schedule is for several.
    #[arg(long)]
    chunks: Option<usize>,
    /// Micro-batches of a step.
    #[arg(long)]
    micro: Option<usize>,
    /// How long passes and transfers take: f, i, w, b (a number, or one for each stage as in 1/1/2),
    /// transfer, and overlap, the hidden share of joined passes.
    #[arg(long, default_value = "f=1,i=1,w=1,transfer=0")]
    costs: String,
    /// The most activations that a rank may have alive: the search keeps to it, and any other schedule
    /// is refused where it does not.
    #[arg(long)]
    memory: Option<usize>,
    /// Where a searched schedule has its stages.
    #[arg(long, value_enum, default_value_t = Place::Loop)]
    placement: Place,
    /// Read an own schedule in torch's format: a line for each rank, cells such as 0F0, 0B0.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "paddle"])]
    csv: Option<PathBuf>,
    /// Read an own schedule from JSON with micros, owner and ranks.
    #[arg(long, value_name = "FILE", conflicts_with = "paddle")]
    json: Option<PathBuf>,
    /// Read Paddle's job lists, one for each rank, from JSON.
    #[arg(long, value_name = "FILE")]
    paddle: Option<PathBuf>,
    /// Put sends and receives into the lists.
    #[arg(long)]
    transfers: bool,
    /// Print only the schedule, or only when everything happens, in this format.
    #[arg(long, value_enum, value_name = "FORMAT")]
    print: Option<Format>,
    /// Print every wait, not only the longest.
    #[arg(long)]
    waits: bool,
    /// Columns of the chart.
    #[arg(long, default_value_t = 120)]
    width: usize,
    #[command(flatten)]
    picture: PictureArgs,
}

/// Where stages lie.
#[derive(Clone, Copy, ValueEnum)]
enum Place {
    /// Stage s on rank s % ranks.
    Loop,
    /// Down the ranks and up again.
    V,
}

/// What is printed alone.
#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// The schedule as torch has it.
    Csv,
    /// The schedule as JSON.
    Json,
    /// The schedule as Paddle's job lists.
    Paddle,
    /// Start and end of every action, as JSON.
    Timing,
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| bad(format!("cannot read {}: {error}", path.display())))
}

fn told<T>(result: anymesh::schedule::Result<T>) -> Result<T> {
    result.map_err(|error| bad(error.to_string()))
}

impl ScheduleCommand {
    pub(crate) fn run(&self) -> Result<()> {
        let costs: Costs = told(self.costs.parse())?;
        let mut schedule = self.schedule(&costs)?;
        if self.transfers {
            schedule = told(schedule.with_transfers())?;
        }
        let limits = self.memory.map_or(Limits::none(), Limits::live);
        told(schedule.prove(&limits))?;
        let timing = told(schedule.timing(&costs))?;
        let figures = || vec![timing.figure()];
        if self.picture.write(figures)? {
            return Ok(());
        }
        let text = match self.print {
            None => self.text(&schedule, &timing),
            Some(Format::Csv) => schedule.to_csv(),
            Some(Format::Json) => format!("{}\n", schedule.to_json()),
            Some(Format::Timing) => format!("{}\n", timing.to_json(&schedule)),
            Some(Format::Paddle) => {
                let jobs = told(schedule.to_paddle(self.transfers))?;
                format!("{}\n", serde_json::json!(jobs))
            }
        };
        print!("{text}");
        Ok(())
    }

    /// What was asked for: built in, searched, or read.
    fn schedule(&self, costs: &Costs) -> Result<Schedule> {
        if let Some(path) = &self.csv {
            return self.same(told(Schedule::from_csv(&read(path)?))?);
        }
        if let Some(path) = &self.json {
            return self.same(told(Schedule::from_json(&read(path)?))?);
        }
        if let Some(path) = &self.paddle {
            return self.same(told(Schedule::from_paddle(&read(path)?))?);
        }
        let name: Name = told(self.name.as_deref().unwrap_or_default().parse())?;
        let (ranks, chunks) = self.shape(name)?;
        let micros = self
            .micro
            .ok_or_else(|| bad("--micro is missing: how many micro-batches has a step?"))?;
        if name != Name::Searched {
            if matches!(self.placement, Place::V) && name.placement() != Placement::V {
                return Err(bad(format!(
                    "{name} places stages in a loop: only zbv, dualpipev and searched go with --placement v"
                )));
            }
            return told(build(&name.to_string(), ranks, chunks, micros));
        }
        let search = Search {
            placement: match self.placement {
                Place::Loop => Placement::Loop,
                Place::V => Placement::V,
            },
            costs: costs.clone(),
            live: self.memory.unwrap_or(ranks.saturating_mul(chunks)),
            ..Search::new(ranks, chunks, micros)
        };
        told(search.run())
    }

    /// Ranks and stages on each, from what was said of them.
    fn shape(&self, name: Name) -> Result<(usize, usize)> {
        let divided = |stages: usize, by: usize, what: &str| match by {
            0 => Err(bad(format!("--{what} must be at least 1"))),
            _ if stages % by != 0 => Err(bad(format!(
                "{stages} stages do not divide into {by} {what}: each rank has equally many stages"
            ))),
            _ => Ok(stages / by),
        };
        match (self.stages, self.ranks, self.chunks) {
            (None, None, _) => Err(bad(
                "--stages or --ranks is missing: how long is the pipeline?",
            )),
            (None, Some(ranks), chunks) => Ok((ranks, chunks.unwrap_or(name.chunks()))),
            (Some(stages), None, chunks) => {
                let chunks = chunks.unwrap_or(name.chunks());
                Ok((divided(stages, chunks, "chunks")?, chunks))
            }
            (Some(stages), Some(ranks), None) => Ok((ranks, divided(stages, ranks, "ranks")?)),
            (Some(stages), Some(ranks), Some(chunks)) => {
                match ranks.checked_mul(chunks) == Some(stages) {
                    true => Ok((ranks, chunks)),
                    false => Err(bad(format!(
                        "{ranks} ranks with {chunks} stages each do not make {stages} stages"
                    ))),
                }
            }
        }
    }

    /// An own schedule, if it is what was said of it.
    fn same(&self, own: Schedule) -> Result<Schedule> {
        for (what, said, has) in [
            ("stages", self.stages, own.stages()),
            ("ranks", self.ranks, own.ranks.len()),
            ("micro", self.micro, own.micros),
        ] {
            if let Some(said) = said.filter(|said| *said != has) {
                return Err(bad(format!("--{what} {said}, but the file has {has}")));
            }
        }
        Ok(own)
    }

    fn text(&self, schedule: &Schedule, timing: &Timing) -> String {
        let mut text = format!("{}\n\n", schedule.title());
        text += &timing.chart(schedule, self.width);
        text += &format!("\n{}\n", timing.summary());
        if let (Some(live), Ok(costs)) = (self.memory, self.costs.parse::<Costs>()) {
            text += &format!(
                "with at most {live} activations no schedule is shorter than {}\n",
                digits(schedule.bound_within(&costs, live))
            );
        }
        text.push('\n');
        text += &format!("{}\n", rank_table(timing).text());
        if !timing.waits.is_empty() {
            text += "\nwho waits for whom\n";
            for (rank, peer, long, times) in timing.waiting() {
                let waits = if times == 1 { "wait" } else { "waits" };
                let long = digits(long);
                text += &format!("  rank {rank} for rank {peer}: {long} in {times} {waits}\n");
            }
            let mut waits = timing.waits.clone();
            let long = |w: &anymesh::schedule::Wait| w.span.end - w.span.start;
            if !self.waits {
                waits.sort_by(|a, b| long(b).total_cmp(&long(a)));
                waits.truncate(WAITS);
                text += "the longest\n";
            }
            for wait in waits {
                text += &format!("  {wait}, from {}\n", digits(wait.span.start));
            }
        }
        text
    }
}
