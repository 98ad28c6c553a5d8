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

/// Posts messages of these lengths, to be received from a process.
fn post(tcp: &Tcp, sends: Vec<Send>, from: usize, lengths: &[usize]) -> Box<dyn Flying> {
    let device = anymesh_backend_cpu::device();
    let memory = |len: &usize| Incoming::new(DType::U8, [*len].into(), &device).unwrap();
    let receive = |(memory, len): (usize, &usize)| Receive {
        from,
        memory,
        bytes: 0..*len,
        digest: 7,
    };
    let receives = lengths.iter().enumerate().map(receive).collect();
    let memories = lengths.iter().map(memory).collect();
    tcp.post(sends, memories, receives, &For::millis(60_000))
        .unwrap()
}

fn landed(flying: Box<dyn Flying>, wait: &For) -> std::result::Result<Vec<Vec<u8>>, Broken> {
    let (filled, _) = flying.land(wait)?;
    Ok(filled.into_iter().map(bytes).collect())
}

#[test]
fn what_is_posted_comes_by_itself_and_in_its_order() {
    let (a, b) = streams();
    let (zero, one) = (zero(a), one(b));
    let long = || For::millis(60_000);
    // Far more than sockets hold, before anybody waits.
    let large = 40 << 20;
    let first = post(&zero, vec![], 1, &[large, 3]);
    let second = post(&zero, vec![], 1, &[5]);
    post(
        &one,
        vec![send(0, vec![1; large]), send(0, vec![2; 3])],
        0,
        &[],
    );
    post(&one, vec![send(0, vec![3; 5])], 0, &[]);
    while !first.is_done() || !second.is_done() {
        thread::sleep(Duration::from_millis(1));
    }
    // One that is waited for comes after those that were posted, whoever waits first.
    let third = post(&zero, vec![], 1, &[6]);
    thread::scope(|scope| {
        let waits = scope.spawn(|| receive(&zero, vec![], 1, &[7], &For::millis(60_000)));
        post(&one, vec![send(0, vec![4; 6]), send(0, vec![5; 7])], 0, &[]);
        assert_eq!(waits.join().unwrap().unwrap(), [[5; 7]]);
    });
    assert_eq!(landed(second, &long()).unwrap(), [[3; 5]]);
    assert_eq!(landed(third, &long()).unwrap(), [[4; 6]]);
    let first = landed(first, &long()).unwrap();
    assert!(first[0].iter().all(|byte| *byte == 1) && first[1] == [2; 3]);
}

#[test]
fn what_is_posted_and_does_not_come_is_late_gone_or_differs() {
    let (a, b) = streams();
    let tcp = zero(a);
    let late = landed(post(&tcp, vec![], 1, &[4]), &For::millis(60));
    assert!(
        matches!(&late, Err(Broken::Late(p)) if *p == [1]),
        "{late:?}"
    );
    let alarm = For::millis(600_000);
    alarm.1.store(true, Ordering::Relaxed);
    let stopped = landed(post(&tcp, vec![], 1, &[4]), &alarm);
    assert!(matches!(stopped, Err(Broken::Stopped)), "{stopped:?}");
    let waits = post(&tcp, vec![], 1, &[4]);
    drop(b);
    let gone = landed(waits, &For::millis(60_000));
    assert!(matches!(gone, Err(Broken::Gone(1, _))), "{gone:?}");
    // Whatever comes after it.
    let after = receive(&tcp, vec![], 1, &[4], &For::millis(60_000));
    assert!(matches!(after, Err(Broken::Gone(1, _))), "{after:?}");

    let (a, mut b) = streams();
    let tcp = zero(a);
    b.write_all(&[8u64, 4, 0].map(u64::to_le_bytes).concat())
        .unwrap();
    let differs = landed(post(&tcp, vec![], 1, &[4]), &For::millis(60_000));
    assert!(matches!(differs, Err(Broken::Differs(1))), "{differs:?}");
    // A peer that is dropped takes its thread along, whatever it waits for.
    let (a, _b) = streams();
    let tcp = zero(a);
    drop(post(&tcp, vec![], 1, &[4]));
}
