//! Every op's gradient on a device, held against the host's (`core/src/grad/check.rs`), and
//! indexing with its gradients, held against a model of NumPy.
//!
//! `ANYMESH_GRADIENT_SAMPLES` for more than one sample of each op, `ANYMESH_GRADIENT_OPS` for some ops.

use crate::Suite;
use anymesh::Device;
use anymesh::conformance::{
    gradients::{Check, Table},
    indexing,
};

pub(crate) const SUITE: Suite = &[
    (
        "gradients_on_the_device_are_those_of_the_host",
        gradients_on_the_device_are_those_of_the_host,
    ),
    (
        "a_thousand_random_index_expressions_and_their_gradients_are_right_on_the_device",
        a_thousand_random_index_expressions_and_their_gradients_are_right_on_the_device,
    ),
];

fn gradients_on_the_device_are_those_of_the_host(device: &Device) {
    let host = anymesh::device("cpu").unwrap();
    let samples = std::env::var("ANYMESH_GRADIENT_SAMPLES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    let filter = std::env::var("ANYMESH_GRADIENT_OPS").unwrap_or_default();
    let devices = [device.clone()];
    let rows = Check {
        host: &host,
        differences: false,
        devices: &devices,
        samples,
    }
    .run(&filter);
    println!(
        "{}",
        Table {
            rows: &rows,
            devices: &devices
        }
    );
    assert!(
        rows.iter().all(|r| r.failures.is_empty()),
        "some gradients are wrong, see above"
    );
}

fn a_thousand_random_index_expressions_and_their_gradients_are_right_on_the_device(
    device: &Device,
) {
    let count = std::env::var("ANYMESH_INDEX_EXPRESSIONS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1000);
    let report = pollster::block_on(indexing::run(device, count, 1));
    println!("{device}: {report}");
    assert!(report.failures.is_empty(), "{report}");
}
