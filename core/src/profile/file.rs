//! The file of a recording: events are kept for a moment, and written by a thread of its own.

use super::{Event, first_serial, lock};
use crate::{Device, Timing};
use anymesh_kernel::clock;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Write},
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// How long events are kept before they are written.
const MOMENT: Duration = Duration::from_millis(100);

/// The file, and what is on the way to it.
#[derive(Debug)]
pub(super) struct Trace {
    timing: Timing,
    kept: Mutex<Vec<Event>>,
    out: Mutex<Out>,
}

#[derive(Debug)]
struct Out {
    file: File,
    devices: Vec<String>,
    /// The tracks that have their names.
    named: BTreeSet<usize>,
    error: Option<io::Error>,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

/// The rank that a launcher says this process is.
fn rank() -> Option<String> {
    ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
}

impl Trace {
    pub(super) fn create(path: &Path, timing: Timing) -> io::Result<Arc<Self>> {
        let mut file = File::create(path)?;
        file.write_all(b"[\n")?;
        let out = Out {
            file,
            devices: vec![],
            named: BTreeSet::new(),
            error: None,
        };
        let trace = Arc::new(Self {
            timing,
            kept: Mutex::default(),
            out: Mutex::new(out),
        });
        let program = std::env::args().next().unwrap_or_default();
        let program = Path::new(&program).file_name().unwrap_or_default();
        let program = program.to_string_lossy();
        let process = match rank() {
            Some(rank) => format!("rank {rank}: {program}"),
            None => program.to_string(),
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let epoch = since.unwrap_or_default().saturating_sub(clock());
        let timing = match timing {
            Timing::Done => "done",
            Timing::Launch => "launch",
        };
        trace.line(&[
            json!({"ph": "M", "name": "process_name", "args": {"name": process}}),
            json!({"ph": "M", "name": "anymesh", "args": {
                "version": 1, "timing": timing, "epoch_us": epoch.as_micros() as u64, "first_serial": first_serial(),
            }}),
        ]);
        let weak = Arc::downgrade(&trace);
        std::thread::Builder::new()
            .name("anymesh-profile".into())
            .spawn(move || {
                loop {
                    std::thread::sleep(MOMENT);
                    match weak.upgrade() {
                        Some(trace) => trace.write(),
                        None => return,
                    }
                }
            })?;
        Ok(trace)
    }

    pub(super) fn timing(&self) -> Timing {
        self.timing
    }

    /// Gives a device a number and a name.
    pub(super) fn add_device(&self, device: &Device, number: usize) -> usize {
        let mut out = lock(&self.out);
        out.devices.push(device.name().to_string());
        let what = device.backend().capabilities().description.clone();
        let in_use = device.memory().in_use;
        out.line(&[
            json!({"ph": "M", "name": "anymesh_device", "ts": clock().as_nanos() as f64 / 1e3, "args": {
                "device": number, "name": device.name(), "description": what, "in_use": in_use,
            }}),
        ]);
        number
    }

    pub(super) fn push(&self, event: Event) {
        lock(&self.kept).push(event);
    }

    fn line(&self, events: &[Value]) {
        lock(&self.out).line(events);
    }

    /// Writes everything that is kept.
    pub(super) fn write(&self) {
        let mut out = lock(&self.out);
        let events = std::mem::take(&mut *lock(&self.kept));
        if events.is_empty() {
            return;
        }
        let mut lines = vec![];
        for event in &events {
            for (track, name) in event.tracks(&out.devices) {
                if out.named.insert(track) {
                    lines.push(json!({"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}}));
                    lines.push(json!({"ph": "M", "name": "thread_sort_index", "tid": track, "args": {"sort_index": track}}));
                }
            }
            lines.extend(event.to_json(&out.devices));
        }
        out.line(&lines);
    }

    /// What went wrong, once.
    pub(super) fn error(&self) -> io::Result<()> {
        lock(&self.out).error.take().map_or(Ok(()), Err)
    }
}

impl Out {
    /// Writes events, one a line.
    fn line(&mut self, events: &[Value]) {
        let process = std::process::id();
        let mut text = String::new();
        for event in events {
            let mut event = event.clone();
            event["pid"] = process.into();
            text += &event.to_string();
            text += ",\n";
        }
        if let Err(error) = self.file.write_all(text.as_bytes()) {
            self.error.get_or_insert(error);
        }
    }
}
