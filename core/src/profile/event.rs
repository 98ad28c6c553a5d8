//! What happened, and how it stands in a trace: the JSON that Perfetto and Chrome's tracing read.

use super::Behalf;
use anymesh_kernel::MemoryChange;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The track of communication.
const SENT: usize = 900;
/// The tracks of devices are from here on, a hundred thousand for each: one for every rank.
const DEVICES: usize = 1_000_000;

/// Something that happened.
pub(super) enum Event {
    /// A kernel was launched.
    Launched {
        on: Behalf,
        device: usize,
        kernel: &'static str,
        family: &'static str,
        outputs: String,
        start: Duration,
        host: Duration,
        done: Option<Duration>,
    },
    /// Bytes went between host and device while the host waited.
    Moved {
        on: Behalf,
        what: &'static str,
        bytes: u64,
        start: Duration,
        took: Duration,
    },
    /// A buffer was made or is gone.
    Memory {
        on: Behalf,
        kernel: Option<&'static str>,
        device: usize,
        at: Duration,
        change: MemoryChange,
    },
    /// Something was sent between ranks.
    Sent {
        on: Behalf,
        kind: &'static str,
        bytes: u64,
        axes: String,
        start: Duration,
        took: Duration,
    },
}

fn us(time: Duration) -> f64 {
    (time.as_nanos() as f64) / 1e3
}

impl Behalf {
    /// The op and the line that all of this is for.
    fn write(&self, own: Option<&'static str>, args: &mut Map<String, Value>) {
        if let Some(op) = self.caller.map(|(op, _)| op).or(own) {
            args.insert("op".into(), op.into());
        }
        if let Some((_, line)) = self.caller {
            let line = format!("{}:{}", line.file(), line.line());
            args.insert("line".into(), line.into());
        }
        if self.backward {
            args.insert("pass".into(), "backward".into());
        }
        if let Some(rank) = self.rank {
            args.insert("rank".into(), rank.into());
        }
    }
}

/// A piece of time on a track.
fn span(
    category: &str,
    name: &str,
    track: usize,
    [start, took]: [Duration; 2],
    args: Map<String, Value>,
) -> Value {
    json!({
        "ph": "X", "cat": category, "name": name, "tid": track, "ts": us(start), "dur": us(took), "args": args,
    })
}

impl Event {
    /// The track it is on, and what that is called.
    pub(super) fn tracks(&self, devices: &[String]) -> Vec<(usize, String)> {
        let host = |on: &Behalf| (on.thread as usize, format!("host, thread {}", on.thread));
        match self {
            Self::Launched {
                on, device, done, ..
            } => {
                let mut tracks = vec![host(on)];
                if done.is_some() {
                    let name = devices.get(*device).map_or("a device", String::as_str);
                    let name = match on.rank {
                        Some(rank) => format!("{name}, rank {rank}"),
                        None => name.to_string(),
                    };
                    tracks.push((kernel_track(*device, on), name));
                }
                tracks
            }
            Self::Moved { on, .. } => vec![host(on)],
            Self::Memory { .. } => vec![],
            Self::Sent { .. } => vec![(SENT, "communication".into())],
        }
    }

    /// The events of a trace that it is.
    pub(super) fn to_json(&self, devices: &[String]) -> Vec<Value> {
        let mut args = Map::new();
        match self {
            Self::Launched {
                on,
                device,
                kernel,
                family,
                outputs,
                start,
                host,
                done,
            } => {
                on.write(Some(kernel), &mut args);
                let mut all = args.clone();
                all.insert("kernel".into(), (*kernel).into());
                all.insert("family".into(), (*family).into());
                all.insert("outputs".into(), outputs.as_str().into());
                all.insert("host_us".into(), us(*host).into());
                let track = on.thread as usize;
                let Some(done) = done else {
                    return vec![span("launch", kernel, track, [*start, *host], all)];
                };
                vec![
                    span("launch", kernel, track, [*start, *host], args),
                    span(
                        "kernel",
                        &format!("{kernel} ({family})"),
                        kernel_track(*device, on),
                        [*start, *done],
                        all,
                    ),
                ]
            }
            Self::Moved {
                on,
                what,
                bytes,
                start,
                took,
            } => {
                on.write(None, &mut args);
                args.insert("bytes".into(), (*bytes).into());
                vec![span(
                    "moved",
                    what,
                    on.thread as usize,
                    [*start, *took],
                    args,
                )]
            }
            Self::Memory {
                on,
                kernel,
                device,
                at,
                change,
            } => {
                if change.made {
                    on.write(*kernel, &mut args);
                }
                args.insert("serial".into(), change.serial.into());
                args.insert("bytes".into(), change.bytes.into());
                args.insert("made".into(), change.made.into());
                args.insert("in_use".into(), change.in_use.into());
                args.insert("device".into(), (*device).into());
                let name = devices.get(*device).map_or("a device", String::as_str);
                vec![
                    json!({
                        "ph": "C", "name": format!("memory of {name}"), "ts": us(*at), "args": {"bytes": change.in_use},
                    }),
                    // Programs that draw traces pass over metadata that they do not know.
                    json!({"ph": "M", "name": "anymesh_memory", "ts": us(*at), "args": args}),
                ]
            }
            Self::Sent {
                on,
                kind,
                bytes,
                axes,
                start,
                took,
            } => {
                on.write(None, &mut args);
                args.insert("bytes".into(), (*bytes).into());
                args.insert("axes".into(), axes.as_str().into());
                vec![span("communication", kind, SENT, [*start, *took], args)]
            }
        }
    }
}

fn kernel_track(device: usize, on: &Behalf) -> usize {
    let rank = on.rank.map_or(0, |rank| rank as usize % 99_999 + 1);
    DEVICES + 100_000 * device + rank
}
