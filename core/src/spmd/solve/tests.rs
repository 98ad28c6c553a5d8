//! What the solver chooses, where operands are held in several forms.

use super::*;
use crate::{TensorType, meta, spmd::rule::Given};

/// The solution of a rule for operands whose first form is their own and whose others are held.
fn solved(mesh: &str, text: &str, operands: &[&[&str]]) -> (Solution, Vec<Vec<Sharding>>) {
    let mesh = Mesh::new(mesh, &meta()).expect("a mesh");
    let types: Vec<Vec<TensorType>> = operands
        .iter()
        .map(|forms| {
            let parse = |t: &&str| TensorType::parse(t, &mesh).expect("a type");
            forms.iter().map(parse).collect()
        })
        .collect();
    let forms: Vec<Vec<Sharding>> = types
        .iter()
        .map(|forms| forms.iter().map(|t| t.sharding.clone()).collect())
        .collect();
    let operands: Vec<Operand<'_>> = types
        .iter()
        .zip(&forms)
        .map(|(t, forms)| Operand {
            shape: &t[0].shape,
            dtype: t[0].dtype,
            sharding: &forms[0],
            held: &forms[1..],
        })
        .collect();
    let given: Vec<Given<'_>> = types.iter().map(|t| Given::Shape(&t[0].shape)).collect();
    let rule = Rule::new(text, &given, &[]).expect("a rule");
    let solution = solve(&mesh, &rule, &operands).expect("a solution");
    (solution, forms)
}

const MATMUL: &str = "mk, kn -> mn ; reduce k sum ; linear 0 ; linear 1";
const ADD: &str = "mk, mk -> mk ; linear 0 1";

#[test]
fn a_gathered_form_that_is_held_is_used_and_costs_nothing() {
    let w = "f32[8,16@a]";
    let (alone, _) = solved("a=4", MATMUL, &[&["f32[64@a,8]"], &[w]]);
    assert!(alone.bytes > 0);
    let (s, _) = solved("a=4", MATMUL, &[&["f32[64@a,8]", "f32[64,8]"], &[w]]);
    assert_eq!((s.bytes, &s.sources[..], s.free), (0, &[1, 0][..], true));
    assert_eq!(s.inputs[0], Sharding::replicated());
    assert_eq!(s.outputs[0], Sharding::replicated().cut(1, 0));
}

#[test]
fn a_settled_form_is_used_instead_of_owing_its_reduction_again() {
    let (partial, whole) = ("f32[8,4]{sum:a}", "f32[8,4]");
    let (s, _) = solved("a=4", ADD, &[&[partial], &[whole]]);
    assert_eq!(
        s.outputs[0].partial().len(),
        1,
        "it stays partial, for nothing"
    );
    for held in [whole, "f32[8@a,4]", "f32[8,4@a]"] {
        let (s, forms) = solved("a=4", ADD, &[&[partial, held], &[whole]]);
        assert_eq!((s.bytes, s.owed, s.free), (0, 0, true), "{held}");
        assert_eq!(&s.sources[..], [1, 0]);
        assert_eq!(s.inputs[0], forms[0][1]);
    }
}

#[test]
fn an_operand_comes_from_the_form_that_takes_the_fewest_bytes() {
    // The transposed cut lacks three quarters, the one by the major axis a half.
    let forms = ["f32[8,8@b]", "f32[8@a,8]", "f32[8@b,8]"];
    let (s, _) = solved("a=2,b=4", "1k -> k", &[&forms]);
    assert_eq!((s.bytes, s.sources[0]), (0, 0), "its own will do");
    let (s, _) = solved("a=2,b=4", "11 -> ", &[&forms]);
    assert_eq!((s.bytes, s.sources[0], s.free), (128, 1, false));
    // Where two take the same, the first is taken.
    let (s, _) = solved("a=4,b=4", "11 -> ", &[&["f32[8@a,8]", "f32[8@b,8]"]]);
    assert_eq!((s.bytes, s.sources[0]), (192, 0));
}
