//! Groups, accumulation and whole steps: what they refuse, and what they leave alone.

use super::{Bag, close, device, floats, numbers, states, sums};
use anymesh_core::{
    DType, Mesh, Tensor,
    backend::Kernel,
    map::formulas::{AdamStep, Formula},
    spmd::Ledger,
};
use anymesh_train::{
    Build, Error, Init, Module, Policy, Result, Zero,
    nn::Linear,
    optim::{Accumulator, Adafactor, AdamW, Clip, Groups, Lion, Muon, Optimizer, Rule, Sgd, Sums},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

fn adamw() -> Rule {
    Rule::AdamW(AdamW::default())
}

fn bag(mesh: &Mesh) -> Result<Bag> {
    Bag::new([
        ("up.weight".into(), numbers(1, &[4, 3], mesh, "[_, _]")?),
        ("up.bias".into(), numbers(2, &[4], mesh, "[_]")?),
        ("norm.weight".into(), numbers(3, &[3], mesh, "[_]")?),
    ])
}

fn plain_bag() -> Result<Bag> {
    bag(&Mesh::single(&device()))
}

fn ones(model: &Bag) -> Result<BTreeMap<String, Tensor>> {
    let each = model.0.iter();
    each.map(|(name, p)| Ok((name.clone(), p.value().detach().ones_like()?)))
        .collect()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, words: &[&str]) {
    let error = result.expect_err("must be refused").to_string();
    for word in words {
        assert!(error.contains(word), "'{error}' does not say '{word}'");
    }
}

#[test]
fn a_parameter_is_in_the_first_group_that_fits() -> Result<()> {
    let model = plain_bag()?;
    let groups = Groups::default()
        .of("norm*, *.bias", adamw().with_decay(0.0))
        .of("*", adamw());
    let assigned = groups.assign(&model)?;
    let expected = [("norm.weight", 0), ("up.bias", 0), ("up.weight", 1)];
    assert!(assigned.iter().map(|(n, g)| (n.as_str(), *g)).eq(expected));

    refused(
        Groups::default().of("up.*", adamw()).assign(&model),
        &["'norm.weight'", "no group"],
    );
    refused(
        Groups::default()
            .of("*.gain", adamw())
            .of("*", adamw())
            .assign(&model),
        &["'*.gain'", "fits no parameter"],
    );
    refused(
        Groups::default()
            .of("*", adamw())
            .of("norm*", adamw())
            .assign(&model),
        &["'norm*'", "before it"],
    );
    refused(
        Optimizer::new(&model, &Groups::all(Rule::Muon(Muon::default()))),
        &["'up.bias'", "Muon is for matrices", "f64[4]"],
    );
    // What is frozen needs no group.
    let mut model = model;
    model.freeze("norm.*")?;
    assert_eq!(
        Groups::default().of("up.*", adamw()).assign(&model)?.len(),
        2
    );
    Ok(())
}

#[test]
fn groups_scale_rates_and_replace_decay() -> Result<()> {
    let text = "
        [[groups]]
        of = '*.bias'
        rate = 2.0
        decay = 0.5
        rule = { kind = 'sgd', lr = 0.25 }
        [[groups]]
        of = '*'
        rule = { kind = 'sgd', lr = 0.25 }
    ";
    let groups: Groups = toml::from_str(text).expect("groups");
    let mut model = plain_bag()?;
    let mut optimizer = Optimizer::new(&model, &groups)?;
    assert_eq!(
        optimizer.rules()[0],
        Rule::Sgd(Sgd {
            lr: 0.5,
            decay: 0.5,
            ..Sgd::default()
        })
    );
    assert_eq!(optimizer.group_of("norm.weight"), Some(1));
    assert!(optimizer.state().is_empty(), "no momentum, no state");
    let before = [model.value("up.bias"), model.value("norm.weight")];
    let gradients = sums(ones(&model)?);
    optimizer.step(&mut model, gradients, 0.5)?;
    // w - 0.5 * 0.5 * (1 + 0.5 w) and w - 0.5 * 0.25
    let expected: Vec<f64> = before[0]
        .iter()
        .map(|w| w - 0.25 * (1.0 + 0.5 * w))
        .collect();
    close("bias", &model.value("up.bias"), &expected, 1e-14);
    let expected: Vec<f64> = before[1].iter().map(|w| w - 0.125).collect();
    close("norm", &model.value("norm.weight"), &expected, 1e-14);
    for bad in ["speed = 1.0", "rule.momentum = true"] {
        assert!(toml::from_str::<Groups>(&format!("{text}\n{bad}")).is_err());
    }
    Ok(())
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let checks: [(Rule, &str); 8] = [
        (adamw().with_lr(-1.0), "rule.lr"),
        (adamw().with_decay(f64::NAN), "rule.decay"),
        (
            Rule::AdamW(AdamW {
                betas: [0.9, 1.0],
                ..AdamW::default()
            }),
            "rule.betas[1]",
        ),
        (
            Rule::Sgd(Sgd {
                nesterov: true,
                ..Sgd::default()
            }),
            "rule.nesterov",
        ),
        (
            Rule::Lion(Lion {
                betas: [-0.1, 0.9],
                ..Lion::default()
            }),
            "rule.betas[0]",
        ),
        (
            Rule::Adafactor(Adafactor {
                beta2_decay: 0.8,
                ..Adafactor::default()
            }),
            "rule.beta2_decay",
        ),
        (
            Rule::Adafactor(Adafactor {
                eps1: Some(0.0),
                ..Adafactor::default()
            }),
            "rule.eps1",
        ),
        (
            Rule::Muon(Muon {
                eps: 0.0,
                ..Muon::default()
            }),
            "rule.eps",
        ),
    ];
    for (rule, key) in checks {
        refused(rule.check("rule"), &[key]);
    }
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() -> Result<()> {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for norm in [
            anymesh_train::optim::Norm::Two,
            anymesh_train::optim::Norm::Largest,
        ] {
            let mesh = Mesh::new("dp=2", &device())?;
            let mut model = bag(&mesh)?;
            let mut optimizer = Optimizer::new(&model, &Groups::all(adamw()))?;
            optimizer.clip = Some(Clip {
                norm,
                ..Clip::to(1.0)
            });
            let gradients = sums(ones(&model)?);
            optimizer.step(&mut model, gradients, 1.0)?;
            let (values, state) = (model.values(), states(&optimizer));
            let mut gradients = ones(&model)?;
            let one = Tensor::from_fn(
                [4],
                (&mesh, "[@dp]"),
                |at| if at[0] == 3 { bad } else { 1.0 },
            );
            gradients.insert("up.bias".into(), one?);
            let outcome = optimizer.step(&mut model, sums(gradients), 1.0)?;
            assert!(
                outcome.skipped && outcome.norm.is_some_and(|n| !n.is_finite()),
                "{bad}"
            );
            for (name, value) in &values {
                assert_eq!(model.value(name), floats(value));
            }
            assert_eq!(states(&optimizer), state);
            assert_eq!(optimizer.steps(), 1);
            // And goes on.
            let gradients = sums(ones(&model)?);
            assert!(!optimizer.step(&mut model, gradients, 1.0)?.skipped);
        }
    }
    Ok(())
}

#[test]
fn gradients_that_do_not_belong_are_refused() -> Result<()> {
    let mut model = plain_bag()?;
    let mut optimizer = Optimizer::new(&model, &Groups::all(adamw()))?;
    let all = ones(&model)?;
    let mut less = all.clone();
    less.remove("up.bias");
    refused(
        optimizer.step(&mut model, sums(less.clone()), 1.0),
        &["'up.bias'", "no gradient"],
    );
    let mut more = all.clone();
    more.insert("other".into(), Tensor::zeros([1], DType::F64, &device())?);
    refused(
        optimizer.step(&mut model, sums(more), 1.0),
        &["no trainable parameter"],
    );
    let mut wrong = all.clone();
    wrong.insert("up.bias".into(), Tensor::zeros([3], DType::F64, &device())?);
    refused(
        optimizer.step(&mut model, sums(wrong), 1.0),
        &["'up.bias'", "f64[3]"],
    );
    // One that may be missing is left alone, also by decay.
    let before = [model.value("up.bias"), model.value("up.weight")];
    let missing = Sums {
        gradients: less,
        missing: ["up.bias".to_string()].into(),
    };
    optimizer.step(&mut model, missing, 1.0)?;
    assert_eq!(model.value("up.bias"), before[0]);
    assert_ne!(model.value("up.weight"), before[1]);
    // Frozen is frozen, and thawed needs another optimizer.
    model.freeze("up.weight")?;
    let mut optimizer = Optimizer::new(&model, &Groups::all(adamw()))?;
    assert_eq!(optimizer.group_of("up.weight"), None);
    model.unfreeze("up.weight")?;
    refused(
        optimizer.step(&mut model, sums(all), 1.0),
        &["'up.weight'", "make another"],
    );
    Ok(())
}

#[test]
fn states_of_other_rules_are_refused() -> Result<()> {
    let model = plain_bag()?;
    let mut optimizer = Optimizer::new(&model, &Groups::all(adamw()))?;
    let state = optimizer.state();
    let mut less = state.clone();
    less.remove("adam.v.up.bias");
    refused(
        optimizer.load_state(less),
        &["'adam.v.up.bias'", "no such state"],
    );
    let mut more = state.clone();
    more.insert("lion.m.up.bias".into(), state["adam.m.up.bias"].clone());
    refused(optimizer.load_state(more), &["'lion.m.up.bias'"]);
    let mut wide = state.clone();
    wide.insert(
        "adam.v.up.bias".into(),
        Tensor::zeros([4], DType::F32, &device())?,
    );
    refused(optimizer.load_state(wide), &["'adam.v.up.bias'", "f32[4]"]);
    optimizer.load_state(state)
}

/// Two layers' worth of batches on a mesh, added up.
fn accumulated(stage: Zero, micro: usize) -> Result<(BTreeMap<String, Vec<f64>>, u64, u64)> {
    let mesh = Mesh::new("dp=2", &device())?;
    let b = Build::new(&mesh, Policy::all(DType::F64), 3).zero(stage, &["dp"]);
    let layer = Linear::new(&b, [6, 4], "[_, _]", Init::Normal(0.5))?.with_bias(&b)?;
    let x = numbers(5, &[8, 6], &mesh, "[@dp, _]")?;
    let mut sums = Accumulator::default();
    let mut while_adding = 0;
    for part in 0..micro {
        let rows = 8 / micro;
        let x = x.narrow(0, part * rows, rows)?.reshard("[@dp, _]")?;
        let loss = layer.forward(&x)?.square()?.sum_all()?.div(8.0)?;
        let gradients = loss.backward()?;
        let (added, ledger) = Ledger::record(|| sums.add(&layer, &gradients));
        added?;
        while_adding += ledger.bytes();
    }
    let (finished, ledger) = Ledger::record(|| sums.finish(&layer));
    let finished = finished?;
    layer.visit("", &mut |name, p| {
        assert_eq!(finished.gradients[name].sharding(), p.value().sharding());
    });
    let values = finished
        .gradients
        .iter()
        .map(|(n, g)| (n.clone(), floats(g)));
    Ok((values.collect(), while_adding, ledger.bytes()))
}

#[test]
fn micro_batches_are_added_without_sending() -> Result<()> {
    let (whole, ..) = accumulated(Zero::Off, 1)?;
    for stage in [Zero::Off, Zero::One, Zero::Two, Zero::Three] {
        let mut sent = vec![];
        for micro in [1, 2, 4] {
            let (gradients, while_adding, at_the_end) = accumulated(stage, micro)?;
            assert_eq!(while_adding, 0, "{stage:?}");
            for (name, values) in gradients {
                close(
                    &format!("{stage:?}, {micro}: {name}"),
                    &values,
                    &whole[&name],
                    1e-12,
                );
            }
            sent.push(at_the_end);
        }
        // What is left for the end does not grow with the micro-batches.
        assert!(sent.iter().all(|s| *s == sent[0]), "{stage:?}: {sent:?}");
        assert_eq!(sent[0] == 0, stage >= Zero::Two, "{stage:?}: {sent:?}");
    }
    Ok(())
}

#[test]
fn a_trainable_parameter_without_a_gradient_is_named() -> Result<()> {
    let b = Build::new(&device(), Policy::f32(), 3);
    let layer = Linear::new(&b, [6, 4], "[_, _]", Init::Ones)?.with_bias(&b)?;
    let x = Tensor::ones([2, 6], DType::F32, &device())?;
    let gradients = x
        .linear(&layer.weight.get()?, None)?
        .sum_all()?
        .backward()?;
    let mut sums = Accumulator::default();
    sums.add(&layer, &gradients)?;
    let error = sums.finish(&layer).expect_err("the bias has none");
    assert!(
        matches!(&error, Error::Parameter { name, .. } if name == "bias"),
        "{error}"
    );
    let mut sums = Accumulator::default().may_lack("bias")?;
    sums.add(&layer, &gradients)?;
    let finished = sums.finish(&layer)?;
    assert!(finished.missing.contains("bias") && finished.gradients.len() == 1);
    assert_eq!(sums.passes(), 0, "ready for the next step");
    Ok(())
}

#[test]
fn adamw_launches_the_program_that_is_compiled_ahead() -> Result<()> {
    let seen = Arc::new(Mutex::new(vec![]));
    let programs = seen.clone();
    let device = device().decorated(move |backend, kernel| {
        if let Kernel::Map(call) = &kernel {
            programs
                .lock()
                .expect("programs")
                .push(call.program.clone());
        }
        backend.launch(kernel)
    });
    let value = Tensor::new(&[1f32, -2.0], &device)?;
    let mut model = Bag::new([("weight".into(), value)])?;
    let gradients = sums(ones(&model)?);
    let mut optimizer = Optimizer::new(&model, &Groups::all(adamw()))?;
    optimizer.step(&mut model, gradients, 1.0)?;
    let known = AdamStep::program(DType::F32)?;
    assert!(seen.lock().expect("programs").contains(&known));
    Ok(())
}
