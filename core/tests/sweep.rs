//! Every op under every sharding of its operands gives what it gives without a mesh.

use anymesh_conformance::sweep::{self, Options};

#[test]
fn every_op_on_every_mesh_equals_the_unsharded_op() {
    let limit = std::env::var("ANYMESH_SWEEP_LIMIT")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(40);
    let filter = std::env::var("ANYMESH_SWEEP_OPS").unwrap_or_default();
    let report = sweep::run(
        &anymesh_backend_cpu::device(),
        &Options {
            limit,
            filter,
            ..Options::default()
        },
    );
    println!("{report}");
    assert_eq!(report.failed, 0, "{report}");
    assert!(report.cases > 0);
}
