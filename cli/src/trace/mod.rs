//! `anymesh trace`: what flight records say about a failure.

mod compare;
mod record;
#[cfg(test)]
mod tests;

use clap::Args;
use compare::{Comparison, Difference};
use record::{Call, Decision, Folder, Record};
use serde_json::{Value, json};
use std::{fmt::Write as _, io::Write as _, path::PathBuf, process::ExitCode};

/// Arguments of `anymesh trace`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 all records were read, 1 some are bad and the others are told, 2 there are none."
)]
pub(crate) struct Trace {
    /// The folder with the records, rank-N.json.
    folder: PathBuf,
    /// How many of the last calls of each process to show.
    #[arg(long, value_name = "N", default_value_t = 5)]
    last: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Text of a file as a terminal may have it.
fn plain(text: &str) -> String {
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// `0, 1, 5`; of many, the first.
fn list(numbers: &[usize]) -> String {
    let some: Vec<String> = numbers.iter().take(32).map(usize::to_string).collect();
    match numbers.len() > some.len() {
        true => format!(
            "{} and {} more",
            some.join(", "),
            numbers.len() - some.len()
        ),
        false => some.join(", "),
    }
}

/// `process 3`, `processes 1, 3`.
fn processes(numbers: &[usize]) -> String {
    let plural = if numbers.len() == 1 { "" } else { "es" };
    format!("process{plural} {}", list(numbers))
}

/// `all_gather f32[4] at src/x.rs:3:4 for matmul`.
fn call_text(call: &Call) -> String {
    let mut out = plain(&call.op);
    if !call.detail.is_empty() {
        let _ = write!(out, " {}", plain(&call.detail));
    }
    if !call.caller.is_empty() {
        let _ = write!(out, " at {}", plain(&call.caller));
    }
    if let Some(op) = &call.on_behalf_of {
        let _ = write!(out, " for {}", plain(op));
    }
    out
}

fn call_json(call: &Call) -> Value {
    json!({
        "n": call.n, "group": call.group, "in_group": call.in_group, "op": call.op, "detail": call.detail,
        "digest": call.digest, "caller": call.caller, "on_behalf_of": call.on_behalf_of,
        "state": call.state.name(), "waits_for": call.waits_for, "seconds": call.seconds,
    })
}

fn process_text(out: &mut String, record: &Record, last: usize) {
    let _ = write!(out, "\nprocess {}", record.process);
    if !record.host.is_empty() {
        let _ = write!(out, " on {}", plain(&record.host));
    }
    let _ = writeln!(out, " (pid {})", record.pid);
    if let Some(error) = &record.error {
        let _ = writeln!(out, "  error: {}", plain(error));
    }
    if record.calls.is_empty() {
        let _ = writeln!(out, "  no calls");
    }
    let hidden = record.calls.len().saturating_sub(last);
    for call in &record.calls[hidden..] {
        let time = call
            .seconds
            .map_or(String::new(), |s| format!(", {s:.3} s"));
        let waits = match call.waits_for.as_slice() {
            [] => String::new(),
            list_of => format!(" for {}", list(list_of)),
        };
        let _ = writeln!(
            out,
            "  call {}: {}, {}{waits}{time}; number {} of group [{}]",
            call.n,
            call_text(call),
            call.state.name(),
            call.in_group,
            list(&call.group),
        );
    }
}

fn decision_text(decision: &Decision) -> String {
    format!("{} at {}", plain(&decision.op), plain(&decision.caller))
}

fn difference_text<T>(
    what: &str,
    difference: &Difference<T>,
    say: impl Fn(&T) -> String,
) -> String {
    let (one, other) = (&difference.one, &difference.other);
    let earlier = match difference.or_earlier {
        true => " (what came before is not in the records: it may have begun earlier)",
        false => "",
    };
    format!(
        "{what}{earlier}:\n  process {}: {}\n  process {}: {}\n",
        one.0,
        say(&one.1),
        other.0,
        say(&other.1)
    )
}

fn text(folder: &Folder, found: &Comparison<'_>, last: usize) -> String {
    let mut out = format!(
        "{} processes, {} records\n",
        found.size,
        folder.records.len()
    );
    let mut versions: Vec<&str> = folder
        .records
        .values()
        .map(|r| r.version.as_str())
        .collect();
    versions.sort();
    versions.dedup();
    if versions.len() > 1 {
        let _ = writeln!(out, "different versions: {}", plain(&versions.join(", ")));
    }
    if !found.missing.is_empty() {
        let _ = writeln!(
            out,
            "no record of {}: killed, still running, or its record lies on another host",
            processes(&found.missing)
        );
    }
    for record in folder.records.values() {
        process_text(&mut out, record, last);
    }
    out.push('\n');
    for wait in &found.waits {
        let whom = match wait.call.waits_for.as_slice() {
            [] => "others".to_string(),
            list => processes(list),
        };
        let _ = writeln!(
            out,
            "process {} waits for {whom} in {}",
            wait.process,
            call_text(wait.call)
        );
    }
    for root in &found.roots {
        let how = match folder.records.get(root) {
            None => "left no record".to_string(),
            Some(record) => match &record.error {
                Some(error) => format!("failed: {}", plain(error)),
                None => "waits for nobody".to_string(),
            },
        };
        let _ = writeln!(out, "process {root} is waited for and {how}");
    }
    for behind in &found.behind {
        let call = behind.call;
        let _ = writeln!(
            out,
            "process {} came to call {} of group [{}], {}",
            behind.process,
            call.in_group,
            list(&call.group),
            call_text(call)
        );
        for (process, reached) in &behind.behind {
            let _ = match reached {
                Some(n) => writeln!(out, "  process {process} came to call {n} of it"),
                None => writeln!(out, "  process {process} has no call of it in its record"),
            };
        }
        if !behind.missing.is_empty() {
            let _ = writeln!(out, "  {} left no record", processes(&behind.missing));
        }
    }
    if let Some(difference) = &found.call {
        let one = difference.one.1;
        let what = format!(
            "the programs differ first in call {} of group [{}]",
            one.in_group,
            list(&one.group)
        );
        out += &difference_text(&what, difference, |call| call_text(call));
    }
    if let Some(difference) = &found.decision {
        let what = format!("decisions differ first in number {}", difference.one.1.n);
        out += &difference_text(&what, difference, |d| decision_text(d));
    }
    if found.call.is_none() && found.decision.is_none() {
        out += "as far as the records go, the programs do not differ\n";
    }
    for restart in &folder.restarts {
        let _ = writeln!(
            out,
            "records of a restart: anymesh trace {}",
            restart.display()
        );
    }
    out
}

fn difference_json<T>(difference: &Option<Difference<T>>, say: impl Fn(&T) -> Value) -> Value {
    let Some(difference) = difference else {
        return Value::Null;
    };
    let side = |(process, what): &(usize, T)| json!({ "process": process, "call": say(what) });
    json!({ "one": side(&difference.one), "other": side(&difference.other), "or_earlier": difference.or_earlier })
}

fn json_of(folder: &Folder, found: &Comparison<'_>, last: usize) -> Value {
    let processes: Vec<Value> = folder.records.values().map(|record| {
        let hidden = record.calls.len().saturating_sub(last);
        let calls: Vec<Value> = record.calls[hidden..].iter().map(call_json).collect();
        json!({ "process": record.process, "host": record.host, "pid": record.pid, "version": record.version, "error": record.error, "calls": calls })
    }).collect();
    let waits: Vec<Value> = found.waits.iter().map(|wait| {
        json!({ "process": wait.process, "waits_for": wait.call.waits_for, "call": call_json(wait.call) })
    }).collect();
    let behind: Vec<Value> = found.behind.iter().map(|behind| {
        let slow: Vec<Value> = behind.behind.iter().map(|(process, n)| json!({ "process": process, "in_group": n })).collect();
        json!({ "process": behind.process, "call": call_json(behind.call), "behind": slow, "missing": behind.missing })
    }).collect();
    let decision =
        |d: &&Decision| json!({ "n": d.n, "op": d.op, "caller": d.caller, "hash": d.hash });
    let errors: Vec<String> = folder.bad.iter().map(ToString::to_string).collect();
    json!({
        "size": found.size, "missing": found.missing, "processes": processes, "waits": waits, "roots": found.roots, "behind": behind,
        "first_difference": difference_json(&found.call, |call| call_json(call)),
        "first_decision": difference_json(&found.decision, decision),
        "errors": errors,
    })
}

impl Trace {
    pub(crate) fn run(&self) -> ExitCode {
        let folder = match record::read(&self.folder) {
            Ok(folder) => folder,
            Err(bad) => {
                match self.json {
                    true => print(&format!("{:#}\n", json!({ "error": bad.to_string() }))),
                    false => eprintln!("{bad}"),
                }
                return ExitCode::from(2);
            }
        };
        let found = compare::compare(&folder.records);
        if self.json {
            print(&format!("{:#}\n", json_of(&folder, &found, self.last)));
        } else {
            if !folder.records.is_empty() {
                print(&text(&folder, &found, self.last));
            }
            for bad in &folder.bad {
                eprintln!("{}", plain(&bad.to_string()));
            }
        }
        match (folder.bad.is_empty(), folder.records.is_empty()) {
            (true, _) => ExitCode::SUCCESS,
            (false, false) => ExitCode::FAILURE,
            (false, true) => ExitCode::from(2),
        }
    }
}

/// Prints to the standard output. A reader that closes it early, such as `head`, is no error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
