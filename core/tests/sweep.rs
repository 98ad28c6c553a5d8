//! Ops under shardings of their operands give what they give without a mesh.
//!
//! Every run picks other cases; a failure is run again with `ANYMESH_SWEEP_SEED` as printed and
//! `ANYMESH_SWEEP_OPS` for its op. `ANYMESH_SWEEP_LIMIT=all` runs every case there is.

use anymesh_conformance::sweep::{self, Options};

#[test]
fn every_op_on_every_mesh_equals_the_unsharded_op() {
    let options = Options::default().with_env().unwrap();
    let report = sweep::run(&anymesh_backend_cpu::device(), &options);
    println!("{}\n{report}", report.coverage());
    report.assert_right();
}
