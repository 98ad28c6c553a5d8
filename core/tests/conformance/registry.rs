//! Every op by name: the registry covers the catalog, every sample runs, and mistakes get an answer
//! that helps.

use anymesh_backend_cpu::device;
use anymesh_conformance::registry::{self, Attrs, Fill, Input, find};
use anymesh_core::{DType, Error, Tensor, ops};
use serde_json::{Value, json};

fn vector(values: &[f32]) -> Option<Tensor> {
    Some(Tensor::from_slice(values, [values.len()], &device()).expect("a vector"))
}

/// The text of the error that a call must give, which must be about an argument.
#[track_caller]
fn refusal(op: &str, inputs: &[Option<Tensor>], attrs: Value) -> String {
    let error = registry::call(op, inputs, &attrs, &device()).expect_err("a mistake is refused");
    assert!(matches!(error, Error::Argument { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn every_sample_runs_on_the_cpu_and_gives_the_same_twice() {
    let device = device();
    for entry in registry::entries() {
        for (i, sample) in entry.samples().iter().enumerate() {
            let run = || {
                let attrs = Attrs::new(entry, &sample.attrs)?;
                let outputs = entry.call(&sample.make(7, &device)?, &attrs, &device)?;
                outputs
                    .iter()
                    .map(Tensor::to_bytes)
                    .collect::<Result<Vec<_>, _>>()
            };
            let outputs = run()
                .unwrap_or_else(|error| panic!("{} sample {i} {sample:?}: {error}", entry.name));
            assert!(
                outputs.iter().any(|bytes| !bytes.is_empty()),
                "{} sample {i} {sample:?} computes nothing",
                entry.name
            );
            assert_eq!(
                outputs,
                run().expect("it ran before"),
                "{} sample {i}",
                entry.name
            );
        }
    }
}

#[test]
fn samples_are_small_and_their_values_are_not_all_alike() {
    let device = device();
    for entry in registry::entries() {
        for sample in entry.samples() {
            for input in sample.inputs.iter().flatten() {
                let n: usize = input.shape.iter().product();
                assert!(n <= 64, "{}: {input:?} has {n} elements", entry.name);
                let values = input
                    .make(7, &device)
                    .and_then(|t| t.cast(DType::F32)?.to_vec::<f32>())
                    .expect("values");
                assert!(
                    n < 8 || values.iter().any(|v| v.to_bits() != values[0].to_bits()),
                    "{}: {input:?}",
                    entry.name
                );
            }
        }
    }
}

#[test]
fn samples_of_every_op_have_sizes_that_divide_and_sizes_that_do_not() {
    let device = device();
    for entry in registry::entries() {
        let mut sizes: Vec<usize> = vec![];
        for sample in entry.samples() {
            let attrs = Attrs::new(entry, &sample.attrs).expect("attributes");
            let inputs = sample.make(7, &device).expect("inputs");
            sizes.extend(inputs.iter().flatten().flat_map(|t| t.dims().to_vec()));
            if inputs.is_empty() {
                sizes.extend(
                    entry
                        .call(&inputs, &attrs, &device)
                        .expect("it runs")
                        .iter()
                        .flat_map(|t| t.dims().to_vec()),
                );
            }
        }
        assert!(
            sizes.iter().any(|n| *n > 2 && n % 2 == 1),
            "{}: no odd size in {sizes:?}",
            entry.name
        );
        assert!(
            sizes.iter().any(|n| *n > 0 && n % 4 == 0),
            "{}: no multiple of 4 in {sizes:?}",
            entry.name
        );
        assert!(
            sizes.iter().any(|n| *n < 3),
            "{}: no size below 3 in {sizes:?}",
            entry.name
        );
    }
}

#[test]
fn samples_that_claim_to_be_exact_do_not_round_before_they_add_up() {
    // Each element of these depends on few values, which meet in one order only.
    const ON_THEIR_OWN: &[&str] = &[
        "norm",
        "batch_norm",
        "bce_loss",
        "bce_with_logits_loss",
        "kl_div_loss",
        "gaussian_nll_loss",
        "poisson_nll_loss",
        "glu",
        "swiglu",
        "geglu",
        "swiglu2",
        "geglu2",
    ];
    let device = device();
    let elementwise = [
        ops::unary::OPS,
        ops::activation::OPS,
        ops::binary::OPS,
        ops::select::OPS,
    ]
    .concat();
    let mut compared = 0;
    for entry in registry::entries() {
        if ON_THEIR_OWN.contains(&entry.name) || elementwise.iter().any(|op| op.name == entry.name)
        {
            continue;
        }
        for sample in entry
            .samples()
            .iter()
            .filter(|sample| sample.exact && sample.attrs.get("dtype").is_none())
        {
            let attrs = Attrs::new(entry, &sample.attrs).expect("attributes");
            let run = |wide: bool| -> Result<Vec<Vec<f64>>, Error> {
                let widen = |t: Option<Tensor>| {
                    t.map(|t| {
                        if wide && t.dtype() == DType::F32 {
                            t.cast(DType::F64)
                        } else {
                            Ok(t)
                        }
                    })
                    .transpose()
                };
                let inputs = sample
                    .make(7, &device)?
                    .into_iter()
                    .map(widen)
                    .collect::<Result<Vec<_>, _>>()?;
                entry
                    .call(&inputs, &attrs, &device)?
                    .iter()
                    .map(|t| t.cast(DType::F64)?.to_vec())
                    .collect()
            };
            assert_eq!(
                run(false).expect("it runs"),
                run(true).expect("it runs in f64"),
                "{} {sample:?}",
                entry.name
            );
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared} samples");
}

#[test]
fn every_attribute_is_used_by_a_sample_and_every_default_is_valid() {
    for entry in registry::entries() {
        for attr in entry.attrs {
            let used = entry
                .samples()
                .iter()
                .any(|sample| sample.attrs.get(attr.name).is_some());
            // A number in place of a tensor on the left is the same for every op.
            let left = attr.doc.contains("in place of");
            assert!(
                used || left,
                "{}: no sample gives {}",
                entry.name,
                attr.name
            );
            if let Some(default) = attr.default {
                let given = entry.samples()[0].attrs.clone();
                let mut given = given.as_object().cloned().unwrap_or_default();
                given.insert(
                    attr.name.into(),
                    serde_json::from_str(default)
                        .unwrap_or_else(|e| panic!("{} {attr}: {e}", entry.name)),
                );
                Attrs::new(entry, &given.into())
                    .unwrap_or_else(|e| panic!("{} {attr}: {e}", entry.name));
            }
        }
    }
}

#[test]
fn an_unknown_op_gets_similar_names() {
    let error = find("sofmax").expect_err("no such op");
    assert_eq!(
        error,
        Error::argument(
            "registry",
            "name",
            "there is no op 'sofmax': did you mean softmax or fmax?"
        )
    );
    assert!(
        find("frobnicate_the_tensor")
            .expect_err("no such op")
            .to_string()
            .contains("ops::catalog")
    );
    assert!(
        find("")
            .expect_err("no such op")
            .to_string()
            .contains("no op ''")
    );
}

#[test]
fn an_unknown_attribute_gets_the_ones_there_are() {
    let text = refusal("sum", &[vector(&[1.0])], json!({"dim": 0}));
    assert_eq!(
        text,
        "sum: has no attribute 'dim': it takes axes (ints, [] by default), keepdim (bool, false by default)"
    );
    assert_eq!(
        refusal("exp", &[vector(&[1.0])], json!({"y": 0})),
        "exp: has no attribute 'y': it takes none"
    );
}

#[test]
fn an_attribute_of_another_type_says_what_was_found_and_what_is_accepted() {
    let x = || [vector(&[1.0, 2.0])];
    assert_eq!(
        refusal("sum", &x(), json!({"keepdim": "yes"})),
        "sum: the attribute 'keepdim' is \"yes\", expected true or false"
    );
    assert_eq!(
        refusal("sum", &x(), json!({"axes": [0, 0.5]})),
        "sum: the attribute 'axes' is [0,0.5], expected a list of integers"
    );
    assert_eq!(
        refusal("var", &x(), json!({"correction": -1})),
        "var: the attribute 'correction' is -1, expected an integer that is not negative"
    );
    assert_eq!(
        refusal("norm", &x(), json!({"p": "infinity"})),
        "norm: the attribute 'p' is \"infinity\", expected a number, \"inf\" or \"-inf\""
    );
    assert_eq!(
        refusal("sum", &x(), json!({"keepdim": null})),
        "sum: the attribute 'keepdim' is null, expected true or false"
    );
    assert_eq!(
        refusal("sum", &x(), json!([1])),
        "sum: attributes are a JSON object, got [1]"
    );
}

#[test]
fn missing_and_surplus_operands_are_named() {
    assert_eq!(
        refusal("exp", &[], json!({})),
        "exp: operand 'x' is missing: the operands are (x)"
    );
    assert_eq!(
        refusal("exp", &[vector(&[1.0]), vector(&[1.0])], json!({})),
        "exp: 2 operands were given: the operands are (x)"
    );
}

#[test]
fn numbers_stand_in_for_operands_of_elementwise_ops() {
    let device = device();
    let run = |op: &str, inputs: &[Option<Tensor>], attrs: Value| {
        registry::call(op, inputs, &attrs, &device)
            .and_then(|out| out[0].cast(DType::F32)?.to_vec::<f32>())
            .expect("it runs")
    };
    let x = || vector(&[1.0, 5.0]);
    assert_eq!(run("sub", &[x()], json!({"y": 2})), [-1.0, 3.0]);
    assert_eq!(run("sub", &[None, x()], json!({"x": 2})), [1.0, -3.0]);
    assert_eq!(
        run("clip", &[x()], json!({"low": 2, "high": "inf"})),
        [2.0, 5.0]
    );
    assert_eq!(
        run("clip", &[x(), vector(&[2.0, 6.0])], json!({"high": 5.5})),
        [2.0, 5.5]
    );
    assert_eq!(
        run(
            "where_",
            &[vector(&[0.0, 1.0]), None, x()],
            json!({"yes": 9})
        ),
        [1.0, 9.0]
    );
    assert_eq!(run("softplus", &[x()], json!({"threshold": 0})), [1.0, 5.0]);
    // Integers stay integers, and floats lift them.
    let whole = || Some(Tensor::from_slice(&[3i32], [1], &device).expect("a vector"));
    assert_eq!(
        registry::call("mul", &[whole()], &json!({"y": 2}), &device).expect("it runs")[0].dtype(),
        DType::I32
    );
    assert_eq!(
        registry::call("mul", &[whole()], &json!({"y": 2.0}), &device).expect("it runs")[0].dtype(),
        DType::F32
    );

    assert!(refusal("sub", &[x()], json!({})).contains("'y' is missing"));
    assert!(
        refusal("sub", &[x(), x()], json!({"y": 1}))
            .contains("'y' is given as a tensor and as an attribute")
    );
    assert!(refusal("sub", &[], json!({"x": 1, "y": 1})).contains("at least one of them a tensor"));
}

#[test]
fn the_checks_of_elementwise_methods_hold_by_name_too() {
    let x = || [vector(&[0.25])];
    assert_eq!(
        refusal("celu", &x(), json!({"alpha": 0})),
        "celu: alpha is 0, it must be a number other than 0"
    );
    assert_eq!(
        refusal("softplus", &x(), json!({"beta": 0})),
        "softplus: beta is 0, it must be a number other than 0"
    );
    assert_eq!(
        refusal("logit", &x(), json!({"eps": 0.75})),
        "logit: eps is 0.75, it must lie in 0..=0.5"
    );
    assert!(registry::call("logit", &x(), &json!({"eps": null}), &device()).is_ok());
    assert!(registry::call("logit", &x(), &json!({}), &device()).is_ok());
}

#[test]
fn fills_hold_what_they_promise_and_depend_on_the_seed_alone() {
    let device = device();
    let values = |fill, shape: &[usize], seed| {
        let input = Input {
            shape: shape.to_vec(),
            dtype: DType::F32,
            fill,
        };
        input
            .make(seed, &device)
            .and_then(|t| t.to_vec::<f32>())
            .expect("values")
    };
    let within = |fill, lo: f32, hi: f32| {
        let all = values(fill, &[600], 1);
        assert!(
            all.iter().all(|v| (lo..=hi).contains(v)),
            "{fill:?} gives {all:?}"
        );
        assert!(
            all.contains(&lo) && all.contains(&hi),
            "{fill:?} gives {all:?}"
        );
    };
    within(Fill::Int { lo: -2, hi: 3 }, -2.0, 3.0);
    within(Fill::Index(4), 0.0, 3.0);
    within(Fill::Bool, 0.0, 1.0);
    within(Fill::Unit, 0.125, 0.875);
    within(Fill::Eighths { lo: -8, hi: 4 }, -1.0, 0.5);
    within(Fill::Pick(&[2, -1]), -1.0, 2.0);
    let mut all = values(Fill::Distinct, &[7, 5], 1);
    assert_ne!(all, values(Fill::Distinct, &[7, 5], 2));
    assert_eq!(all, values(Fill::Distinct, &[7, 5], 1));
    all.sort_by(f32::total_cmp);
    assert_eq!(all, (0..35).map(|i| i as f32).collect::<Vec<_>>());
    let sorted = values(Fill::Sorted, &[3, 9], 1);
    assert!(
        sorted
            .chunks(9)
            .all(|row| row.is_sorted() && row.windows(2).any(|w| w[0] == w[1]) && row[0] < row[8]),
        "{sorted:?}"
    );
}

#[test]
fn every_op_of_the_catalog_has_an_entry_with_samples_and_no_entry_is_without_an_op() {
    let names: Vec<&str> = ops::catalog().iter().map(|op| op.name).collect();
    let missing: Vec<&&str> = names.iter().filter(|name| find(name).is_err()).collect();
    assert!(
        missing.is_empty(),
        "ops without an entry in conformance/src/registry: {missing:?}"
    );
    let without: Vec<&str> = registry::entries()
        .iter()
        .filter(|e| e.samples().is_empty())
        .map(|e| e.name)
        .collect();
    assert!(without.is_empty(), "entries without samples: {without:?}");
    let unknown: Vec<&str> = registry::entries()
        .iter()
        .map(|e| e.name)
        .filter(|name| !names.contains(name))
        .collect();
    assert!(unknown.is_empty(), "entries that are no ops: {unknown:?}");
    assert_eq!(
        registry::entries().len(),
        names.len(),
        "an op has two entries"
    );
}
