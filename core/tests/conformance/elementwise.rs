//! The conformance cases themselves: they run, they are many, and no op goes without.

use anymesh_backend_cpu as cpu;
use anymesh_conformance::cases;
use anymesh_core::ops;

const FAMILIES: [&str; 4] = ["unary", "binary", "reduce", "scan"];

#[test]
fn every_case_runs_on_the_oracle_and_agrees_with_itself() {
    let device = cpu::device();
    let report = pollster::block_on(cases::run(
        &device,
        &device,
        |case| FAMILIES.contains(&case.family),
        |_, _| (),
    ));
    assert!(report.failures.is_empty(), "{report}");
    assert_eq!(report.unsupported(), 0);
    assert!((2_000..4_500).contains(&report.passed()), "{report}");
}

#[test]
fn every_elementwise_op_reduction_and_scan_has_cases() {
    let cases = cases::cases();
    let ops = [
        ops::unary::OPS,
        ops::activation::OPS,
        ops::binary::OPS,
        ops::select::OPS,
        ops::reduce::OPS,
        ops::scan::OPS,
    ]
    .concat();
    for op in ops {
        let count = cases.iter().filter(|case| case.op == op.name).count();
        assert!(count >= 10, "{} has {count} cases", op.name);
    }
}

#[test]
fn every_sharding_rule_has_as_many_operands_as_its_formula() {
    for row in [ops::unary::TABLE, ops::binary::TABLE, ops::select::TABLE].concat() {
        let [text] = row.info.rule.texts() else {
            panic!("{} has no text", row.info.name);
        };
        let (inputs, output) = text.split_once(" -> ").expect(row.info.name);
        assert_eq!(
            inputs.split(", ").count(),
            row.formula.arity(),
            "{}",
            row.info.name
        );
        assert!(output.starts_with("..."), "{}", row.info.name);
    }
}
