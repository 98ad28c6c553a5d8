//! Traces as a recording writes them, and what they say.

use serde::Deserialize;
use serde_json::{Value, json};
use std::{fs, io, path::Path};

/// A piece of time.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) name: String,
    /// In microseconds, since the clock of the process began.
    pub(super) start: f64,
    pub(super) took: f64,
    pub(super) args: Args,
}

impl Span {
    pub(super) fn end(&self) -> f64 {
        self.start + self.took
    }
}

/// What a recording says beside times.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Args {
    pub(super) op: Option<String>,
    pub(super) line: Option<String>,
    pub(super) pass: Option<String>,
    pub(super) family: Option<String>,
    pub(super) kernel: Option<String>,
    pub(super) outputs: Option<String>,
    pub(super) host_us: Option<f64>,
    pub(super) bytes: u64,
    pub(super) serial: u64,
    pub(super) made: bool,
    pub(super) in_use: u64,
    pub(super) device: usize,
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) timing: Option<String>,
}

/// A buffer that was made or is gone.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) at: f64,
    pub(super) args: Args,
}

/// A device of a process.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) description: String,
    /// Bytes that were in use before anything was recorded.
    pub(super) in_use: u64,
}

/// What one process did.
#[derive(Clone, Debug, Default)]
pub(super) struct Process {
    pub(super) pid: u64,
    pub(super) name: String,
    /// Whether kernels were waited for.
    pub(super) waited: bool,
    pub(super) devices: Vec<Device>,
    /// Kernels, or their launches where they were not waited for.
    pub(super) kernels: Vec<Span>,
    /// Reads and uploads, which the host waits for.
    pub(super) moved: Vec<Span>,
    pub(super) sent: Vec<Span>,
    pub(super) memory: Vec<Change>,
}

impl Process {
    pub(super) fn is_empty(&self) -> bool {
        self.kernels.is_empty() && self.moved.is_empty() && self.memory.is_empty()
    }

    fn take(&mut self, event: &Value) {
        let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or("");
        let number = |key: &str| event.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let args = event.get("args").cloned().unwrap_or_default();
        let args: Args = serde_json::from_value(args).unwrap_or_default();
        let span = |args: Args| Span {
            name: text("name").into(),
            start: number("ts"),
            took: number("dur"),
            args,
        };
        match (text("ph"), text("cat"), text("name")) {
            ("M", _, "process_name") => self.name = args.name.unwrap_or_default(),
            ("M", _, "anymesh") => self.waited = args.timing.as_deref() == Some("done"),
            ("M", _, "anymesh_device") => self.devices.push(Device {
                name: args.name.unwrap_or_default(),
                description: args.description.unwrap_or_default(),
                in_use: args.in_use,
            }),
            ("M", _, "anymesh_memory") => self.memory.push(Change {
                at: number("ts"),
                args,
            }),
            ("X", "kernel", _) => self.kernels.push(span(args)),
            // Those of kernels that were waited for say nothing more than these.
            ("X", "launch", _) if args.family.is_some() => self.kernels.push(span(args)),
            ("X", "moved", _) => self.moved.push(span(args)),
            ("X", "communication", _) => self.sent.push(span(args)),
            _ => {}
        }
    }
}

/// The processes of events.
fn processes(events: &[Value]) -> Vec<Process> {
    let mut found: Vec<Process> = vec![];
    for event in events {
        let pid = event.get("pid").and_then(Value::as_u64).unwrap_or(0);
        let at = match found.iter().position(|process| process.pid == pid) {
            Some(at) => at,
            None => {
                found.push(Process {
                    pid,
                    ..Process::default()
                });
                found.len() - 1
            }
        };
        found[at].take(event);
    }
    found
}

/// The events of a text: a list, an object with one, or one event a line, of which the last may be
/// half.
fn events(text: &str) -> Option<Vec<Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Array(events)) => return Some(events),
        Ok(Value::Object(mut object)) => {
            return match object.remove("traceEvents") {
                Some(Value::Array(events)) => Some(events),
                _ => None,
            };
        }
        _ => {}
    }
    let mut lines = text.lines();
    if lines.next()?.trim() != "[" {
        return None;
    }
    let event = |line: &str| serde_json::from_str(line.trim().trim_end_matches(',')).ok();
    Some(lines.map_while(event).collect())
}

fn events_of(path: &Path) -> Result<Vec<Value>, String> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    events(&text).ok_or_else(|| {
        format!(
            "{} is no trace: it should be a JSON list of events, as `anymesh profile` writes it",
            path.display()
        )
    })
}

/// What the processes of a trace did.
pub(super) fn file(path: &Path) -> Result<Vec<Process>, String> {
    let found = processes(&events_of(path)?);
    match found.iter().all(Process::is_empty) {
        true => Err(format!(
            "{} has nothing that anymesh recorded: no kernels and no memory",
            path.display()
        )),
        false => Ok(found),
    }
}

/// The events of a process, and what they say.
pub(super) fn recorded(path: &Path) -> Result<(Vec<Value>, Vec<Process>), String> {
    let events = events_of(path)?;
    let found = processes(&events);
    Ok((events, found))
}

/// Writes the events of all processes into one trace, whose time begins with the first of them.
pub(super) fn write(path: &Path, processes: Vec<Vec<Value>>) -> io::Result<()> {
    let epoch = |events: &[Value]| {
        let of = |event: &Value| event.get("args")?.get("epoch_us")?.as_f64();
        events.iter().find_map(of)
    };
    let epochs = processes.iter().filter_map(|events| epoch(events));
    let first = epochs.fold(f64::INFINITY, f64::min);
    let mut all = vec![];
    for (i, mut events) in processes.into_iter().enumerate() {
        let shift = epoch(&events).map_or(0.0, |epoch| epoch - first);
        for event in &mut events {
            if let Some(time) = event.get("ts").and_then(Value::as_f64) {
                event["ts"] = json!(time + shift);
            }
        }
        if let Some(pid) = events.first().and_then(|event| event.get("pid")).cloned() {
            all.push(json!({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": i}}));
        }
        all.extend(events);
    }
    let trace = json!({"traceEvents": all, "displayTimeUnit": "ms"});
    fs::write(path, trace.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_whose_last_line_is_half_is_read_up_to_it() {
        let text = "[\n{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"add\",\"ts\":1,\"dur\":2,\"pid\":7,\"args\":{\"op\":\"add\"}},\n{\"ph\":\"X\",\"cat\":\"ker";
        let found = processes(&events(text).expect("a trace"));
        assert_eq!((found.len(), found[0].kernels.len()), (1, 1));
        assert_eq!(found[0].kernels[0].end(), 3.0);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        for text in ["", "{}", "hello\n", "{\"traceEvents\": 3}"] {
            assert!(events(text).is_none(), "{text}");
        }
    }
}
