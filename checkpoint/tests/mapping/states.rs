//! What an optimizer keeps beside the weights.

use crate::array::{Array, Counting};
use anymesh_checkpoint::Source;
use anymesh_checkpoint::map::{Mapped, Mapping, Options, STATES};
use anymesh_core::DType;
use std::collections::BTreeMap;

fn with_states(base: &str, array: &Array) -> Vec<(String, Array)> {
    let states = STATES.map(|state| {
        let one = Array {
            dtype: DType::F32,
            shape: vec![1],
            values: vec![base.len() as f64],
        };
        (
            format!("{base}{state}"),
            if state.contains("beta") {
                one
            } else {
                array.cast(DType::F32)
            },
        )
    });
    states
        .into_iter()
        .chain([(base.to_string(), array.clone())])
        .collect()
}

#[test]
fn states_go_where_the_weight_goes_and_keep_their_type() {
    let (q, k) = (
        Array::counting(DType::BF16, &[2, 3], 1),
        Array::counting(DType::BF16, &[2, 1], 2),
    );
    let sources: BTreeMap<_, _> = [
        with_states("l.0.q", &q),
        with_states("l.0.k", &k),
        with_states("gone", &q),
        with_states("other", &k),
    ]
    .concat()
    .into_iter()
    .collect();
    let mapping =
        Mapping::parse("l.$LAYER_ID.q, l.$LAYER_ID.k -> t.$LAYER_ID, axis=1\nt.$LAYER_ID^T -> m.$LAYER_ID, dtype='f16'\ngone -> _").expect("statements");
    let mapped = Mapped::new(Counting::new(&sources), &mapping, &Options::default()).expect("maps");
    let joined = Array::join(&[q, k.clone()], 1).permute(&[1, 0]);
    let names: Vec<&String> = mapped.tensors().keys().collect();
    assert_eq!(names.len(), 12, "{names:?}");
    assert_eq!(
        mapped.read_all("m.0").expect("reads"),
        joined.cast(DType::F16).bytes()
    );
    for state in [".w_0", ".moment1_0", ".moment2_0"] {
        assert_eq!(
            mapped.read_all(&format!("m.0{state}")).expect("reads"),
            joined.cast(DType::F32).bytes(),
            "{state}"
        );
        assert_eq!(
            mapped.read_all(&format!("other{state}")).expect("reads"),
            k.cast(DType::F32).bytes(),
            "{state}"
        );
    }
    // "l.0.q" has five letters.
    assert_eq!(
        mapped.read_all("m.0.beta1_pow_acc_0").expect("reads"),
        5f32.to_le_bytes()
    );
    assert!(!mapped.tensors().keys().any(|name| name.starts_with("gone")));
}

#[test]
fn states_without_weights_are_mapped_too() {
    let q = Array::counting(DType::F32, &[2, 3], 1);
    let sources: BTreeMap<_, _> = [("l.3.q.moment1_0".to_string(), q.clone())].into();
    let mapping = Mapping::parse("l.$LAYER_ID.q -> t.$LAYER_ID\nt.$LAYER_ID^T -> m.$LAYER_ID.q")
        .expect("statements");
    let mapped = Mapped::new(Counting::new(&sources), &mapping, &Options::default()).expect("maps");
    assert_eq!(mapped.tensors().len(), 1);
    assert_eq!(
        mapped.read_all("m.3.q.moment1_0").expect("reads"),
        q.permute(&[1, 0]).bytes()
    );
}

#[test]
fn a_state_that_a_statement_names_is_an_ordinary_tensor() {
    let q = Array::counting(DType::F32, &[2, 3], 1);
    let sources: BTreeMap<_, _> = with_states("q", &q).into_iter().collect();
    let mapping = Mapping::parse("q -> p\nq.w_0 -> master, dtype='bf16'").expect("statements");
    let mapped = Mapped::new(Counting::new(&sources), &mapping, &Options::default()).expect("maps");
    assert_eq!(
        mapped.read_all("master").expect("reads"),
        q.cast(DType::BF16).bytes()
    );
    assert!(
        mapped.tensors().contains_key("p.moment1_0") && !mapped.tensors().contains_key("p.w_0")
    );
}

#[test]
fn a_state_that_is_there_for_some_inputs_only_is_an_error() {
    let q = Array::counting(DType::F32, &[2, 3], 1);
    let sources: BTreeMap<_, _> = [("q", &q), ("k", &q), ("q.moment1_0", &q)]
        .map(|(name, array)| (name.to_string(), array.clone()))
        .into();
    let error = Mapped::new(
        Counting::new(&sources),
        &Mapping::parse("q, k -> f, axis=0").expect("a statement"),
        &Options::default(),
    )
    .err()
    .expect("k has no moment");
    assert!(error.to_string().contains("'k.moment1_0'"), "{error}");
}
