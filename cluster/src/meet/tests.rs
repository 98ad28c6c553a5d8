//! Threads that meet as processes do.

use super::*;
use crate::wire::tcp::Tcp;

fn meeting(process: usize, size: usize, place: Place, within: Duration) -> Meeting {
    Meeting {
        process,
        size,
        token: "t".into(),
        run: "r".into(),
        place,
        within,
    }
}

/// Runs `size` threads, each with what it needs to meet the others.
fn all<T: Send>(
    size: usize,
    within: Duration,
    play: impl Fn(usize, Meeting) -> T + Sync,
) -> Vec<T> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let start = |process: usize| {
            let place = match process {
                0 => Place::Here(listener.try_clone().unwrap()),
                _ => Place::Address(address),
            };
            let (meeting, play) = (meeting(process, size, place, within), &play);
            scope.spawn(move || play(process, meeting))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        let results = threads.into_iter().map(|t| t.join().unwrap());
        results.collect()
    })
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn one_that_dies_between_its_connections_is_lost_for_all() {
    for dies in 0..3 {
        let ended = all(3, LONG, |process, meeting| {
            let world = meet(&meeting).unwrap();
            if process == dies {
                return None;
            }
            let until = Instant::now() + LONG;
            Some(Tcp::connect(&world, until).map(|_| ()))
        });
        for (process, ended) in ended.into_iter().enumerate().filter(|(p, _)| *p != dies) {
            match ended {
                Some(Err(Error::Lost { ranks, .. })) => assert_eq!(*ranks, [dies]),
                other => panic!("{process} of {dies}: {other:?}"),
            }
        }
    }
}

#[test]
fn one_that_stands_still_between_its_connections_is_told_by_its_name() {
    let ended = all(3, LONG, |process, meeting| {
        let world = meet(&meeting).unwrap();
        let until = Instant::now() + Duration::from_millis(300);
        if process == 1 {
            // It answers the hub all the while.
            world.control.alarm.wait(LONG);
            return None;
        }
        Some(Tcp::connect(&world, until).map(|_| ()))
    });
    for ended in [&ended[0], &ended[2]] {
        match ended {
            Some(Err(Error::Timeout { missing, .. })) => assert_eq!(**missing, [1]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_never_comes_is_missing_for_all() {
    let within = Duration::from_millis(300);
    let ended = all(4, within, |process, meeting| match process {
        2 => None,
        _ => Some(meet(&meeting).map(|_| ())),
    });
    for ended in ended.into_iter().flatten() {
        match ended {
            Err(Error::Timeout { missing, .. }) => assert_eq!(*missing, [2]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_hub_that_says_nothing_is_late_and_one_that_closes_is_lost() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let place = || Place::Address(listener.local_addr().unwrap());
    let met = meet(&meeting(1, 2, place(), Duration::from_millis(200)));
    assert!(
        matches!(&met, Err(Error::Timeout { missing, .. }) if **missing == [0]),
        "{met:?}"
    );
    let (_, _) = listener.accept().unwrap();
    let met = thread::scope(|scope| {
        let meeting = scope.spawn(|| meet(&meeting(1, 2, place(), LONG)));
        drop(listener.accept().unwrap());
        meeting.join().unwrap()
    });
    assert!(
        matches!(&met, Err(Error::Lost { ranks, .. }) if **ranks == [0]),
        "{met:?}"
    );
}

#[test]
fn those_who_meet_again_leave_out_who_died_and_who_comes_too_late() {
    let ended = all(4, LONG, |process, meeting| {
        let world = meet(&meeting).unwrap();
        match process {
            // Dies.
            1 => return None,
            // Comes when the others have met.
            3 => {
                thread::sleep(Duration::from_millis(1500));
                return Some(
                    world
                        .meet_again(&[1], LONG)
                        .map(|world| world.control.cards.len()),
                );
            }
            _ => {}
        }
        world.control.alarm.wait(LONG).unwrap();
        let again = world.meet_again(&[1], Duration::from_millis(700));
        let size = again.as_ref().map(|world| world.control.cards.len());
        thread::sleep(Duration::from_millis(1500));
        Some(size.map_err(Clone::clone))
    });
    for process in [0, 2] {
        assert_eq!(ended[process], Some(Ok(2)), "{process}");
    }
    match &ended[3] {
        Some(Err(Error::Transport { detail, .. })) => {
            assert!(detail.contains("came too late"), "{detail}")
        }
        other => panic!("{other:?}"),
    }
}
