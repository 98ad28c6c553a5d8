//! What bytes from elsewhere may not do, as functions that take any: for coverage-guided fuzzing,
//! and for a test that needs no other toolchain.

use crate::{
    control::{Witness, judge, message},
    frame::{FRAME_BYTES, HELLO_BYTES, Opening, Patience, opening, parse, read_frame},
    recorder::Record,
    torch_store::TorchStore,
};
use message::{ToHub, ToMember, Trouble};
use std::{
    fmt::Debug,
    io::Write,
    net::{Shutdown, TcpListener},
    time::{Duration, Instant},
};

/// The first bytes of a connection: what is understood is understood again, and not before all of it
/// was there.
pub fn handshake(data: &[u8]) {
    match Opening::of(data) {
        Opening::Hello(hello) => {
            for end in 0..data.len() {
                assert_eq!(Opening::of(&data[..end]), Opening::Unfinished);
            }
            let bytes = opening(&hello).expect("it was small enough to be read");
            // Texts may be longer when they are written: as escapes, and with names for all fields.
            if bytes.len() <= HELLO_BYTES {
                assert_eq!(Opening::of(&bytes), Opening::Hello(hello));
            }
        }
        // Who was refused stays so, whatever else it says.
        Opening::Stranger(_) => {
            let more = [data, b"more"].concat();
            assert!(matches!(Opening::of(&more), Opening::Stranger(_)));
        }
        Opening::Unfinished => {}
    }
}

/// Frames of a process to the hub, and what the hub makes of them.
pub fn to_hub(data: &[u8]) {
    let mut rest = data;
    let mut records: Vec<Box<Record>> = vec![];
    let mut troubles = vec![];
    while let Ok(message) = read_frame::<ToHub>(&mut rest, FRAME_BYTES, &Patience::forever()) {
        written_is_read(&message);
        match message {
            ToHub::Status { record, .. } => records.push(record),
            ToHub::Trouble(trouble) => troubles.push(trouble),
            _ => {}
        }
    }
    if let Ok(ToHub::Status { record, .. }) = parse(data) {
        records.push(record);
    }
    troubles.push(Trouble::Late {
        from: vec![1],
        seconds: 1.0,
    });
    records.truncate(8);
    // Also against itself, one that is silent, and one that left.
    let mut witnesses: Vec<Witness> = records.iter().cloned().map(Witness::Told).collect();
    witnesses.extend(records.last().cloned().map(Witness::Told));
    for more in [None, Some(Witness::Left), Some(Witness::Silent)] {
        witnesses.extend(more);
        for trouble in &troubles {
            let verdict = judge(0, trouble, &witnesses, &|p| format!("process {p}"));
            let _ = verdict.error("judge", |p| vec![p]).to_string();
        }
    }
}

/// Frames of the hub to a process.
pub fn to_member(data: &[u8]) {
    let mut rest = data;
    while let Ok(message) = read_frame::<ToMember>(&mut rest, FRAME_BYTES, &Patience::forever()) {
        written_is_read(&message);
        if let ToMember::Verdict(verdict) = message {
            let _ = verdict.error("call", |p| vec![p]).to_string();
        }
    }
}

/// What a torch store answers.
pub fn torch_store(data: &[u8]) {
    let Ok(listener) = TcpListener::bind(("127.0.0.1", 0)) else {
        return;
    };
    let Ok(address) = listener.local_addr() else {
        return;
    };
    let until = Instant::now() + Duration::from_secs(10);
    let Ok(mut store) = TorchStore::connect("127.0.0.1", address.port(), until) else {
        return;
    };
    let Ok((mut stream, _)) = listener.accept() else {
        return;
    };
    let _ = stream.write_all(data);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = store.wait(&["key"], until);
    let got = store.get("key", until);
    assert!(got.is_err() || got.is_ok_and(|value| value.len() < data.len()));
    let _ = store.add("key", 1, until);
}

/// Numbers that are written in decimals need not be the same, but must be numbers.
fn written_is_read<T: serde::Serialize + serde::de::DeserializeOwned + Debug>(message: &T) {
    let text = serde_json::to_vec(message).expect("it can be written");
    let again: std::io::Result<T> = parse(&text);
    assert!(again.is_ok(), "{again:?} of {message:?}");
}

#[cfg(test)]
mod tests;
