//! Every test starts this program again, several times, under `mpirun`: `a_process` is what runs
//! there.
#![allow(unsafe_code)]

use super::{
    flight::LARGE,
    library::{Trouble, World},
    *,
};
use anymesh_core::{DType, Device, Shape, Tensor, transport::Outgoing};
use mpi::ffi;
use std::{
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

const SCENARIO: &str = "ANYMESH_MPI_TEST";

/// What a process says when all went as it should.
const FINE: &str = "this process is fine";

/// Runs a scenario in so many processes; so many of them end well.
fn job(processes: usize, scenario: &str, fine: usize) {
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        eprintln!("ignored: there is no mpirun");
        return;
    };
    let mut mpirun = Command::new("mpirun");
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        mpirun.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--enable-recovery",
        ]);
    }
    let mut child = mpirun
        .args(["-n", &processes.to_string()])
        .arg(std::env::current_exe().expect("this program has a name"))
        .args(["wire::mpi::tests::a_process", "--exact", "--ignored"])
        .args(["--nocapture", "--test-threads=1"])
        .env(SCENARIO, scenario)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts");
    let end = Instant::now() + Duration::from_secs(120);
    while Instant::now() < end && child.try_wait().expect("a child").is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let output = child.wait_with_output().expect("its output");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches(FINE).count(), fine, "{said}\n{errors}");
}

#[test]
fn every_byte_arrives_whatever_its_size_and_however_it_is_cut() {
    for processes in [2, 3, 5] {
        job(processes, "everything", processes);
    }
}

#[test]
fn a_process_that_does_not_come_is_named_and_the_wire_is_dead_after_it() {
    job(3, "late", 3);
}

#[test]
fn a_killed_process_is_named_and_the_others_build_a_new_wire() {
    job(3, "killed", 2);
}

#[test]
fn who_is_told_to_stop_stops() {
    job(2, "stopped", 2);
}

#[test]
fn programs_that_differ_are_noticed() {
    for what in [
        "digest", "longer", "shorter", "fewer", "more", "many", "other", "order",
    ] {
        job(2, what, 2);
    }
}

#[test]
fn the_thread_level_is_checked() {
    for level in ["single", "funneled", "serialized", "multiple"] {
        job(2, level, 2);
    }
}

#[test]
#[ignore = "takes 9 GiB of memory"]
fn more_bytes_than_an_i32_counts() {
    job(2, "huge", 2);
}

/// Waits so many seconds.
struct For(Instant, AtomicBool);

fn seconds(seconds: f32) -> For {
    let until = Instant::now() + Duration::from_secs_f32(seconds);
    For(until, AtomicBool::new(false))
}

impl Wait for For {
    fn until(&self) -> Instant {
        self.0
    }
    fn stopped(&self) -> bool {
        self.1.load(Ordering::Relaxed)
    }
}

/// A byte of a message.
fn byte(from: usize, to: usize, salt: usize, i: usize) -> u8 {
    (i * 31 + i / 251 + from * 7 + to * 13 + salt * 17) as u8
}

fn send(device: &Device, to: usize, digest: u64, bytes: &[u8]) -> Send {
    let tensor = Tensor::from_slice(bytes, [bytes.len()], device).expect("a tensor");
    let bytes = Outgoing::new(&tensor).expect("bytes");
    Send { to, bytes, digest }
}

/// From whom, digest and size.
type Wanted = (usize, u64, usize);

/// Receives into parts of one memory, one behind the other; what is in each.
fn transfer(
    wire: &Mpi,
    device: &Device,
    sends: Vec<Send>,
    wanted: &[Wanted],
    wait: &For,
) -> Result<Vec<Vec<u8>>, Broken> {
    let mut end = 0;
    let receives: Vec<Receive> = wanted
        .iter()
        .map(|(from, digest, len)| {
            let bytes = end..end + len;
            end = bytes.end;
            Receive {
                from: *from,
                memory: 0,
                bytes,
                digest: *digest,
            }
        })
        .collect();
    let windows: Vec<_> = receives.iter().map(|r| r.bytes.clone()).collect();
    let memory = Incoming::new(DType::U8, Shape::from([end]), device).expect("memory");
    let mut filled = wire.transfer(sends, vec![memory], receives, wait)?;
    let bytes = filled[0].bytes();
    Ok(windows
        .into_iter()
        .map(|window| bytes[window].to_vec())
        .collect())
}

#[test]
#[ignore = "what the other tests start"]
fn a_process() {
    let Ok(scenario) = std::env::var(SCENARIO) else {
        return;
    };
    let device = anymesh_backend_cpu::device();
    if ["single", "funneled", "serialized", "multiple"].contains(&scenario.as_str()) {
        levels(&scenario, &device);
        return;
    }
    let world = World::join(seconds(60.0).0).expect("MPI is there");
    let all: Vec<usize> = (0..world.size()).collect();
    let mut wire = Mpi::new(world, &all, 0).expect("a wire");
    let me = world.rank();
    match scenario.as_str() {
        "everything" => {
            for piece in [PIECE, 1000, 7] {
                wire.piece = piece;
                everything(&wire, me, &device, &[0, 1, 5, 100, 3001, 70_000]);
            }
            for piece in [PIECE, 1000] {
                wire.piece = piece;
                // More messages than a head has room for, small and large.
                everything(&wire, me, &device, &[20; 300]);
                everything(&wire, me, &device, &[2000; LARGE + 20]);
                let mixed: Vec<usize> = (0..2 * LARGE).map(|i| 100 * i).collect();
                everything(&wire, me, &device, &mixed);
            }
            for bytes in [vec![], vec![3; 100_000]] {
                let given = if me == 0 { &bytes[..] } else { &[1, 2] };
                assert_eq!(world.share(given, seconds(60.0).0), Ok(bytes));
            }
        }
        "huge" => {
            let len = (1 << 31) + 12_345;
            let bytes: Vec<u8> = (0..len).map(|i| byte(me, 1 - me, 0, i)).collect();
            let sends = vec![send(&device, 1 - me, 1, &bytes)];
            drop(bytes);
            let got = transfer(&wire, &device, sends, &[(1 - me, 1, len)], &seconds(100.0));
            let got = &got.expect("all")[0];
            assert_eq!(got.len(), len);
            assert!((0..len).all(|i| got[i] == byte(1 - me, me, 0, i)));
        }
        "late" => {
            everything(&wire, me, &device, &[10]);
            if me == 1 {
                std::thread::sleep(Duration::from_secs(2));
            } else {
                late(&wire, me, &device);
            }
            println!("{FINE}");
            // As a process does after a failure: without MPI_Finalize.
            std::process::exit(0);
        }
        "killed" => {
            everything(&wire, me, &device, &[10]);
            if me == 1 {
                std::process::abort();
            }
            late(&wire, me, &device);
            let new = Mpi::new(world, &[0, 2], 1).expect("a wire");
            everything(&new, me / 2, &device, &[10, 100_000]);
            assert_eq!(world.leave(seconds(1.0).0), Ok(()), "does nothing");
            println!("{FINE}");
            std::process::exit(0);
        }
        "stopped" => {
            let wait = seconds(50.0);
            wait.1.store(true, Ordering::Relaxed);
            let outcome = transfer(&wire, &device, vec![], &[(1 - me, 1, 10)], &wait);
            assert!(matches!(outcome, Err(Broken::Stopped)), "{outcome:?}");
            println!("{FINE}");
            std::process::exit(0);
        }
        what => {
            differs(&wire, me, &device, what);
            println!("{FINE}");
            std::process::exit(0);
        }
    }
    assert_eq!(world.leave(seconds(60.0).0), Ok(()));
    let outcome = wire.transfer(vec![], vec![], vec![], &seconds(1.0));
    assert!(matches!(outcome, Err(Broken::Stopped)), "{outcome:?}");
    println!("{FINE}");
}

/// All processes send all sizes to all, themselves too, in one call and one by one.
fn everything(wire: &Mpi, me: usize, device: &Device, sizes: &[usize]) {
    let processes = wire.ranks.len();
    let round = |sizes: &[usize]| {
        let (mut sends, mut receives) = (vec![], vec![]);
        for other in 0..processes {
            for (salt, len) in sizes.iter().enumerate() {
                // Of another size for every pair.
                let bytes: Vec<u8> = (0..len + me * (len % 7))
                    .map(|i| byte(me, other, salt, i))
                    .collect();
                sends.push(send(device, other, 9 + salt as u64, &bytes));
                receives.push((other, 9 + salt as u64, len + other * (len % 7)));
            }
        }
        let got = transfer(wire, device, sends, &receives, &seconds(60.0)).expect("all");
        assert_eq!(got.len(), processes * sizes.len());
        for (k, got) in got.into_iter().enumerate() {
            let (other, salt) = (k / sizes.len(), k % sizes.len());
            assert_eq!(got.len(), sizes[salt] + other * (sizes[salt] % 7));
            for (i, got) in got.iter().enumerate() {
                assert_eq!(*got, byte(other, me, salt, i), "{other} {salt} {i}");
            }
        }
    };
    round(sizes);
    sizes.iter().take(8).for_each(|size| round(&[*size]));
}

/// Process 1 is not there.
fn late(wire: &Mpi, me: usize, device: &Device) {
    let (sends, receives): (Vec<Send>, Vec<Wanted>) = [0, 1, 2]
        .into_iter()
        .filter(|other| *other != me)
        .map(|other| (send(device, other, 5, &[7; 100_000]), (other, 5, 100_000)))
        .unzip();
    let begin = Instant::now();
    let outcome = transfer(wire, device, sends, &receives, &seconds(1.0));
    assert!(
        matches!(&outcome, Err(Broken::Late(who)) if who == &[1]),
        "{outcome:?}"
    );
    assert!(begin.elapsed() >= Duration::from_secs(1));
    let outcome = wire.transfer(vec![], vec![], vec![], &seconds(50.0));
    assert!(matches!(outcome, Err(Broken::Stopped)), "{outcome:?}");
}

/// Process 0 expects something else than process 1 sends.
fn differs(wire: &Mpi, me: usize, device: &Device, what: &str) {
    everything(wire, me, device, &[10]);
    let large = 100_000;
    let (expected, sent): (Vec<(u64, usize)>, Vec<(u64, usize)>) = match what {
        "digest" => (vec![(1, large)], vec![(2, large)]),
        "longer" => (vec![(1, 10)], vec![(1, large)]),
        "shorter" => (vec![(1, large)], vec![(1, 10)]),
        "fewer" => (vec![(1, large), (1, 10)], vec![(1, large)]),
        "more" => (vec![(1, 10)], vec![(1, 10), (1, 10)]),
        "many" => (vec![(1, 10)], vec![(1, 20); 5000]),
        "other" => (vec![(1, 20); 5000], [(1, 20), (2, 20)].repeat(2500)),
        "order" => (vec![(1, large), (2, large)], vec![(2, large), (1, large)]),
        _ => panic!("no scenario {what}"),
    };
    if me == 0 {
        let wanted = expected.iter().map(|(digest, len)| (1, *digest, *len));
        let wanted: Vec<Wanted> = wanted.collect();
        let outcome = transfer(wire, device, vec![], &wanted, &seconds(30.0));
        assert!(matches!(outcome, Err(Broken::Differs(1))), "{outcome:?}");
    } else {
        let sends = sent
            .iter()
            .map(|(digest, len)| send(device, 0, *digest, &vec![1; *len]));
        // Nobody takes what is large; the rest has left.
        let outcome = wire.transfer(sends.collect(), vec![], vec![], &seconds(1.0));
        assert!(
            matches!(outcome, Ok(_) | Err(Broken::Late(_))),
            "{outcome:?}"
        );
    }
}

/// The host program has initialised MPI, for other threads than ours perhaps.
fn levels(level: &str, device: &Device) {
    // SAFETY: called once, before anything else of MPI.
    let got = unsafe {
        let level = match level {
            "single" => ffi::RSMPI_THREAD_SINGLE,
            "funneled" => ffi::RSMPI_THREAD_FUNNELED,
            "serialized" => ffi::RSMPI_THREAD_SERIALIZED,
            _ => ffi::RSMPI_THREAD_MULTIPLE,
        };
        let mut got = 0;
        ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), level, &mut got);
        assert_eq!(got, level, "this MPI has all levels");
        got
    };
    let world = World::join(seconds(60.0).0);
    // SAFETY: a constant.
    if got == unsafe { ffi::RSMPI_THREAD_SINGLE } {
        assert!(matches!(world, Err(Trouble::Threads(_))), "{world:?}");
    } else {
        let world = world.expect("a world");
        let wire = Mpi::new(world, &[0, 1], 0).expect("a wire");
        everything(&wire, world.rank(), device, &[10, 10_000]);
        let elsewhere = std::thread::scope(|scope| {
            let other = || wire.transfer(vec![], vec![], vec![], &seconds(1.0)).is_ok();
            scope.spawn(other).join().expect("no panic")
        });
        assert_eq!(elsewhere, level != "funneled");
        assert_eq!(world.leave(seconds(60.0).0), Ok(()), "it is not ours");
    }
    // SAFETY: initialised above, and nothing is under way.
    unsafe { ffi::MPI_Finalize() };
    println!("{FINE}");
}
