//! Without devices: who is told what, and how often.

use super::*;
use std::sync::atomic::AtomicUsize;

#[derive(Default)]
struct Hub(AtomicUsize);

fn lost(rank: usize) -> KernelError {
    KernelError::Lost {
        op: "communication",
        ranks: [rank].into(),
        detail: "it died".into(),
    }
}

impl Observer for Hub {
    fn trouble(&self, error: KernelError) -> KernelError {
        self.0.fetch_add(1, Ordering::Relaxed);
        match error {
            KernelError::Timeout { .. } => lost(3),
            other => other,
        }
    }
}

#[test]
fn trouble_is_asked_about_once_and_everybody_gets_the_answer() -> Result<(), KernelError> {
    let hub = Arc::new(Hub::default());
    let watch = Watch::new(hub.clone())?;
    assert_eq!((watch.failure(), watch.check()), (None, Ok(())));
    let late = || Error::Late {
        what: "all_reduce",
        seconds: 2.0,
    };
    std::thread::scope(|scope| {
        let all = [0, 1, 2, 3].map(|_| scope.spawn(|| watch.end(late())));
        for answer in all {
            assert_eq!(answer.join().expect("no panic"), lost(3));
        }
    });
    assert_eq!(hub.0.load(Ordering::Relaxed), 1);
    assert_eq!(watch.failure(), Some(lost(3)));
    watch.abort(lost(5));
    assert_eq!(
        watch.check(),
        Err(Error::GivenUp(lost(3))),
        "the first reason counts"
    );
    assert!(watch.quiet(Duration::ZERO), "nothing had to be aborted");
    Ok(())
}

#[test]
fn a_call_that_is_never_queued_is_late_and_later_calls_are_refused() -> Result<(), KernelError> {
    let watch = Watch::new(Arc::new(Hub::default()))?;
    let call = |deadline| Call::new("all_reduce", 0, deadline, 0, vec![]);
    let stuck = call(Duration::from_millis(50));
    watch.add(&stuck).expect("nothing has failed");
    assert_eq!(watch.wait(&stuck), Err(Error::GivenUp(lost(3))));
    let next = watch.add(&call(Duration::from_secs(60)));
    assert_eq!(next, Err(Error::GivenUp(lost(3))));
    Ok(())
}
