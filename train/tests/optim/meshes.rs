//! Every rule on every mesh: the same numbers, and nothing sent that need not be.

use super::{Bag, MESHES, close, device, numbers, states, sums};
use anymesh_core::{Mesh, Sharding, Tensor, spmd::Ledger};
use anymesh_train::{
    Module, Result,
    optim::{
        Adafactor, Adam8, AdamW, Adjust, Clip, Groups, Lion, Muon, Norm, Optimizer, Rule, Sgd,
        norm_of,
    },
};
use std::collections::BTreeMap;

/// Matrices that stack (three of them, which no mesh divides), that do not, whose rows are blocks of
/// 256 or not, and vectors.
const SHAPES: [(&str, &[usize]); 8] = [
    ("a.weight", &[6, 5]),
    ("b.weight", &[6, 5]),
    ("c.weight", &[6, 5]),
    ("d.weight", &[4, 9]),
    ("rows.weight", &[3, 512]),
    ("across.weight", &[7, 130]),
    ("short.bias", &[11]),
    ("long.bias", &[1000]),
];

fn rules() -> Vec<(&'static str, Rule)> {
    let adamw = AdamW {
        lr: 0.02,
        decay: 0.1,
        ..AdamW::default()
    };
    let muon = Muon {
        lr: 0.02,
        ..Muon::default()
    };
    vec![
        (
            "sgd",
            Rule::Sgd(Sgd {
                lr: 0.1,
                momentum: 0.9,
                nesterov: true,
                decay: 0.01,
                ..Sgd::default()
            }),
        ),
        ("adamw", Rule::AdamW(adamw.clone())),
        (
            "amsgrad",
            Rule::AdamW(AdamW {
                amsgrad: true,
                coupled: true,
                ..adamw
            }),
        ),
        ("lion", Rule::Lion(Lion::default())),
        ("adafactor", Rule::Adafactor(Adafactor::default())),
        (
            "adafactor, small ones whole",
            Rule::Adafactor(Adafactor {
                min_factored: 6,
                decay: 0.1,
                ..Adafactor::default()
            }),
        ),
        ("muon", Rule::Muon(muon.clone())),
        (
            "muon as optax",
            Rule::Muon(Muon {
                bias_correction: true,
                add_eps: true,
                adjust: Adjust::MatchRmsAdamw,
                ..muon
            }),
        ),
        (
            "adam8",
            Rule::Adam8(Adam8 {
                lr: 0.02,
                min_size: 900,
                ..Adam8::default()
            }),
        ),
        (
            "adam8, coupled",
            Rule::Adam8(Adam8 {
                lr: 0.02,
                coupled: true,
                min_size: 900,
                ..Adam8::default()
            }),
        ),
    ]
}

fn groups(rule: &Rule) -> Groups {
    match rule {
        Rule::Muon(_) => Groups::default()
            .of("*.bias", Rule::AdamW(AdamW::default()))
            .of("*", rule.clone()),
        _ => Groups::all(rule.clone()),
    }
}

struct Run {
    model: Bag,
    optimizer: Optimizer,
}

/// A model on a mesh, matrices and vectors as they are told.
fn begin(rule: &Rule, mesh: &Mesh, [matrix, vector]: [&str; 2]) -> Result<Run> {
    let model = Bag::new(
        SHAPES
            .iter()
            .enumerate()
            .map(|(i, (name, dims))| {
                let sharding = if dims.len() == 2 { matrix } else { vector };
                Ok((name.to_string(), numbers(i, dims, mesh, sharding)?))
            })
            .collect::<Result<Vec<_>>>()?,
    )?;
    let mut optimizer = Optimizer::new(&model, &groups(rule))?;
    // A norm is a sum in another order, which may tip what is rounded to 8 bits.
    optimizer.clip = match rule {
        Rule::Adam8(_) => None,
        _ => Some(Clip::to(5.0)),
    };
    Ok(Run { model, optimizer })
}

fn gradients(model: &Bag, step: usize) -> Result<BTreeMap<String, Tensor>> {
    let params = model.0.iter().enumerate();
    params
        .map(|(i, (name, p))| {
            let (value, seed) = (p.value(), 1000 * step + i);
            let sharding = value.sharding().clone();
            let gradient = numbers(seed, value.dims(), value.mesh(), sharding)?;
            Ok((name.clone(), gradient))
        })
        .collect()
}

fn steps(run: &mut Run, steps: std::ops::Range<usize>) -> Result<()> {
    for step in steps {
        let gradients = sums(gradients(&run.model, step)?);
        let factor = 1.0 / (1.0 + step as f64);
        let outcome = run.optimizer.step(&mut run.model, gradients, factor)?;
        assert!(!outcome.skipped);
    }
    Ok(())
}

#[track_caller]
fn same(what: &str, run: &Run, plain: &Run) {
    // Blocks have the same values everywhere, and the largest of some is no sum.
    let exact = what.contains("adam8");
    let equal = |what: String, actual: &[f64], expected: &[f64]| match exact {
        true => assert_eq!(actual, expected, "{what}"),
        false => close(&what, actual, expected, 1e-12),
    };
    for (name, _) in SHAPES {
        let (actual, expected) = (run.model.value(name), plain.model.value(name));
        equal(format!("{what}: {name}"), &actual, &expected);
    }
    let (actual, expected) = (states(&run.optimizer), states(&plain.optimizer));
    assert!(actual.keys().eq(expected.keys()), "{what}");
    for (name, actual) in &actual {
        equal(format!("{what}: {name}"), actual, &expected[name]);
    }
}

#[test]
fn every_rule_gives_the_same_numbers_on_every_mesh() -> Result<()> {
    for (name, rule) in rules() {
        let mut plain = begin(&rule, &Mesh::single(&device()), ["[_, _]", "[_]"])?;
        steps(&mut plain, 0..3)?;
        for (axes, matrices, vectors) in MESHES {
            let mesh = Mesh::new(axes, &device())?;
            for (matrix, vector) in matrices.iter().zip(vectors.iter().cycle()) {
                let mut run = begin(&rule, &mesh, [matrix, vector])?;
                let lies: Vec<String> = run
                    .optimizer
                    .state()
                    .values()
                    .map(|t| t.type_string())
                    .collect();
                steps(&mut run, 0..3)?;
                same(&format!("{name}, {axes}, {matrix}, {vector}"), &run, &plain);
                let after = run.optimizer.state().into_values();
                let after = after.map(|t| t.type_string());
                assert!(after.eq(lies), "states lie where they lay");
            }
        }
    }
    Ok(())
}

#[test]
fn a_state_goes_on_on_another_mesh() -> Result<()> {
    let (from, to) = (
        Mesh::new("dp=2, tp=2", &device())?,
        Mesh::new("dp=3", &device())?,
    );
    for (name, rule) in rules() {
        let mut plain = begin(&rule, &Mesh::single(&device()), ["[_, _]", "[_]"])?;
        steps(&mut plain, 0..4)?;
        let mut first = begin(&rule, &from, ["[@tp, @dp]", "[@dp]"])?;
        steps(&mut first, 0..2)?;
        let mut second = begin(&rule, &to, ["[_, @dp]", "[@dp]"])?;
        let values = first.model.values().into_iter();
        let values = values.map(|(name, t)| Ok((name, t.to_mesh(&to, Sharding::replicated())?)));
        second.model.set_values(&values.collect::<Result<_>>()?)?;
        second.optimizer.load_state(first.optimizer.state())?;
        second.optimizer.set_progress(first.optimizer.progress());
        steps(&mut second, 2..4)?;
        same(name, &second, &plain);
    }
    Ok(())
}

#[test]
fn elementwise_rules_send_nothing() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &device())?;
    for (name, rule) in rules() {
        if !matches!(rule, Rule::Sgd(_) | Rule::AdamW(_) | Rule::Lion(_)) {
            continue;
        }
        let mut run = begin(&rule, &mesh, ["[@dp, @tp]", "[@tp@dp]"])?;
        run.optimizer.clip = None;
        let (outcome, ledger) = Ledger::record(|| steps(&mut run, 0..2));
        outcome?;
        assert_eq!(ledger.entries.len(), 0, "{name}:\n{ledger}");
    }
    Ok(())
}

#[test]
fn moments_of_8_bits_stay_where_blocks_are_whole() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &device())?;
    for sharding in ["[@dp, @tp]", "[@tp@dp, _]", "[_, @tp]", "[_, @dp@tp]"] {
        let model = Bag::new([("w".into(), numbers(1, &[8, 1024], &mesh, sharding)?)])?;
        let mut run = Run {
            optimizer: Optimizer::new(&model, &Groups::all(Rule::Adam8(Adam8::default())))?,
            model,
        };
        run.optimizer.clip = None;
        let (outcome, ledger) = Ledger::record(|| steps(&mut run, 0..2));
        outcome?;
        assert_eq!(ledger.entries.len(), 0, "{sharding}:\n{ledger}");
    }
    Ok(())
}

#[test]
fn muon_exchanges_a_stack_once_each_way() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &device())?;
    let value = |seed: usize| numbers(seed, &[8, 12], &mesh, "[@dp, @tp]");
    let model = Bag::new(
        (0..6)
            .map(|i| Ok((format!("{i}.weight"), value(i)?)))
            .collect::<Result<Vec<_>>>()?,
    )?;
    let mut run = Run {
        optimizer: Optimizer::new(&model, &Groups::all(Rule::Muon(Muon::default())))?,
        model,
    };
    run.optimizer.clip = None;
    let (outcome, ledger) = Ledger::record(|| steps(&mut run, 0..1));
    outcome?;
    assert_eq!(ledger.entries.len(), 2, "{ledger}");
    // 6 matrices of 96 values of 8 bytes. A rank with two whole ones lacks 3/4 of them, and gets
    // back at most its quarter of those it has not.
    let there = 2 * 96 * 8 * 3 / 4;
    assert!(ledger.entries[0].bytes <= there, "{ledger}");
    assert!(ledger.entries[1].bytes <= 6 * 96 * 8 / 4, "{ledger}");
    Ok(())
}

#[test]
fn norms_are_reduced_once_for_each_set_of_axes() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &device())?;
    let shardings = ["[@dp, _]", "[_, @tp]", "[@dp, @tp]", "[@tp, @dp]", "[_, _]"];
    let mut gradients = vec![];
    for (i, sharding) in shardings.iter().cycle().take(40).enumerate() {
        gradients.push(numbers(i, &[5, 3], &mesh, *sharding)?);
    }
    for norm in [Norm::Two, Norm::Largest] {
        let plain: Vec<Tensor> = (0..40)
            .map(|i| numbers(i, &[5, 3], &Mesh::single(&device()), "[_, _]"))
            .collect::<Result<_>>()?;
        let expected = norm_of(&plain, norm)?;
        let (actual, ledger) = Ledger::record(|| norm_of(&gradients, norm));
        close("norm", &[actual?], &[expected], 1e-14);
        assert!(ledger.entries.len() <= 3, "{ledger}");
        assert!(
            ledger.entries.iter().all(|e| e.bytes <= 64),
            "numbers:\n{ledger}"
        );
    }
    Ok(())
}
