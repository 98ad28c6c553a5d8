//! Two ends of a connection in one process, and ends that misbehave.

use super::*;
use anymesh_core::DType;
use std::net::TcpListener;

/// Waits so long, and until it is told to stop.
struct For(Instant, AtomicBool);

impl For {
    fn millis(millis: u64) -> Self {
        let until = Instant::now() + Duration::from_millis(millis);
        Self(until, AtomicBool::new(false))
    }
}

impl Wait for For {
    fn until(&self) -> Instant {
        self.0
    }

    fn stopped(&self) -> bool {
        self.1.load(Ordering::Relaxed)
    }
}

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    in_turns(&dialed).unwrap();
    in_turns(&accepted).unwrap();
    (dialed, accepted)
}

/// Process 0 of two, over a stream to the other.
fn zero(stream: TcpStream) -> Tcp {
    Tcp {
        peers: vec![None, Some(Peer::new(stream).unwrap())],
        process: 0,
    }
}

fn one(stream: TcpStream) -> Tcp {
    Tcp {
        peers: vec![Some(Peer::new(stream).unwrap()), None],
        process: 1,
    }
}

fn send(to: usize, bytes: Vec<u8>) -> Send {
    Send {
        to,
        bytes: bytes.into(),
        digest: 7,
    }
}

/// Messages of these lengths from a process.
fn receive(
    tcp: &Tcp,
    sends: Vec<Send>,
    from: usize,
    lengths: &[usize],
    wait: &For,
) -> std::result::Result<Vec<Vec<u8>>, Broken> {
    let device = anymesh_backend_cpu::device();
    let memory = |len: &usize| Incoming::new(DType::U8, [*len].into(), &device).unwrap();
    let receive = |(memory, len): (usize, &usize)| Receive {
        from,
        memory,
        bytes: 0..*len,
        digest: 7,
    };
    let receives = lengths.iter().enumerate().map(receive).collect();
    let filled = tcp.transfer(sends, lengths.iter().map(memory).collect(), receives, wait)?;
    Ok(filled.into_iter().map(bytes).collect())
}

fn bytes(incoming: Incoming) -> Vec<u8> {
    incoming.finish().unwrap().to_vec::<u8>().unwrap()
}

#[test]
fn both_may_send_far_more_than_sockets_hold_before_either_reads() {
    let (a, b) = streams();
    let (zero, one) = (zero(a), one(b));
    // Small messages in calls of their own, each of which only sends.
    let many = |tcp: &Tcp, to: usize| {
        for i in 0..1000u32 {
            let message = send(to, vec![i as u8; SMALL]);
            receive(tcp, vec![message], to, &[], &For::millis(60_000)).unwrap();
        }
        for i in 0..1000u32 {
            let got = receive(tcp, vec![], to, &[SMALL], &For::millis(60_000));
            assert_eq!(got.unwrap(), [vec![i as u8; SMALL]]);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| many(&zero, 1));
        many(&one, 0);
    });
}

#[test]
fn large_messages_go_both_ways_at_once() {
    let (a, b) = streams();
    let (zero, one) = (zero(a), one(b));
    let both = |tcp: &Tcp, peer: usize| {
        let sends = vec![
            send(peer, vec![peer as u8; 20 << 20]),
            send(peer, vec![9; 5]),
        ];
        let got = receive(tcp, sends, peer, &[20 << 20, 5], &For::millis(60_000)).unwrap();
        assert!(got[0].iter().all(|b| usize::from(*b) == 1 - peer));
        assert_eq!(got[1], [9; 5]);
    };
    thread::scope(|scope| {
        scope.spawn(|| both(&zero, 1));
        both(&one, 0);
    });
}

#[test]
fn what_is_not_expected_differs() {
    let header =
        |digest: u64, len: u64, number: u64| [digest, len, number].map(u64::to_le_bytes).concat();
    let odd = [
        header(8, 4, 0),
        header(7, 5, 0),
        header(7, u64::MAX, 0),
        header(7, 4, 1),
        vec![0xA5; 4096],
    ];
    for bytes in odd {
        let (a, mut b) = streams();
        let tcp = zero(a);
        b.write_all(&bytes).unwrap();
        let got = receive(&tcp, vec![], 1, &[4], &For::millis(60_000));
        assert!(matches!(got, Err(Broken::Differs(1))), "{got:?}");
    }
}

#[test]
fn an_end_at_any_byte_is_gone_and_silence_is_late() {
    let whole = [7u64, 4, 0].map(u64::to_le_bytes).concat();
    let whole = [whole, vec![1, 2, 3, 4]].concat();
    for end in 0..whole.len() {
        let (a, mut b) = streams();
        let tcp = zero(a);
        b.write_all(&whole[..end]).unwrap();
        if end % 7 == 0 {
            let got = receive(&tcp, vec![], 1, &[4], &For::millis(60));
            assert!(matches!(&got, Err(Broken::Late(p)) if *p == [1]), "{got:?}");
            continue;
        }
        drop(b);
        let got = receive(&tcp, vec![], 1, &[4], &For::millis(60_000));
        assert!(matches!(got, Err(Broken::Gone(1, _))), "{end}: {got:?}");
    }
}

#[test]
fn what_came_before_the_end_is_still_read_also_after_an_alarm() {
    let (a, b) = streams();
    let tcp = zero(a);
    let other = one(b);
    let sends = vec![send(0, vec![5; 100])];
    receive(&other, sends, 0, &[], &For::millis(60_000)).unwrap();
    drop(other);
    let wait = For::millis(60_000);
    wait.1.store(true, Ordering::Relaxed);
    let got = receive(&tcp, vec![], 1, &[100], &wait).unwrap();
    assert_eq!(got, [[5; 100]]);
}

#[test]
fn one_that_takes_nothing_keeps_neither_a_send_nor_the_end() {
    let (a, b) = streams();
    let tcp = zero(a);
    let sends = vec![send(1, vec![0; AHEAD + (32 << 20)])];
    let got = receive(&tcp, sends, 1, &[], &For::millis(200));
    assert!(matches!(&got, Err(Broken::Late(p)) if *p == [1]), "{got:?}");
    tcp.flush(&For::millis(100));
    drop(tcp);
    drop(b);
}

#[test]
fn an_alarm_ends_a_wait() {
    let (a, _b) = streams();
    let tcp = zero(a);
    let wait = For::millis(600_000);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&tcp, vec![], 1, &[4], &wait));
        wait.1.store(true, Ordering::Relaxed);
        let ended = waiting.join().unwrap();
        assert!(matches!(ended, Err(Broken::Stopped)), "{ended:?}");
    });
}
