//! What a trace says, as tables.

use super::read::{Process, Span};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
};

/// Things that are alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) count: usize,
    pub(super) ms: f64,
    #[serde(skip_serializing_if = "is_none")]
    pub(super) bytes: u64,
}

fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

/// One process in numbers.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    name: String,
    pid: u64,
    devices: Vec<String>,
    /// Whether kernels were waited for.
    waited: bool,
    /// From the first thing that was recorded to the last.
    whole_ms: f64,
    launches: usize,
    /// How long kernels ran, if they were waited for.
    kernels_ms: f64,
    /// How long the host took to launch them.
    launching_ms: f64,
    /// Times between kernels, if they were waited for: the host works and the device does not.
    gaps_ms: f64,
    reads_ms: f64,
    uploads_ms: f64,
    communication_ms: f64,
    communication_bytes: u64,
    /// The most memory that tensors held, of each device.
    peaks: Vec<Peak>,
}

/// The memory of a device when it was fullest.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Peak {
    device: String,
    bytes: u64,
    at_ms: f64,
    /// What was alive then, by the op and the line that made it.
    alive: Vec<Row>,
    /// The bytes in use at moments of the run.
    over_time: Vec<[f64; 2]>,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    processes: Vec<Summary>,
    by_op: Vec<Row>,
    by_kernel: Vec<Row>,
    by_line: Vec<Row>,
    /// Times in which the device had nothing to do, by the line that launched next.
    gaps: Vec<Row>,
    communication: Vec<Row>,
}

/// Sums by name.
#[derive(Default)]
struct Sums(HashMap<String, Row>);

impl Sums {
    fn add(&mut self, name: String, us: f64, bytes: u64) {
        let row = self.0.entry(name.clone()).or_insert_with(|| Row {
            name,
            ..Row::default()
        });
        row.count += 1;
        row.ms += us / 1e3;
        row.bytes += bytes;
    }

    /// The longest first; those of equal length by name.
    fn rows(self, by: impl Fn(&Row) -> f64) -> Vec<Row> {
        let mut rows: Vec<Row> = self.0.into_values().collect();
        rows.sort_by(|a, b| by(b).total_cmp(&by(a)).then_with(|| a.name.cmp(&b.name)));
        rows
    }
}

fn op(span: &Span) -> String {
    let op = span.args.op.as_deref().unwrap_or(&span.name);
    match span.args.pass {
        Some(_) => format!("{op}, backward"),
        None => op.to_string(),
    }
}

fn line(span: &Span) -> String {
    let line = span.args.line.as_deref().unwrap_or("(no line is known)");
    format!("{line} {}", op(span))
}

/// Where an op was called, without what stands before the package.
fn made_by(op: Option<&String>, line: Option<&String>) -> String {
    let op = op.map_or("something else", String::as_str);
    match line {
        Some(line) => format!("{op} {line}"),
        None => op.to_string(),
    }
}

fn peak(process: &Process, device: usize, start: f64, end: f64) -> Option<Peak> {
    let known = process.devices.get(device)?;
    let own: Vec<_> = (process.memory.iter())
        .filter(|change| change.args.device == device)
        .collect();
    let at = (0..own.len()).max_by_key(|i| (own[*i].args.in_use, std::cmp::Reverse(*i)))?;
    let mut alive: BTreeMap<u64, (String, u64)> = BTreeMap::new();
    for change in &own[..=at] {
        let args = &change.args;
        match args.made {
            true => {
                let name = made_by(args.op.as_ref(), args.line.as_ref());
                alive.insert(args.serial, (name, args.bytes));
            }
            false => {
                alive.remove(&args.serial);
            }
        }
    }
    let mut sums = Sums::default();
    for (name, bytes) in alive.into_values() {
        sums.add(name, 0.0, bytes);
    }
    let mut rows = sums.rows(|row| row.bytes as f64);
    let seen: u64 = rows.iter().map(|row| row.bytes).sum();
    let bytes = own[at].args.in_use;
    if bytes > seen {
        rows.push(Row {
            name: "what was there before the recording".into(),
            bytes: bytes - seen,
            ..Row::default()
        });
    }
    Some(Peak {
        device: known.name.clone(),
        bytes,
        at_ms: (own[at].at - start) / 1e3,
        alive: rows,
        over_time: over_time(&own, known.in_use, start, end),
    })
}

/// The most that was in use in each of some equal pieces of time.
fn over_time(changes: &[&super::read::Change], before: u64, start: f64, end: f64) -> Vec<[f64; 2]> {
    const PIECES: usize = 32;
    let piece = (end - start).max(1.0) / PIECES as f64;
    let (mut now, mut next) = (before, 0);
    let mut out = vec![];
    for i in 0..PIECES {
        let until = start + piece * (i + 1) as f64;
        let mut most = now;
        while next < changes.len() && (changes[next].at < until || i + 1 == PIECES) {
            now = changes[next].args.in_use;
            most = most.max(now);
            next += 1;
        }
        out.push([(until - start) / 1e3, most as f64]);
    }
    out
}

impl Report {
    pub(super) fn of(processes: &[Process]) -> Self {
        let (mut by_op, mut by_kernel) = (Sums::default(), Sums::default());
        let (mut by_line, mut gaps) = (Sums::default(), Sums::default());
        let mut communication = Sums::default();
        let mut summaries = vec![];
        for process in processes.iter().filter(|process| !process.is_empty()) {
            let mut kernels: Vec<&Span> = process.kernels.iter().collect();
            kernels.sort_by(|a, b| a.start.total_cmp(&b.start));
            let mut idle = 0.0;
            let mut busy_until: Option<f64> = None;
            for span in &kernels {
                by_op.add(op(span), span.took, 0);
                let family = span.args.family.as_deref().unwrap_or("");
                let kernel = span.args.kernel.as_deref().unwrap_or(&span.name);
                let outputs = span.args.outputs.as_deref().unwrap_or("");
                by_kernel.add(format!("{kernel} ({family}) {outputs}"), span.took, 0);
                by_line.add(line(span), span.took, 0);
                if let (true, Some(until)) = (process.waited, busy_until) {
                    let gap = (span.start - until).max(0.0);
                    idle += gap;
                    gaps.add(line(span), gap, 0);
                }
                busy_until = Some(busy_until.map_or(span.end(), |until| until.max(span.end())));
            }
            for span in &process.sent {
                let line = span.args.line.as_deref().unwrap_or("");
                let name = format!("{} for {} {line}", span.name, op(span));
                communication.add(name.trim_end().into(), span.took, span.args.bytes);
            }
            summaries.push(summary(process, &kernels, idle));
        }
        let time = |row: &Row| row.ms;
        Self {
            processes: summaries,
            by_op: by_op.rows(time),
            by_kernel: by_kernel.rows(time),
            by_line: by_line.rows(time),
            gaps: gaps.rows(time),
            communication: communication.rows(time),
        }
    }

    /// As text, with `top` rows in each table.
    pub(super) fn text(&self, top: usize) -> String {
        let mut out = String::new();
        for process in &self.processes {
            process.write(&mut out);
        }
        let waited = self.processes.iter().all(|process| process.waited);
        let of = match waited {
            true => "time of kernels",
            false => "time of the host to launch",
        };
        table(&mut out, &format!("{of}, by op"), &self.by_op, top);
        table(&mut out, &format!("{of}, by kernel"), &self.by_kernel, top);
        table(&mut out, &format!("{of}, by line"), &self.by_line, top);
        if waited {
            table(
                &mut out,
                "gaps, by the line that launched next",
                &self.gaps,
                top,
            );
        }
        if !self.communication.is_empty() {
            table(&mut out, "communication", &self.communication, top);
        }
        for process in &self.processes {
            for peak in &process.peaks {
                peak.write(&process.name, &mut out, top);
            }
        }
        out
    }
}

fn summary(process: &Process, kernels: &[&Span], gaps: f64) -> Summary {
    let all = || {
        kernels
            .iter()
            .copied()
            .chain(&process.moved)
            .chain(&process.sent)
    };
    let memory = process.memory.iter().map(|change| change.at);
    let start = (all().map(|span| span.start).chain(memory.clone())).fold(f64::INFINITY, f64::min);
    let end = all().map(Span::end).chain(memory).fold(start, f64::max);
    let ms = |spans: &mut dyn Iterator<Item = &Span>| spans.fold(0.0, |sum, s| sum + s.took) / 1e3;
    let moved = |what: &str| ms(&mut process.moved.iter().filter(|span| span.name == what));
    let launching = kernels.iter().filter_map(|span| span.args.host_us);
    Summary {
        name: process.name.clone(),
        pid: process.pid,
        devices: (process.devices.iter())
            .map(|device| format!("{} ({})", device.name, device.description))
            .collect(),
        waited: process.waited,
        whole_ms: (end - start) / 1e3,
        launches: kernels.len(),
        kernels_ms: match process.waited {
            true => ms(&mut kernels.iter().copied()),
            false => 0.0,
        },
        launching_ms: launching.sum::<f64>() / 1e3,
        gaps_ms: gaps / 1e3,
        reads_ms: moved("read"),
        uploads_ms: moved("upload"),
        communication_ms: ms(&mut process.sent.iter()),
        communication_bytes: process.sent.iter().map(|span| span.args.bytes).sum(),
        peaks: (0..process.devices.len())
            .filter_map(|device| peak(process, device, start, end))
            .collect(),
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

impl Summary {
    fn write(&self, out: &mut String) {
        let whole = self.whole_ms.max(1e-9);
        let share = |ms: f64| format!("{ms:.3} ms ({:.0} %)", 100.0 * ms / whole);
        let _ = writeln!(
            out,
            "{} (process {}) on {}",
            self.name,
            self.pid,
            self.devices.join(", ")
        );
        let _ = writeln!(out, "  {:.3} ms, {} launches", self.whole_ms, self.launches);
        match self.waited {
            true => {
                let _ = writeln!(
                    out,
                    "  kernels {}: each was waited for, so the program took longer than it does by itself",
                    share(self.kernels_ms)
                );
                let _ = writeln!(
                    out,
                    "  gaps between kernels {}: the host worked, the device did not",
                    share(self.gaps_ms)
                );
            }
            false => {
                let _ = writeln!(
                    out,
                    "  nothing was waited for: times are those of the host, a GPU works beside it"
                );
            }
        }
        let _ = writeln!(out, "  launching {}", share(self.launching_ms));
        let _ = writeln!(
            out,
            "  uploads {}, reads {}",
            share(self.uploads_ms),
            share(self.reads_ms)
        );
        if self.communication_bytes > 0 {
            let _ = writeln!(
                out,
                "  communication {}, {:.3} MiB to the worst rank",
                share(self.communication_ms),
                mib(self.communication_bytes)
            );
        }
    }
}

impl Peak {
    fn write(&self, process: &str, out: &mut String, top: usize) {
        let _ = writeln!(
            out,
            "\nmemory of {} in {process}: at most {:.3} MiB, after {:.3} ms",
            self.device,
            mib(self.bytes),
            self.at_ms
        );
        let most = self.bytes.max(1) as f64;
        let level = |[_, bytes]: &[f64; 2]| {
            const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
            LEVELS[((bytes / most * 8.0).ceil() as usize).min(8)]
        };
        let _ = writeln!(
            out,
            "  over time |{}|",
            self.over_time.iter().map(level).collect::<String>()
        );
        let _ = writeln!(
            out,
            "       MiB  buffers  alive at the peak, by who made it"
        );
        for row in self.alive.iter().take(top) {
            let _ = writeln!(out, "{:10.3} {:8}  {}", mib(row.bytes), row.count, row.name);
        }
        more(out, self.alive.len(), top);
    }
}

fn more(out: &mut String, rows: usize, top: usize) {
    if rows > top {
        let _ = writeln!(out, "           and {} more (--top)", rows - top);
    }
}

fn table(out: &mut String, title: &str, rows: &[Row], top: usize) {
    let all: f64 = rows.iter().map(|row| row.ms).sum();
    let _ = writeln!(out, "\n{title}\n        ms   share   count");
    for row in rows.iter().take(top) {
        let share = 100.0 * row.ms / all.max(1e-12);
        let _ = write!(
            out,
            "{:10.3} {share:5.1} % {:7}  {}",
            row.ms,
            row.count,
            row.name.trim_end()
        );
        if row.bytes > 0 {
            let _ = write!(out, ", {:.3} MiB", mib(row.bytes));
        }
        out.push('\n');
    }
    more(out, rows.len(), top);
}
