//! Indexing against a model of NumPy's semantics, against NumPy's own answers, and one test for each defect seen elsewhere.

use anymesh_core::{
    DType, Device, Mesh,
    conformance::indexing::{run, run_at},
};

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

#[test]
fn ten_thousand_random_expressions_agree_with_the_model() {
    let report = pollster::block_on(run(&cpu(), 10_000, 1));
    assert!(report.failures.is_empty(), "{report}");
    assert!(report.refused > 50 && report.refused < report.expressions / 5, "{report}");
}

#[test]
fn random_expressions_on_meshes_agree_with_the_model() {
    for (axes, seed) in [("a=2", 2), ("a=3", 3), ("a=2, b=2", 4)] {
        let mesh = Mesh::new(axes, &cpu()).unwrap();
        let report = pollster::block_on(run_at(&mesh, 300, seed));
        assert!(report.failures.is_empty(), "{axes}: {report}");
    }
}
