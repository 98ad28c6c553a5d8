//! Threads that help whoever launches a kernel.
//!
//! The thread that asks works too, so that a kernel never waits for somebody to wake up, and takes
//! no longer than on one thread where the other cores are busy. Helpers look out for the next kernel
//! for a while before they sleep: kernels follow each other within microseconds, and waking a
//! thread takes longer than many of them do.

use smallvec::SmallVec;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a helper without work looks out for some before it sleeps, and one who asked for those
/// who are not done before it offers its core to them: less than it takes to get a core back from
/// another program.
const AWAKE: Duration = Duration::from_millis(1);

/// What is done for each number.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A task for each number below `count`.
///
/// Every thread has a part of the numbers of its own, and takes those of others when it is done with
/// them. A thread is given the same part of each job: what it wrote in one kernel is then still in its
/// own cache when it reads it in the next.
struct Job {
    task: *const Task<'static>,
    count: usize,
    /// For each thread, the next number of its part that nobody has taken.
    next: SmallVec<[AtomicUsize; 4]>,
    /// How many are not done.
    left: AtomicUsize,
    /// How many helpers may still join.
    seats: AtomicIsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the task may be called by any thread (`Sync`), and is only while `run`, which was given it,
// has not returned (see `work`).
#[allow(unsafe_code)]
unsafe impl Send for Job {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Job {}

impl Job {
    /// Where the part of a thread begins, and that of the one before it ends.
    fn start(&self, thread: usize) -> usize {
        thread * self.count / self.next.len()
    }

    /// Takes the numbers of a thread's part, then those that others have not come to.
    fn work(&self, thread: usize) {
        let threads = self.next.len();
        for part in (thread..threads).chain(0..thread) {
            self.work_on(part);
        }
    }

    /// Takes numbers of a part until there are none.
    #[allow(unsafe_code)]
    fn work_on(&self, part: usize) {
        let end = self.start(part + 1);
        // Not by adding alone: who only looks must not count.
        while self.next[part].load(Ordering::Relaxed) < end {
            let i = self.next[part].fetch_add(1, Ordering::Relaxed);
            if i >= end {
                return;
            }
            // SAFETY: number `i` is not done, so `left` is not 0, and `run` waits until it is: what
            // it was given still lives.
            let task = unsafe { &*self.task };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(i))) {
                lock(&self.panic).get_or_insert(panic);
            }
            // Whoever sees 0 sees all that was written, too.
            self.left.fetch_sub(1, Ordering::Release);
        }
    }

    /// Until everything is done.
    fn wait(&self) {
        let start = Instant::now();
        while self.left.load(Ordering::Acquire) > 0 {
            if start.elapsed() < AWAKE {
                (0..8).for_each(|_| std::hint::spin_loop());
            } else {
                // A helper may be without a core.
                thread::yield_now();
            }
        }
    }
}

/// What helpers look at when they are awake.
struct Board {
    job: Option<Arc<Job>>,
    asleep: usize,
}

struct Crew {
    helpers: usize,
    /// Whether somebody's job is being done. Others do theirs alone.
    busy: AtomicBool,
    /// Counts jobs. Changed only while the board is held.
    number: AtomicU64,
    board: Mutex<Board>,
    called: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static CREW: LazyLock<Crew> = LazyLock::new(|| {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let hired = |i: usize| {
        let name = format!("anymesh-cpu-{i}");
        let helper = move || CREW.help(i);
        thread::Builder::new().name(name).spawn(helper).is_ok()
    };
    Crew {
        helpers: (1..cores).take_while(|i| hired(*i)).count(),
        busy: AtomicBool::new(false),
        number: AtomicU64::new(0),
        board: Mutex::new(Board {
            job: None,
            asleep: 0,
        }),
        called: Condvar::new(),
    }
});

impl Crew {
    fn call(&self, job: &Arc<Job>, wanted: usize) {
        let mut board = lock(&self.board);
        board.job = Some(job.clone());
        self.number.fetch_add(1, Ordering::Release);
        let asleep = board.asleep;
        drop(board);
        (0..asleep.min(wanted)).for_each(|_| self.called.notify_one());
    }

    /// What helper number `thread`, from 1 on, does all the time.
    fn help(&self, thread: usize) {
        let mut seen = 0;
        loop {
            let start = Instant::now();
            while self.number.load(Ordering::Acquire) == seen && start.elapsed() < AWAKE {
                (0..8).for_each(|_| std::hint::spin_loop());
            }
            let mut board = lock(&self.board);
            while self.number.load(Ordering::Relaxed) == seen {
                board.asleep += 1;
                board = (self.called.wait(board)).unwrap_or_else(PoisonError::into_inner);
                board.asleep -= 1;
            }
            seen = self.number.load(Ordering::Relaxed);
            let job = board.job.clone();
            drop(board);
            if let Some(job) = job
                && job.seats.fetch_sub(1, Ordering::Relaxed) > 0
            {
                job.work(thread % job.next.len());
            }
        }
    }
}

/// Calls `task` with every number below `count`, on this thread and on helpers. A panic of one is
/// passed on when all are done.
#[allow(unsafe_code)]
pub(crate) fn run(count: usize, task: &Task<'_>) {
    // What programs limit and tests choose is how many threads `rayon` has.
    let threads = rayon::current_num_threads();
    let free = || {
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let turn = || CREW.busy.compare_exchange(false, true, acquire, relaxed);
        CREW.helpers > 0 && turn().is_ok()
    };
    if count < 2 || threads < 2 || !free() {
        return (0..count).for_each(task);
    }
    // SAFETY: only the lifetime changes. The task is called until `wait` returns and never again,
    // see `work`, and that is before this function does.
    let task: *const Task<'static> = unsafe {
        std::mem::transmute::<*const Task<'_>, *const Task<'static>>(std::ptr::from_ref(task))
    };
    let threads = threads.min(CREW.helpers + 1).min(count);
    let part = |thread: usize| AtomicUsize::new(thread * count / threads);
    let job = Arc::new(Job {
        task,
        count,
        next: (0..threads).map(part).collect(),
        left: AtomicUsize::new(count),
        seats: AtomicIsize::new(threads as isize - 1),
        panic: Mutex::new(None),
    });
    CREW.call(&job, threads - 1);
    job.work(0);
    job.wait();
    CREW.busy.store(false, Ordering::Release);
    let panic = lock(&job.panic).take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(count: usize) -> usize {
        let all: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        run(count, &|i| {
            all[i].fetch_add(i + 1, Ordering::Relaxed);
        });
        all.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    #[test]
    fn every_number_is_taken_once_also_by_several_who_ask_and_within_a_task() {
        let expected = |count: usize| count * (count + 1) / 2;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..300 {
                        assert_eq!(sum(round % 17), expected(round % 17));
                    }
                });
            }
        });
        let inner = AtomicUsize::new(0);
        run(5, &|_| {
            inner.fetch_add(sum(9), Ordering::Relaxed);
        });
        assert_eq!(inner.into_inner(), 5 * expected(9));
    }

    #[test]
    fn helpers_that_slept_are_woken() {
        for _ in 0..20 {
            thread::sleep(3 * AWAKE);
            assert_eq!(sum(64), 64 * 65 / 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_one_who_asked_when_all_others_are_done() {
        let done = AtomicUsize::new(0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            run(20, &|i| {
                assert_ne!(i, 3, "the third");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert!(panic.is_err());
        // Alone, the first panic ends it.
        assert!(matches!(done.into_inner(), 19 | 3));
        assert_eq!(sum(10), 55);
    }
}
