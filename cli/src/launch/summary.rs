//! What `launch` itself says: who failed first, and where the records are.

use super::{LaunchError, attempt::Outcome, hosts::Host};
use std::{collections::BTreeMap, io::Write, path::Path};

/// One line of `launch` itself.
pub(super) fn say(text: &str) {
    // Where nobody reads, nobody is told.
    let _ = std::io::stderr()
        .lock()
        .write_all(format!("anymesh launch: {text}\n").as_bytes());
}

/// Whether a file is a flight record by its name.
fn is_record(name: &str) -> bool {
    name.strip_prefix("rank-")
        .and_then(|rest| rest.strip_suffix(".json"))
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Makes the folder, and removes the records of another run from it: they would be taken for those
/// of this one.
pub(super) fn clear(folder: &Path) -> Result<(), LaunchError> {
    let unusable = |source| LaunchError::Folder {
        path: folder.into(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(unusable)?;
    for entry in std::fs::read_dir(folder).map_err(unusable)? {
        let entry = entry.map_err(unusable)?;
        if entry.file_name().to_str().is_some_and(is_record) {
            std::fs::remove_file(entry.path()).map_err(unusable)?;
        }
    }
    Ok(())
}

/// `0-3, 6` for [0, 1, 2, 3, 6].
fn ranges(ranks: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = vec![];
    for &rank in ranks {
        match out.last_mut() {
            Some((_, end)) if *end + 1 == rank => *end = rank,
            _ => out.push((rank, rank)),
        }
    }
    out.iter()
        .map(|(a, b)| match a == b {
            true => a.to_string(),
            false => format!("{a}-{b}"),
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Tells who failed first and how, how the others ended, and where the records are.
pub(super) fn failure(
    outcome: &Outcome,
    first: usize,
    hosts: &[Host],
    places: &[usize],
    records: &Path,
) {
    let ended = &outcome.ended[first];
    let host = &hosts[places[first]];
    let place = match host.here {
        true => format!("pid {}", ended.pid),
        false => format!("on {}", host.name),
    };
    say(&format!(
        "process {first} ({place}) failed first: {}",
        ended.end
    ));
    let mut others: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (rank, ended) in outcome.ended.iter().enumerate() {
        if rank != first {
            let told = if ended.told { ", told to end" } else { "" };
            let how = format!("{}{told}", ended.end);
            others.entry(how).or_default().push(rank);
        }
    }
    for (how, ranks) in others {
        let plural = if ranks.len() == 1 { "" } else { "es" };
        say(&format!("process{plural} {}: {how}", ranges(&ranks)));
    }
    let found = std::fs::read_dir(records).map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(is_record))
            .count()
    });
    let elsewhere = match places.iter().any(|place| !hosts[*place].here) {
        true => " (and in the same folder on the other hosts)",
        false => "",
    };
    if found > 0 || !elsewhere.is_empty() {
        say(&format!(
            "flight records of {found} of {} processes are here{elsewhere}: anymesh trace {}",
            places.len(),
            records.display()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_known_by_their_names() {
        assert!(is_record("rank-0.json") && is_record("rank-128.json"));
        for name in [
            "rank-.json",
            "rank-x.json",
            "rank-1.json.bak",
            "ranks-1.json",
            "rank--1.json",
        ] {
            assert!(!is_record(name), "{name}");
        }
    }

    #[test]
    fn ranks_are_told_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8-9");
        assert_eq!(ranges(&[]), "");
    }
}
