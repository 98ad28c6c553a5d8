use super::*;
use crate::data::tests::Folder;
use std::fs::File;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The recorded bytes, which tensorboard 2.21.0 reads as loss=1.5 at step 300.
#[test]
fn events_are_the_recorded_bytes() {
    assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    let folder = Folder::new("events");
    let path = folder.path().join("events");
    let file = File::create(&path).expect("a temporary file");
    let mut events = EventFile::new(file, path.clone(), 0.0).expect("written");
    events.scalar(1.0, 300, "loss", 1.5).expect("written");
    events.flush().expect("written");
    let first = "1800000000000000a37f4b220900000000000000001a0d627261696e2e4576656e743a32eedf28a3";
    let second =
        "1b000000000000001a0d9e1309000000000000f03f10ac022a0d0a0b0a046c6f7373150000c03fb663e9f9";
    assert_eq!(
        hex(&fs::read(&path).expect("written")),
        [first, second].concat()
    );
}

#[test]
fn every_run_has_an_event_file_of_its_own() {
    let folder = Folder::new("event-files");
    let first = EventFile::create(folder.path()).expect("new");
    let second = EventFile::create(folder.path()).expect("new");
    assert_ne!(first.path(), second.path());
    for events in [&first, &second] {
        let name = events
            .path()
            .file_name()
            .and_then(|n| n.to_str())
            .expect("a name");
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        assert_eq!(fs::read(events.path()).expect("written").len(), 40);
    }
    assert!(EventFile::create(folder.path().join("none")).is_err());
}

#[test]
fn what_is_not_finite_is_logged_as_such() {
    let scalars = [
        ("loss", f64::NAN),
        ("norm", f64::INFINITY),
        ("low", f64::NEG_INFINITY),
        ("a \"name\"", 0.1),
        ("whole", 3.0),
        ("small", 1e-30),
    ];
    let line = json_lines::line_of(2.5, 7, &scalars);
    assert_eq!(
        line,
        "{\"step\":7,\"time\":2.5,\"loss\":\"NaN\",\"norm\":\"inf\",\"low\":\"-inf\",\"a \\\"name\\\"\":0.1,\"whole\":3.0,\"small\":1e-30}\n"
    );
    let value: serde_json::Value = serde_json::from_str(&line).expect("it is JSON");
    assert_eq!(value["loss"], "NaN");
    // The event file has the bits of f32.
    let folder = Folder::new("not-finite");
    let mut events = EventFile::create(folder.path()).expect("new");
    events.scalar(0.0, 1, "x", f64::NAN).expect("written");
    events
        .scalar(0.0, 1, "x", f64::NEG_INFINITY)
        .expect("written");
    events.flush().expect("written");
    let bytes = fs::read(events.path()).expect("written");
    // Each record ends with the value and a CRC.
    let value = |end: usize| f32::from_le_bytes(bytes[end - 8..end - 4].try_into().expect("four"));
    assert!(value(bytes.len()).is_infinite() && value(bytes.len()) < 0.0);
    assert!(value(40 + (bytes.len() - 40) / 2).is_nan());
}

#[test]
fn a_line_that_was_left_unfinished_spoils_no_other() {
    let folder = Folder::new("unfinished-line");
    let path = folder.write("metrics.jsonl", b"{\"step\":1}\n{\"step\":2,\"lo");
    for step in [3, 4] {
        let mut log = JsonLog::append(&path).expect("it is there");
        log.scalars(0.0, step, &[("loss", 1.0)]).expect("written");
    }
    let text = fs::read_to_string(&path).expect("written");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[1], "{\"step\":2,\"lo");
    assert_eq!(lines[3], "{\"step\":4,\"time\":0.0,\"loss\":1.0}");
}

#[test]
fn a_logger_writes_both_and_goes_on() {
    let folder = Folder::new("logger");
    let runs = folder.path().join("a/b");
    for step in [1, 2] {
        let mut log = Logger::new(&runs).expect("new");
        log.scalars(step, &[("loss", 0.5), ("rate", 1e-3)])
            .expect("written");
    }
    let files: Vec<_> = fs::read_dir(&runs)
        .expect("ours")
        .filter_map(|e| e.ok())
        .collect();
    assert_eq!(files.len(), 3, "two event files and one of lines");
    let lines = fs::read_to_string(runs.join("metrics.jsonl")).expect("written");
    assert_eq!(lines.lines().count(), 2);
}

/// `/dev/full` refuses every byte as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let full = || {
        std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("Linux has it")
    };
    let error = EventFile::new(full(), "events".into(), 0.0).expect_err("full");
    assert!(
        matches!(&error, Error::Io { action: "write", reason, .. } if reason.contains("space")),
        "{error}"
    );
    let mut log = JsonLog::append("/dev/full").expect("it can be opened");
    let error = log.scalars(0.0, 1, &[("loss", 1.0)]).expect_err("full");
    assert!(
        matches!(
            &error,
            Error::Io {
                action: "write",
                ..
            }
        ),
        "{error}"
    );
    let folder = Folder::new("full");
    let file = folder.write("file", b"");
    assert!(matches!(
        Logger::new(&file),
        Err(Error::Io {
            action: "create",
            ..
        })
    ));
}
