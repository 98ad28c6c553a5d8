//! Bad connections while a job runs: they are refused with a reason, the job's results are right, and
//! nothing is left of them.

use crate::{
    faults::Said,
    run::{TOKEN, free_port, start_one},
    train::{Model, axes, say},
};
use anymesh_checkpoint::Result;
use anymesh_cluster::stop;
use anymesh_core::{Machine, Mesh};
use libtest_mimic::{Failed, Trial};
use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

const PROCESSES: usize = 2;
const BAD: usize = 10_000;
const HALF_OPEN: usize = 500;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("ten_thousand_bad_connections_change_nothing", flood),
        Trial::test("a_member_that_sends_garbage_is_lost", || {
            member(b"\xff\xff\xff\xff")
        }),
        Trial::test("a_member_that_says_nonsense_is_lost", || {
            member(b"\x09\0\0\0\"Nothing\"")
        }),
        Trial::test("a_member_that_closes_is_lost", || member(b"")),
        Trial::test("two_processes_of_one_rank_are_refused", twice),
    ]
}

/// The bytes of a process that introduces itself.
fn hello(rank: usize, size: usize, purpose: &str) -> Vec<u8> {
    hello_with(TOKEN, rank, size, purpose)
}

fn hello_with(token: &str, rank: usize, size: usize, purpose: &str) -> Vec<u8> {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let text = format!(
        r#"{{"purpose":"{purpose}","token":"{token}","epoch":0,"card":{{"process":{rank},"size":{size},"run":"- 0","program":"{program}","version":"{}","host":"h","pid":1,"listens":"127.0.0.1:1"}}}}"#,
        env!("CARGO_PKG_VERSION")
    );
    framed(text.as_bytes())
}

fn framed(text: &[u8]) -> Vec<u8> {
    let length = (text.len() as u32).to_le_bytes();
    [b"anymesh\x01", &length[..], text].concat()
}

/// What to send, and what the answer says.
fn bad(kind: usize) -> (Vec<u8>, &'static str) {
    match kind % 10 {
        0 => (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "no anymesh process"),
        1 => (
            vec![0x16, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3],
            "no anymesh process",
        ),
        2 => (vec![kind as u8 | 0x80; 5000], "no anymesh process"),
        3 => (b"anymesh\x07".to_vec(), "version 7 of the protocol"),
        4 => ([b"anymesh\x01", &[255; 4][..]].concat(), "at most 8192"),
        5 => (framed(b"{\"token\":3}"), "cannot be understood"),
        6 => (hello(1, PROCESSES, "Control"), "is here already"),
        7 => (hello(5, PROCESSES, "Data"), "does not fit"),
        8 => (hello_with("a guess", 1, PROCESSES, "Data"), "token"),
        // Half of an introduction, and the end.
        _ => (hello(1, PROCESSES, "Data")[..40].to_vec(), ""),
    }
}

/// The role: trains until it is told to stop, and says what it found.
pub(crate) fn play() -> Result<()> {
    stop::install().map_err(|e| anymesh_checkpoint::Error::Argument(e.to_string()))?;
    let cluster = crate::roles::cluster()?;
    let mesh = cluster.mesh(&axes(cluster.size()))?;
    let mut model = Model::new(&mesh)?;
    let mut losses = 0u64;
    let count = |folder: &str| std::fs::read_dir(folder).map_or(0, |entries| entries.count());
    while !cluster.stop_requested()? {
        let loss = model.train()?;
        losses = losses.rotate_left(5) ^ u64::from(loss.to_bits());
        if model.step == 3 {
            for address in listening() {
                say(&format!("listens {address}"));
            }
            say(&format!(
                "open {} {}",
                count("/proc/self/fd"),
                count("/proc/self/task")
            ));
            say("ready");
        }
    }
    // Those who were refused are listened to a little longer.
    thread::sleep(Duration::from_secs(1));
    cluster.barrier()?;
    say(&format!(
        "open {} {}",
        count("/proc/self/fd"),
        count("/proc/self/task")
    ));
    say(&format!("losses {} {losses}", model.step));
    Ok(())
}

/// Where this process listens, as the system says.
fn listening() -> Vec<String> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
    let text: String = tables
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .collect();
    let address = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let socket = format!("socket:[{}]", words.get(9)?);
        let (host, port) = words.get(1)?.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let listens = words.get(3) == Some(&"0A") && own.contains(&socket);
        listens.then(|| format!("{host} {port}"))
    };
    text.lines().filter_map(address).collect()
}

fn flood() -> std::result::Result<(), Failed> {
    let port = free_port();
    let mut processes = (0..PROCESSES)
        .map(|rank| start_one("peers", rank, PROCESSES, port, &[]))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let until = Instant::now() + Duration::from_secs(60);
    let mut ports = vec![];
    for process in &processes {
        while !process.said().contains("ready") {
            if Instant::now() > until {
                return Err(format!("not ready: {}", process.said()).into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let said = process.said();
        let listens: Vec<String> = Said::of(&said)
            .all("listens")
            .into_iter()
            .map(|(_, text)| text.to_string())
            .collect();
        // One socket, at the address that was asked for: 127.0.0.1.
        match &listens[..] {
            [only] if only.starts_with("0100007F ") => ports.push(only[9..].parse::<u16>()?),
            _ => return Err(format!("listens at {listens:?}").into()),
        }
    }
    if ports[0] != port {
        return Err(format!("process 0 listens at {ports:?} and not at {port}").into());
    }
    let half_open = (0..HALF_OPEN)
        .map(|i| {
            let mut stream = TcpStream::connect(("127.0.0.1", ports[i % PROCESSES]))?;
            // Some were refused for being slow already.
            let _ = stream.write_all(&hello(1, PROCESSES, "Data")[..i % 50]);
            Ok(stream)
        })
        .collect::<std::io::Result<Vec<_>>>()?;
    let (next, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let knock = || -> std::result::Result<(), Failed> {
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < BAD) {
            let (bytes, reason) = bad(i / PROCESSES);
            let mut stream = TcpStream::connect(("127.0.0.1", ports[i % PROCESSES]))?;
            stream.set_read_timeout(Some(Duration::from_secs(30)))?;
            // It may be refused before all is sent.
            let _ = stream.write_all(&bytes);
            // Every fourth goes without hearing why.
            if i % 4 == 0 || reason.is_empty() {
                continue;
            }
            let mut answer = vec![];
            stream.read_to_end(&mut answer)?;
            let answer = String::from_utf8_lossy(&answer);
            if !answer.contains(reason) {
                return Err(format!("{answer} instead of {reason}").into());
            }
            refused.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(knock)).collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| Failed::from("a panic"))?)
    })?;
    drop(half_open);
    let pid = processes[0].child.id().to_string();
    std::process::Command::new("kill")
        .args(["-s", "TERM", &pid])
        .status()?;
    let now = Instant::now();
    for process in &mut processes {
        let ended = process.end(now + Duration::from_secs(60))?;
        let said = Said::of(&ended.output);
        let bad = |what: &str| -> Failed { format!("{what}: {ended:#?}").into() };
        let open: Vec<&str> = said.all("open").into_iter().map(|(_, text)| text).collect();
        // A thread of the start may have ended meanwhile; nothing may have been added.
        let counts =
            |text: &str| -> Vec<usize> { text.split(' ').filter_map(|n| n.parse().ok()).collect() };
        let more = |before: &str, after: &str| {
            let (before, after) = (counts(before), counts(after));
            before.len() != 2 || after.len() != 2 || after.iter().zip(&before).any(|(a, b)| a > b)
        };
        if ended.code != Some(0) || open.len() != 2 || more(open[0], open[1]) {
            return Err(bad("files or threads are left, or it failed"));
        }
        let losses = said.all("losses").first().map_or("", |(_, text)| *text);
        let steps: u64 = losses.split(' ').next().unwrap_or_default().parse()?;
        let mesh = Mesh::new(&axes(PROCESSES), &anymesh_backend_cpu::device())?;
        let (mut model, mut expected) = (Model::new(&mesh)?, 0u64);
        for _ in 0..steps {
            expected = expected.rotate_left(5) ^ u64::from(model.train()?.to_bits());
        }
        if losses != format!("{steps} {expected}") {
            return Err(bad(&format!("expected {expected}")));
        }
    }
    println!(
        "{BAD} bad connections, {} of them read why; {HALF_OPEN} half open",
        refused.into_inner()
    );
    Ok(())
}

/// One of three processes is this test: it joins, and then sends these bytes and ends.
fn member(bytes: &[u8]) -> std::result::Result<(), Failed> {
    let port = free_port();
    let mut processes = [0, 1]
        .into_iter()
        .map(|rank| start_one("peers", rank, 3, port, &[]))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let mut stream = connect(port)?;
    stream.write_all(&hello(2, 3, "Control"))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut welcome = [0; 13];
    stream.read_exact(&mut welcome)?;
    if &welcome[4..] != b"\"Welcome\"" {
        return Err(format!("{welcome:?}").into());
    }
    stream.write_all(bytes)?;
    if bytes.is_empty() {
        drop(stream);
    }
    let now = Instant::now();
    for process in &mut processes {
        let ended = process.end(now + Duration::from_secs(60))?;
        if !ended.output.contains("lost [2]") {
            return Err(format!("{ended:#?}").into());
        }
    }
    Ok(())
}

/// A second process says that it is rank 1, while the third has not come.
fn twice() -> std::result::Result<(), Failed> {
    let port = free_port();
    let _processes = [0, 1]
        .into_iter()
        .map(|rank| start_one("peers", rank, 3, port, &[]))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    // Whichever of the two comes second is refused.
    let mut streams = vec![];
    for _ in 0..2 {
        let mut stream = connect(port)?;
        stream.write_all(&hello(1, 3, "Control"))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut answer = [0; 200];
        let read = stream.read(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
        if answer.contains("two processes have the same rank") {
            return Ok(());
        }
        streams.push(stream);
    }
    Err("both were let in".into())
}

fn connect(port: u16) -> std::io::Result<TcpStream> {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Err(e) if Instant::now() > until => return Err(e),
            Err(_) => thread::sleep(Duration::from_millis(5)),
            stream => return stream,
        }
    }
}
