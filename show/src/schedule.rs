//! Schedules of pipelines, and when everything in them happens.

use crate::{Figure, Gantt, Lane, Show, Span, Table, Unit};
use anymesh_schedule::{Costs, Kind, Schedule, Timing, digits};

/// What actions of a pipeline are, in the order of a chart's kinds.
pub(crate) const PASSES: [&str; 4] = [
    "forward",
    "backward",
    "gradients of inputs",
    "gradients of weights",
];

/// Who does what when, with how long ranks wait for each other.
///
/// ```
/// use anymesh_schedule::{Costs, build};
/// use anymesh_show::Show;
/// let timing = build("1f1b", 4, 1, 8)?.timing(&Costs::default())?;
/// assert!(timing.svg().unwrap().contains("1f1b: 4 stages on 4 ranks, 8 micro-batches"));
/// assert!(timing.text().contains("makespan 33, bound 27, idle 27.3 %, at most 4 activations alive"));
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
impl Show for Timing {
    fn figure(&self) -> Figure {
        let schedule = &self.schedule;
        let lanes = (0..schedule.ranks.len()).map(|rank| Lane {
            name: format!("rank {rank}"),
            spans: spans(self, rank),
        });
        let chart = Gantt {
            title: schedule.title(),
            unit: Unit::Count,
            kinds: PASSES.map(String::from).to_vec(),
            lanes: lanes.collect(),
        };
        let figure = chart
            .figure()
            .note(format!("{}.", self.summary()))
            .table(rank_table(self));
        match self.waits.is_empty() {
            true => figure,
            false => figure.table(waits(self)),
        }
    }

    fn text(&self) -> String {
        let table = rank_table(self).text();
        format!(
            "{}\n{}\n{}\n{table}",
            self.schedule.title(),
            self.chart(&self.schedule, 80).trim_end(),
            self.summary()
        )
    }
}

/// Its timing with passes of equal length, backward ones twice as long; or what is wrong with it.
impl Show for Schedule {
    fn figure(&self) -> Figure {
        self.timing(&Costs::default()).figure()
    }

    fn text(&self) -> String {
        self.timing(&Costs::default()).text()
    }
}

/// The passes of a rank.
fn spans(timing: &Timing, rank: usize) -> Vec<Span> {
    let schedule = &timing.schedule;
    let several = schedule.stages() > schedule.ranks.len();
    let passes = schedule.ranks[rank].iter().zip(&timing.spans[rank]);
    let spans = passes.filter_map(|(action, span)| {
        let kind = match action.kind {
            Kind::F => 0,
            Kind::B => 1,
            Kind::I => 2,
            Kind::W => 3,
            _ => return None,
        };
        let label = match several {
            true => format!("{}/{}", action.stage, action.micro),
            false => action.micro.to_string(),
        };
        Some(Span {
            start: span.start,
            end: span.end,
            label,
            kind,
        })
    });
    spans.collect()
}

/// A row for each rank: its stages, how long it works, what it has alive.
pub fn rank_table(timing: &Timing) -> Table {
    let heads = ["rank", "stages", "busy", "idle", "activations"];
    let mut table = Table::new("", &heads).numbers(&[0, 2, 3, 4]);
    for rank in 0..timing.schedule.ranks.len() {
        let own = timing.schedule.stages_of(rank);
        let stages: Vec<String> = own.iter().map(usize::to_string).collect();
        table.row([
            rank.to_string(),
            stages.join(", "),
            digits(timing.busy[rank]),
            digits(timing.bubble[rank]),
            timing.peak[rank].to_string(),
        ]);
    }
    table
}

/// For each pair of ranks how long and how often one waits for the other.
fn waits(timing: &Timing) -> Table {
    let heads = ["rank", "for rank", "how long", "waits"];
    let mut table = Table::new("who waits for whom", &heads).numbers(&[0, 1, 2, 3]);
    for (rank, peer, long, times) in timing.waiting() {
        table.row([
            rank.to_string(),
            peer.to_string(),
            digits(long),
            times.to_string(),
        ]);
    }
    table
}
