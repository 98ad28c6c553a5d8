//! Estimates as text, as JSON, and as lanes of a timeline.

use crate::{Error, Estimate, Found, Ranked, Result, Stage, compare};
use anymesh_schedule::Kind;
use serde_json::{Value, json};
use std::fmt;

/// A rank of the pipeline in a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// What it does, one after the other.
    pub spans: Vec<Event>,
}

/// Something that a rank does.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// When it begins, in seconds.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// Which of [`KINDS`] it is.
    pub kind: usize,
    /// The micro-batch, with the stage before it where a rank has several.
    pub label: String,
}

/// What the events of a timeline are.
pub const KINDS: [&str; 6] = [
    "forward",
    "backward",
    "gradients of inputs",
    "gradients of weights",
    "data parallel",
    "optimizer",
];

/// Bytes as a person reads them.
pub fn bytes_text(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{value} B"),
        _ => format!("{value:.1} {}", units[unit]),
    }
}

/// Seconds as a person reads them.
pub fn seconds_text(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

impl Estimate {
    /// As JSON, without the timeline.
    pub fn to_json(&self) -> Result<Value> {
        serde_json::to_value(self).map_err(|error| Error::Parse {
            what: "the estimate".into(),
            detail: error.to_string(),
        })
    }

    /// Who does what when.
    pub fn lanes(&self) -> Vec<Lane> {
        let several = self.layout.chunks > 1;
        let step = self.seconds;
        let lane = |rank: usize| {
            let passes = self.schedule.ranks[rank]
                .iter()
                .zip(&self.timing.spans[rank]);
            let mut spans: Vec<Event> = passes
                .filter_map(|(action, span)| {
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
                    Some(Event {
                        start: span.start,
                        end: span.end,
                        kind,
                        label,
                    })
                })
                .collect();
            let done = spans.iter().map(|s| s.end).fold(0.0, f64::max);
            let update = step - self.spent.optimizer;
            let ends = [(done, update, 4, "dp"), (update, step, 5, "")];
            spans.extend(ends.iter().filter(|e| e.1 > e.0).map(|e| Event {
                start: e.0,
                end: e.1,
                kind: e.2,
                label: e.3.into(),
            }));
            Lane {
                name: format!("pipeline rank {rank}"),
                spans,
            }
        };
        (0..self.schedule.ranks.len()).map(lane).collect()
    }
}

impl Estimate {
    /// What stages do with one micro-batch, those that are alike once.
    fn write_stages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nstages, with one micro-batch")?;
        writeln!(
            f,
            "  {:>9} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "stage", "layers", "forward", "backward", "kept", "needs f", "needs b", "received"
        )?;
        for (from, to, stage) in self.classes() {
            let name = match from == to {
                true => from.to_string(),
                false => format!("{from} to {to}"),
            };
            writeln!(
                f,
                "  {name:>9} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
                stage.layers,
                seconds_text(stage.passes.f.total()),
                seconds_text(stage.passes.backward()),
                bytes_text(stage.kept + stage.ends),
                bytes_text(stage.forward),
                bytes_text(stage.backward),
                bytes_text(stage.bytes.total()),
            )?;
        }
        Ok(())
    }

    /// Runs of stages that are alike: the first, the last, and what each of them does.
    pub fn classes(&self) -> Vec<(usize, usize, &Stage)> {
        let mut classes: Vec<(usize, usize, &Stage)> = vec![];
        for (at, stage) in self.stages.iter().enumerate() {
            let alike = |other: &Stage| {
                let plain = |s: &Stage| Stage {
                    rank: 0,
                    ..s.clone()
                };
                plain(other) == plain(stage)
            };
            match classes.last_mut().filter(|c| alike(c.2)) {
                Some(class) => class.1 = at,
                None => classes.push((at, at, stage)),
            }
        }
        classes
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = &self.layout;
        writeln!(
            f,
            "{} on {} {}: {}",
            self.model,
            self.ranks,
            self.machine,
            layout.summary()
        )?;
        writeln!(
            f,
            "{} sequences of {} tokens, {} micro-batches, {}",
            layout.batch,
            layout.sequence,
            self.micros,
            stages(&self.split)
        )?;
        writeln!(f, "by {}", self.source)?;
        writeln!(f)?;
        writeln!(f, "step            {}", seconds_text(self.seconds))?;
        writeln!(f, "tokens/s        {:.0}", self.tokens_per_second)?;
        let each = self.model_flops / self.seconds / self.ranks as f64 / 1e12;
        writeln!(
            f,
            "MFU             {:.1} % ({each:.0} TFLOP/s of a GPU)",
            self.mfu * 100.0
        )?;
        let again = (self.hardware_flops / self.model_flops - 1.0) * 100.0;
        writeln!(
            f,
            "FLOPs           {:.4e}, computed again {again:.1} %",
            self.model_flops
        )?;
        writeln!(f, "bubble          {:.1} %", self.bubble * 100.0)?;
        writeln!(
            f,
            "communication   {} that nothing hides, {:.1} % of the step",
            seconds_text(self.exposed),
            self.exposed / self.seconds * 100.0
        )?;
        writeln!(f, "\nwhere the busiest rank's time goes")?;
        for (name, seconds) in self.spent.parts().iter().filter(|p| p.1 > 0.0) {
            let share = seconds / self.seconds * 100.0;
            writeln!(
                f,
                "  {name:<13} {:>10}  {share:>5.1} %",
                seconds_text(*seconds)
            )?;
        }
        writeln!(f, "\nbytes that a rank receives")?;
        for (name, bytes) in self.bytes.parts().into_iter().filter(|p| p.1 > 0.0) {
            writeln!(f, "  {name:<13} {:>10}", bytes_text(bytes))?;
        }
        self.write_stages(f)?;
        writeln!(
            f,
            "\nmemory, of {} that may be used",
            bytes_text(self.usable)
        )?;
        writeln!(
            f,
            "  {:>4} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10} {:>10}  at",
            "rank",
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "ends",
            "working",
            "total"
        )?;
        for m in &self.memory {
            // In the middle ranks differ little.
            let long = self.memory.len() > 8;
            if long && m.rank >= 3 && m.rank + 3 < self.memory.len() {
                if m.rank == 3 {
                    writeln!(f, "   ...")?;
                }
                continue;
            }
            writeln!(
                f,
                "  {:>4} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10} {:>10}  {} ({})",
                m.rank,
                bytes_text(m.parameters),
                bytes_text(m.gradients),
                bytes_text(m.optimizer),
                bytes_text(m.activations),
                bytes_text(m.ends),
                bytes_text(m.working),
                bytes_text(m.total),
                seconds_text(m.at),
                m.during
            )?;
        }
        if !self.fits {
            writeln!(f, "it does not fit: see the totals above")?;
        }
        Ok(())
    }
}

impl Found {
    /// As JSON: the best ones with why, and how many there were.
    pub fn to_json(&self) -> Result<Value> {
        let each = self.ranked.iter().map(|ranked| {
            let estimate = ranked.estimate.to_json()?;
            let mut all = json!({"estimate": estimate, "why": ranked.why, "limit": ranked.limit});
            match &ranked.real {
                None => {}
                Some(Ok(real)) => {
                    all["real"] = real.to_json()?;
                    all["comparison"] = json!(compare(&ranked.estimate, real).rows);
                }
                Some(Err(why)) => all["not_run"] = json!(why),
            }
            Ok(all)
        });
        let layouts: Vec<Value> = each.collect::<Result<_>>()?;
        Ok(json!({"candidates": self.candidates, "fitting": self.fitting, "layouts": layouts}))
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} layouts priced, {} fit into memory",
            self.candidates, self.fitting
        )?;
        for (place, ranked) in self.ranked.iter().enumerate() {
            write!(f, "\n{}. {ranked}", place + 1)?;
        }
        Ok(())
    }
}

impl fmt::Display for Ranked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.estimate)?;
        writeln!(f, "why")?;
        for line in &self.why {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "what holds it back most\n  {}", self.limit)?;
        if let Some(real) = &self.real {
            writeln!(f, "by running it")?;
            match real {
                Ok(real) => write!(f, "{}", compare(&self.estimate, real))?,
                Err(why) => writeln!(f, "  {why}")?,
            }
        }
        Ok(())
    }
}

/// How layers are split, in words.
fn stages(split: &[usize]) -> String {
    let (least, most) = (
        split.iter().min().unwrap_or(&0),
        split.iter().max().unwrap_or(&0),
    );
    let layers = match least == most {
        true => format!("{most} layers"),
        false => format!("{least} to {most} layers"),
    };
    match split.len() {
        1 => format!("one stage of {layers}"),
        n => format!("{n} stages of {layers}"),
    }
}
