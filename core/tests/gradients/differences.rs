//! Every op's gradient against finite differences. `ANYMESH_GRADIENT_OPS` names some of them.

use anymesh_conformance::gradients::{Check, Table};

#[test]
fn every_gradient_is_the_slope_that_differences_show() {
    let filter = std::env::var("ANYMESH_GRADIENT_OPS").unwrap_or_default();
    let device = anymesh_backend_cpu::device();
    let rows = Check {
        host: &device,
        differences: true,
        devices: &[],
        samples: usize::MAX,
    }
    .run(&filter);
    println!(
        "{}",
        Table {
            rows: &rows,
            devices: &[]
        }
    );
    assert!(
        rows.iter().all(|r| r.failures.is_empty()),
        "some gradients are wrong, see above"
    );
}
