use super::*;
use std::{
    collections::BTreeMap,
    net::TcpListener,
    sync::{Arc, Condvar, Mutex},
};

type Values = Arc<(Mutex<BTreeMap<Vec<u8>, Vec<u8>>>, Condvar)>;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

fn read<const N: usize>(stream: &mut TcpStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn text(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; u64::from_le_bytes(read(stream)?) as usize];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

/// Answers one client as the store does, until it leaves.
fn serve(mut stream: TcpStream, values: &Values) -> std::io::Result<()> {
    let (lock, changed) = &**values;
    assert_eq!(read(&mut stream)?, [0u8]);
    assert_eq!(u32::from_le_bytes(read(&mut stream)?), 0x3C85F7CE);
    loop {
        match read(&mut stream)? {
            [1] => {
                let (key, value) = (text(&mut stream)?, text(&mut stream)?);
                lock.lock().unwrap().insert(key, value);
                changed.notify_all();
            }
            [3] => {
                let key = text(&mut stream)?;
                let value = lock.lock().unwrap()[&key].clone();
                stream.write_all(&(value.len() as u64).to_le_bytes())?;
                stream.write_all(&value)?;
            }
            [4] => {
                let (key, amount) = (text(&mut stream)?, i64::from_le_bytes(read(&mut stream)?));
                let mut values = lock.lock().unwrap();
                let old = values.get(&key).map_or(0, |text| {
                    String::from_utf8_lossy(text).parse::<i64>().unwrap()
                });
                values.insert(key, (old + amount).to_string().into_bytes());
                changed.notify_all();
                stream.write_all(&(old + amount).to_le_bytes())?;
            }
            [6] => {
                let count = u64::from_le_bytes(read(&mut stream)?);
                let keys: Vec<_> = (0..count)
                    .map(|_| text(&mut stream))
                    .collect::<Result<_, _>>()?;
                let mut values = lock.lock().unwrap();
                while !keys.iter().all(|key| values.contains_key(key)) {
                    values = changed.wait(values).unwrap();
                }
                drop(values);
                stream.write_all(&[0])?;
            }
            other => panic!("request {other:?}"),
        }
    }
}

/// A store for any number of clients.
fn store() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let values = Values::default();
        for stream in listener.incoming() {
            let (stream, values) = (stream.unwrap(), values.clone());
            thread::spawn(move || serve(stream, &values));
        }
    });
    port
}

/// Something that takes one client, reads its greeting and as many bytes of its request as it
/// likes, and answers with `answer`; then it closes or keeps the connection open.
fn bad(request: usize, answer: &'static [u8], open: bool) -> TorchStore {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 5 + request];
        stream.read_exact(&mut bytes).unwrap();
        let _ = stream.write_all(answer);
        if open {
            // Until the client has left.
            let _ = stream.read_to_end(&mut vec![]);
        }
    });
    TorchStore::connect("127.0.0.1", port, soon()).unwrap()
}

/// The bytes of a wait for one key of one letter.
const ONE_WAIT: usize = 1 + 8 + 8 + 1;

#[test]
fn clients_set_get_add_and_wait() {
    let port = store();
    let mut one = TorchStore::connect("127.0.0.1", port, soon()).unwrap();
    let mut two = TorchStore::connect("localhost", port, soon()).unwrap();
    one.set("a", b"hello \xff\0", soon()).unwrap();
    assert_eq!(two.get("a", soon()).unwrap(), b"hello \xff\0");
    one.set("empty", b"", soon()).unwrap();
    assert_eq!(two.get("empty", soon()).unwrap(), b"");
    assert_eq!(one.add("n", 3, soon()).unwrap(), 3);
    assert_eq!(two.add("n", -5, soon()).unwrap(), -2);
    let waiting = thread::spawn(move || two.wait(&["x", "y"], soon()).map(|()| two));
    one.set("x", b"1", soon()).unwrap();
    one.set("y", b"2", soon()).unwrap();
    let mut two = waiting.join().unwrap().unwrap();
    let long = vec![7; LONGEST];
    one.set("long", &long, soon()).unwrap();
    assert_eq!(two.get("long", soon()).unwrap(), long);
}

#[test]
fn a_key_that_nobody_sets_is_late_and_the_connection_is_given_up() {
    let mut client = TorchStore::connect("127.0.0.1", store(), soon()).unwrap();
    let error = client.get("never", shortly()).unwrap_err();
    assert!(matches!(&error, StoreError::Late { .. }), "{error}");
    assert!(error.to_string().contains("never"));
    let error = client.set("a", b"", soon()).unwrap_err();
    assert!(matches!(error, StoreError::Closed { .. }), "{error}");
}

#[test]
fn long_keys_and_values_are_refused_on_both_sides() {
    let mut client = TorchStore::connect("127.0.0.1", store(), soon()).unwrap();
    let error = client.set("a", &vec![0; LONGEST + 1], soon()).unwrap_err();
    assert!(matches!(error, StoreError::TooLong { bytes, .. } if bytes == LONGEST as u64 + 1));

    for length in [LONGEST as u64 + 1, u64::MAX] {
        let mut answer = vec![0];
        answer.extend(length.to_le_bytes());
        let mut client = bad(ONE_WAIT, answer.leak(), true);
        let error = client.get("k", soon()).unwrap_err();
        assert!(
            matches!(error, StoreError::TooLong { bytes, .. } if bytes == length),
            "{error}"
        );
    }
}

#[test]
fn garbage_is_told_from_an_answer() {
    let mut client = bad(ONE_WAIT, b"HTTP/1.1 400 Bad Request\r\n\r\n", true);
    let error = client.wait(&["k"], soon()).unwrap_err();
    assert!(matches!(error, StoreError::Garbage { .. }), "{error}");
    // As a length, text is too long.
    let mut client = bad(ONE_WAIT, b"\0TP/1.1 400 Bad Request", true);
    let error = client.get("k", soon()).unwrap_err();
    assert!(matches!(error, StoreError::TooLong { .. }), "{error}");
}

#[test]
fn a_store_that_closes_early_is_an_error_at_once() {
    for answer in [&b""[..], b"\0", b"\0\x05\0\0", b"\0\x05\0\0\0\0\0\0\0abc"] {
        let mut client = bad(ONE_WAIT, answer, false);
        let error = client.get("k", soon()).unwrap_err();
        assert!(
            matches!(error, StoreError::Closed { .. }),
            "{answer:?}: {error}"
        );
    }
}

#[test]
fn a_half_open_store_is_late() {
    for answer in [&b""[..], b"\0", b"\0\x05\0\0", b"\0\x05\0\0\0\0\0\0\0abc"] {
        let mut client = bad(ONE_WAIT, answer, true);
        let error = client.get("k", shortly()).unwrap_err();
        assert!(
            matches!(error, StoreError::Late { .. }),
            "{answer:?}: {error}"
        );
    }
}

#[test]
fn no_store_is_unreachable_when_the_deadline_is_over() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for host in ["127.0.0.1", "no.such.host.invalid"] {
        let error = TorchStore::connect(host, port, shortly()).unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(host), "{error}");
    }
}

/// Against the store of torch itself, also under torchrun with `ANYMESH_TORCH_STORE=$MASTER_PORT`.
#[test]
#[ignore = "needs a TCPStore of torch at the port in ANYMESH_TORCH_STORE"]
fn the_store_of_torch_answers() {
    let port = std::env::var("ANYMESH_TORCH_STORE")
        .unwrap()
        .parse()
        .unwrap();
    let mut one = TorchStore::connect("127.0.0.1", port, soon()).unwrap();
    let mut two = TorchStore::connect("127.0.0.1", port, soon()).unwrap();
    one.set("anymesh/a", b"hello \xff\0", soon()).unwrap();
    assert_eq!(two.get("anymesh/a", soon()).unwrap(), b"hello \xff\0");
    let before = one.add("anymesh/n", 0, soon()).unwrap();
    assert_eq!(two.add("anymesh/n", -5, soon()).unwrap(), before - 5);
    let waiting = thread::spawn(move || two.wait(&["anymesh/x", "anymesh/y"], soon()));
    one.set("anymesh/x", b"1", soon()).unwrap();
    one.set("anymesh/y", b"", soon()).unwrap();
    waiting.join().unwrap().unwrap();
    let long = vec![7; LONGEST];
    one.set("anymesh/long", &long, soon()).unwrap();
    assert_eq!(one.get("anymesh/long", soon()).unwrap(), long);
    let error = one.get("anymesh/never", shortly()).unwrap_err();
    assert!(matches!(error, StoreError::Late { .. }), "{error}");
}
