//! Strangers at the door.

use super::*;
use crate::frame::{MAGIC, frame};
use std::io::Write;

fn guest() -> Guest {
    Guest {
        token: "secret".into(),
        card: Card {
            process: 0,
            size: 4,
            run: "r".into(),
            program: "p".into(),
            version: "1".into(),
            host: "h".into(),
            pid: 1,
            listens: ([127, 0, 0, 1], 1).into(),
        },
    }
}

fn hello(change: impl FnOnce(&mut Hello)) -> Hello {
    let mut hello = Hello {
        purpose: Purpose::Control,
        token: "secret".into(),
        card: Card {
            process: 2,
            pid: 7,
            ..guest().card
        },
        epoch: 0,
    };
    change(&mut hello);
    hello
}

fn door() -> (Door, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (Door::open(listener, guest()).unwrap(), address)
}

fn soon() -> Patience<'static> {
    Patience::until(Instant::now() + Duration::from_secs(10))
}

/// What the door says to somebody who sends these bytes.
fn answer(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    in_turns(&stream).unwrap();
    // The door may have said no before all was sent.
    let _ = stream.write_all(bytes);
    match read_frame(&stream, HELLO_BYTES, &soon()) {
        Ok(Answer::Refused(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn strangers_are_told_why_they_are_refused() {
    let (door, address) = door();
    let greeted = |change: fn(&mut Hello)| opening(&hello(change)).unwrap();
    let cases: [(&str, Vec<u8>); 16] = [
        (
            "token is not that of this run",
            greeted(|h| h.token = "guess!".into()),
        ),
        (
            "token is not that of this run",
            greeted(|h| h.token = String::new()),
        ),
        (
            "version of anymesh '2'",
            greeted(|h| h.card.version = "2".into()),
        ),
        ("program 'q'", greeted(|h| h.card.program = "q".into())),
        (
            "run 'yesterday'",
            greeted(|h| h.card.run = "yesterday".into()),
        ),
        (
            "process 4 of 4 does not fit",
            greeted(|h| h.card.process = 4),
        ),
        ("process 2 of 5 does not fit", greeted(|h| h.card.size = 5)),
        (
            "process 18446744073709551615",
            greeted(|h| h.card.process = usize::MAX),
        ),
        (
            "no anymesh process",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        ),
        // The hello of TLS.
        (
            "no anymesh process",
            vec![0x16, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3],
        ),
        ("no anymesh process", vec![0; 100_000]),
        ("version 2 of the protocol", b"anymesh\x02".to_vec()),
        (
            "a message of 4294967295 bytes",
            [&MAGIC[..], &[255; 4]].concat(),
        ),
        (
            "cannot be understood",
            [&MAGIC[..], &[3, 0, 0, 0], b"{}}"].concat(),
        ),
        (
            "cannot be understood",
            [&MAGIC[..], &frame(&"a text").unwrap()].concat(),
        ),
        ("more was said", [greeted(|_| ()), vec![0]].concat()),
    ];
    let count = cases.len() as u64;
    for (reason, bytes) in cases {
        let told = answer(address, &bytes);
        assert!(told.contains(reason), "{told} for {reason}");
    }
    assert_eq!(door.refused(), count);
}

#[test]
fn a_connection_may_close_at_every_byte() {
    let (door, address) = door();
    let bytes = opening(&hello(|_| ())).unwrap();
    for end in 0..bytes.len() {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&bytes[..end]).unwrap();
    }
    let mut stream = TcpStream::connect(address).unwrap();
    for byte in &bytes {
        stream.write_all(&[*byte]).unwrap();
    }
    let (hello, _) = door.next(Purpose::Control, 0, &soon()).unwrap();
    assert_eq!(hello.card.process, 2);
}

#[test]
fn those_who_say_nothing_keep_nobody_waiting() {
    let (door, address) = door();
    let half = opening(&hello(|_| ())).unwrap();
    let silent: Vec<TcpStream> = (0..2 * AT_ONCE)
        .map(|i| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&half[..i % 40]).unwrap();
            stream
        })
        .collect();
    let own = hello(|_| ());
    let knocking = thread::spawn(move || knock(address, &own, &soon()).is_ok());
    let (_, stream) = door.next(Purpose::Control, 0, &soon()).unwrap();
    crate::frame::write_frame(&stream, &Answer::Welcome, &soon()).unwrap();
    assert!(knocking.join().unwrap());
    drop(silent);
}

#[test]
fn who_comes_too_late_is_told_so() {
    let (door, address) = door();
    let waiting = hello(|_| ());
    let parked = thread::spawn(move || knock(address, &waiting, &soon()));
    while door.inside.hall().parked.is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    door.complete(Purpose::Control, 1);
    let refused = |result: Result<TcpStream, Closed>, reason: &str| match result {
        Err(Closed::Refused(told)) => assert!(told.contains(reason), "{told}"),
        other => panic!("{other:?}"),
    };
    refused(parked.join().unwrap(), "rebuilt without this process");
    let knocked = |epoch| knock(address, &hello(|h| h.epoch = epoch), &soon());
    refused(knocked(0), "rebuilt without this process");
    refused(knocked(1), "process 2 is here already, or came too late");
    // The next time, and for tensors, it is welcome.
    let later = hello(|h| (h.purpose, h.epoch) = (Purpose::Data, 0));
    let next = thread::spawn(move || knock(address, &later, &soon()).is_ok());
    let (_, stream) = door.next(Purpose::Data, 0, &soon()).unwrap();
    crate::frame::write_frame(&stream, &Answer::Welcome, &soon()).unwrap();
    assert!(next.join().unwrap());
}

#[test]
fn one_process_cannot_fill_the_hall() {
    let (door, address) = door();
    let streams: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&opening(&hello(|_| ())).unwrap()).unwrap();
            stream
        })
        .collect();
    while door.inside.hall().parked.len() < streams.len() {
        thread::sleep(Duration::from_millis(1));
    }
    let told = answer(address, &opening(&hello(|_| ())).unwrap());
    assert!(told.contains("knocked often enough"), "{told}");
}

#[test]
fn nobody_there_is_late_and_an_alarm_ends_the_wait() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let short = Patience::until(Instant::now() + Duration::from_millis(50));
    assert!(matches!(dial(address, &short), Err(Closed::Late(_))));
    let stopped = Patience {
        until: Some(Instant::now() + Duration::from_secs(600)),
        stopped: &|| true,
    };
    assert_eq!(dial(address, &stopped).err(), Some(Closed::Stopped));
}

#[test]
fn a_listener_that_never_answers_is_late() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let short = Patience::until(Instant::now() + Duration::from_millis(100));
    let knocked = knock(address, &hello(|_| ()), &short);
    assert!(matches!(knocked, Err(Closed::Late(_))), "{knocked:?}");
}
