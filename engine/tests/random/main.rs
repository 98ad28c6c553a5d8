//! Random programs on the host. `tests/device/` has them on any device.

mod hold;

use anymesh_kernel::{Buffer, Device};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// The host, and memory that launches were told they may write to. The host never does, so whoever reads
/// it later would not notice: it is noticed here.
fn host() -> (Device, Arc<Mutex<HashMap<u64, Buffer>>>) {
    let given_up = Arc::new(Mutex::new(HashMap::<u64, Buffer>::new()));
    let seen = given_up.clone();
    let device = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        let mut seen = seen.lock().expect("nobody panics");
        for (k, view) in kernel.operands().enumerate() {
            let gone = seen.contains_key(&view.buffer.serial());
            assert!(!gone, "operand {k} of {} was given up", kernel.op());
        }
        for (_, k) in kernel.over() {
            let operand = kernel.operands().nth(k).expect("an operand");
            seen.insert(operand.buffer.serial(), operand.buffer.clone());
        }
        drop(seen);
        backend.launch(kernel)
    });
    (device, given_up)
}

#[test]
fn a_thousand_random_programs_give_the_bits_and_the_errors_of_eager_ones() {
    let first = std::env::var("ANYMESH_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let first = first.unwrap_or(0);
    let (device, given_up) = host();
    hold::hold(&device, first..first + 1000, 1, false);
    let given_up = given_up.lock().expect("nobody panics");
    assert!(given_up.len() > 1000, "{} buffers", given_up.len());
    let held = given_up.values().filter(|buffer| buffer.handles() > 1);
    assert_eq!(held.count(), 0, "somebody holds what was given up");
}
