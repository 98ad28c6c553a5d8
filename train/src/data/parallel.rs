//! Work on many documents, on all cores, with results in order.

use crate::{Error, Result};
use std::thread;

/// Documents that a thread takes at a time.
const CHUNK: u64 = 64;

/// Calls `make` with every number below `count`, on all cores, and `take` with what it gives, in
/// order. Ends with the first error.
pub(crate) fn in_order<T: Send>(
    count: u64,
    make: impl Fn(u64) -> Result<T> + Sync,
    mut take: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let part = |first: u64| -> Vec<Result<T>> {
        let mut made = vec![];
        for index in first..(first + CHUNK).min(count) {
            made.push(make(index));
            if made.last().is_some_and(Result::is_err) {
                break;
            }
        }
        made
    };
    for first in (0..count).step_by((threads * CHUNK) as usize) {
        let made: Vec<_> = thread::scope(|scope| {
            let part = &part;
            let running: Vec<_> = (0..threads)
                .map(|t| first + t * CHUNK)
                .filter(|first| *first < count)
                .map(|first| scope.spawn(move || part(first)))
                .collect();
            running.into_iter().map(|thread| thread.join()).collect()
        });
        for part in made {
            let part =
                part.map_err(|_| Error::config("data", "a thread that reads documents panicked"))?;
            for value in part {
                take(value?)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errors_come_in_order() {
        for count in [0, 1, 63, 64, 65, 1000] {
            let mut taken = vec![];
            let all = in_order(count, Ok, |i| {
                taken.push(i);
                Ok(())
            });
            all.expect("nothing fails");
            assert_eq!(taken, (0..count).collect::<Vec<_>>());
        }
        let mut taken = 0;
        let failing = |i: u64| match i {
            70 | 200.. => Err(Error::config("test", i.to_string())),
            i => Ok(i),
        };
        let error = in_order(1000, failing, |_| {
            taken += 1;
            Ok(())
        });
        assert_eq!(error.expect_err("70 fails").to_string(), "test: 70");
        assert_eq!(taken, 70);
    }
}
