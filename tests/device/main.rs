//! What is held of a device: every op against the CPU, gradients, indexing, meshes of simulated
//! ranks on it, and faults that only the data shows.
//!
//! `ANYMESH_TEST_DEVICE` names the device (`cpu`, `wgpu:llvmpipe`, `cuda:0`, which puts off, `eager:cuda:0`, ...),
//! which must then be there. Without it the software adapter is taken. Where that is missing, its
//! tests count as ignored, not as passed: nothing was held.

mod again;
mod conformance;
mod deferred;
mod faults;
mod gradients;
mod mesh;
mod together;

use anymesh::Device;
use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

/// A test and its name.
type Suite = &'static [(&'static str, fn(&Device))];

/// The tests of a suite on a device; ignored where it is not there.
fn trials<'a>(suite: Suite, device: Option<&'a Device>) -> impl Iterator<Item = Trial> + 'a {
    suite.iter().map(move |&(name, test)| {
        let kind = device.map_or("no device", Device::name).to_string();
        let open = device.cloned();
        let run = move || match open {
            Some(device) => {
                test(&device);
                Ok(())
            }
            None => Err("there is no device to run it on".into()),
        };
        Trial::test(name, run)
            .with_kind(kind)
            .with_ignored_flag(device.is_none())
    })
}

fn main() -> ExitCode {
    let named = std::env::var("ANYMESH_TEST_DEVICE").ok();
    let name = named.as_deref().unwrap_or("wgpu:software");
    let device = match anymesh::device(name) {
        Ok(device) => Some(device),
        Err(error) if named.is_some() => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            eprintln!("the tests of a device are ignored: {error}");
            None
        }
    };
    let mut all: Vec<Trial> = vec![];
    for suite in [
        conformance::SUITE,
        gradients::SUITE,
        mesh::SUITE,
        faults::SUITE,
        deferred::SUITE,
        together::SUITE,
        again::SUITE,
    ] {
        all.extend(trials(suite, device.as_ref()));
    }
    // Faults are cheap, and the same on the host.
    let cpu = anymesh::device("cpu").ok();
    if device.as_ref() != cpu.as_ref() {
        all.extend(trials(faults::SUITE, cpu.as_ref()));
    }
    let mut arguments = Arguments::from_args();
    // A device does one thing at a time, and some of these take all its memory.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, all).exit_code()
}
