//! Flight records as processes write them.

use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt,
    io::Read,
    path::{Path, PathBuf},
};

/// The format that this reads.
const FORMAT: &str = "anymesh-flight-1";
/// The most processes of a run.
const MOST_PROCESSES: usize = 1 << 20;
/// A record is a ring of the last calls: a larger file is none.
const LARGEST: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Queued,
    Waiting,
    Done,
    Failed,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Waiting => "waiting",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// A call of a collective. Calls of the same group with the same number in it belong together.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Call {
    /// The number among all calls of the process.
    pub(super) n: u64,
    pub(super) group: Vec<usize>,
    pub(super) in_group: u64,
    pub(super) op: String,
    #[serde(default)]
    pub(super) detail: String,
    /// What the call is: the same in all processes of the group.
    pub(super) digest: String,
    #[serde(default)]
    pub(super) caller: String,
    #[serde(default)]
    pub(super) on_behalf_of: Option<String>,
    pub(super) state: State,
    #[serde(default)]
    pub(super) waits_for: Vec<usize>,
    #[serde(default)]
    pub(super) seconds: Option<f64>,
}

/// A decision of the program; `hash` is that of all decisions so far.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Decision {
    pub(super) n: u64,
    pub(super) op: String,
    #[serde(default)]
    pub(super) caller: String,
    pub(super) hash: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Record {
    format: String,
    pub(super) process: usize,
    pub(super) size: usize,
    #[serde(default)]
    pub(super) host: String,
    #[serde(default)]
    pub(super) pid: u64,
    #[serde(default)]
    pub(super) version: String,
    #[serde(default)]
    pub(super) error: Option<String>,
    pub(super) calls: Vec<Call>,
    #[serde(default)]
    pub(super) decisions: Vec<Decision>,
}

/// A file that is no record of this run, and why.
#[derive(Clone, Debug)]
pub(super) struct Bad {
    pub(super) file: PathBuf,
    pub(super) detail: String,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.detail)
    }
}

/// The text of a file as a record of process `number`.
pub(super) fn parse(text: &[u8], number: usize) -> Result<Record, String> {
    let mut record: Record = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    if record.format != FORMAT {
        return Err(format!("format: '{}' is not {FORMAT}", record.format));
    }
    if record.process != number {
        return Err(format!(
            "process: it is of process {}, and the name of the file says {number}",
            record.process
        ));
    }
    if record.size > MOST_PROCESSES {
        return Err(format!(
            "size: {} processes: at most {MOST_PROCESSES}",
            record.size
        ));
    }
    if record.process >= record.size {
        return Err(format!(
            "process: there is no process {} of {}",
            record.process, record.size
        ));
    }
    for (i, call) in record.calls.iter().enumerate() {
        for (field, list) in [("group", &call.group), ("waits_for", &call.waits_for)] {
            if let Some(other) = list.iter().find(|other| **other >= record.size) {
                return Err(format!(
                    "calls[{i}].{field}: there is no process {other} of {}",
                    record.size
                ));
            }
        }
        if !call.group.contains(&record.process) {
            return Err(format!(
                "calls[{i}].group: process {} is not in it",
                record.process
            ));
        }
    }
    // A ring may have been written from its middle.
    record.calls.sort_by_key(|call| call.n);
    record.decisions.sort_by_key(|decision| decision.n);
    Ok(record)
}

/// The records of a run, by process.
pub(super) type Records = BTreeMap<usize, Record>;

/// What a folder has.
pub(super) struct Folder {
    pub(super) records: Records,
    pub(super) bad: Vec<Bad>,
    /// Folders of restarts in it.
    pub(super) restarts: Vec<PathBuf>,
}

/// Reads every `rank-N.json`. A bad file does not hide the good ones.
pub(super) fn read(folder: &Path) -> Result<Folder, Bad> {
    let unreadable = |error: std::io::Error| Bad {
        file: folder.into(),
        detail: error.to_string(),
    };
    let (mut files, mut restarts) = (vec![], vec![]);
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name.starts_with("restart-") && entry.path().is_dir() {
            restarts.push(entry.path());
        }
        let number = name
            .strip_prefix("rank-")
            .and_then(|rest| rest.strip_suffix(".json"));
        if let Some(number) = number {
            files.push((number.parse::<usize>().ok(), entry.path()));
        }
    }
    files.sort();
    restarts.sort();
    let (mut records, mut bad): (Records, Vec<Bad>) = (BTreeMap::new(), vec![]);
    for (number, file) in files {
        let record = match number {
            Some(number) => load(&file).and_then(|text| parse(&text, number)),
            None => Err("its name has no number of a process".into()),
        };
        // Records of two runs would be compared as if they were of one.
        let first = records.values().next();
        let record = record.and_then(|record| match first {
            Some(first) if first.size != record.size => Err(format!(
                "size: {} processes, but {} in the record of process {}: they are of different runs",
                record.size, first.size, first.process
            )),
            _ => Ok(record),
        });
        match record {
            Ok(record) => drop(records.insert(record.process, record)),
            Err(detail) => bad.push(Bad { file, detail }),
        }
    }
    if records.is_empty() && bad.is_empty() {
        let detail = match restarts.first() {
            Some(restart) => format!(
                "no flight records (rank-N.json); those of a restart are in {}",
                restart.display()
            ),
            None => "no flight records (rank-N.json)".into(),
        };
        return Err(Bad {
            file: folder.into(),
            detail,
        });
    }
    Ok(Folder {
        records,
        bad,
        restarts,
    })
}

fn load(file: &Path) -> Result<Vec<u8>, String> {
    // What is no file, such as a pipe, might never end.
    let about = std::fs::metadata(file).map_err(|e| e.to_string())?;
    if !about.is_file() {
        return Err("it is no file".into());
    }
    let mut text = vec![];
    std::fs::File::open(file)
        .and_then(|f| f.take(LARGEST + 1).read_to_end(&mut text))
        .map_err(|e| e.to_string())?;
    match text.len() as u64 > LARGEST {
        true => Err(format!("more than {LARGEST} bytes")),
        false => Ok(text),
    }
}
