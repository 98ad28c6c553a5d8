//! A rule exists once: what the table of ops says is what runs.
//!
//! Every op is run on a mesh in several layouts and dtypes while the solver's decisions are traced.
//! A text, a function or the name of another op that stands in the table and never ran fails here,
//! and so does one that ran and does not stand there.

use crate::support::device;
use anymesh_conformance::registry::{self, Attrs, Entry, Sample};
use anymesh_core::{
    DType, Error, Mesh, Place, Result, Shape, Sharding, Tensor,
    grad::{GradOptions, grad},
    ops::{self, NormOptions, OpInfo, Order, RuleForm},
    spmd::{self, Decision, Rule, Source, rule::Given, trace},
};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that the calls of one op decided.
fn decisions(entry: &'static Entry, mesh: &Mesh) -> Vec<Decision> {
    let mut all = vec![];
    for sample in entry.samples() {
        for (mixed, dtypes) in variants(&sample).into_iter().enumerate() {
            let rank = sample.inputs.iter().flatten().map(|i| i.shape.len()).max();
            for layout in 0..2 * rank.unwrap_or(0) + 1 {
                let run = || call(entry, &sample, &dtypes, mesh, layout);
                let (result, decisions) = trace(run);
                if let (Err(error), 0) = (result, mixed) {
                    panic!("{} {}: {error}", entry.name, sample.attrs);
                }
                all.extend(decisions);
            }
        }
    }
    let (result, decisions) = trace(|| decompose(entry.name, mesh));
    result.unwrap();
    all.extend(decisions);
    all
}

/// Calls that make an op run as its decomposition, where moving the operands of its samples takes
/// fewer bytes.
fn decompose(op: &str, mesh: &Mesh) -> Result<()> {
    match op {
        "instance_norm" => on(mesh, &[1, 1, 64], "[_, _, @a@b]")
            .instance_norm(&NormOptions::new())
            .map(drop),
        "topk" => on(mesh, &[256], "[@a@b]")
            .topk(1, 0, Order::Descending)
            .map(drop),
        _ => Ok(()),
    }
}

/// The dtypes of a sample's operands: its own first, then others, which it may refuse.
fn variants(sample: &Sample) -> Vec<Vec<Option<DType>>> {
    let own: Vec<Option<DType>> = sample
        .inputs
        .iter()
        .map(|i| i.as_ref().map(|i| i.dtype))
        .collect();
    let changed = |f: &dyn Fn(usize, DType) -> DType| -> Vec<Option<DType>> {
        let of = |(i, d): (usize, &Option<DType>)| d.map(|d| f(i, d));
        own.iter().enumerate().map(of).collect()
    };
    let last = own.len().saturating_sub(1);
    let float_to = |d: DType, to: DType| if d == DType::F32 { to } else { d };
    vec![
        own.clone(),
        changed(&|i, d| if i == 0 { float_to(d, DType::F16) } else { d }),
        changed(&|i, d| if i < last { float_to(d, DType::I32) } else { d }),
        changed(&|i, d| if i == 0 { float_to(d, DType::Bool) } else { d }),
    ]
}

fn call(
    entry: &'static Entry,
    sample: &Sample,
    dtypes: &[Option<DType>],
    mesh: &Mesh,
    layout: usize,
) -> Result<Vec<Tensor>> {
    let mut operands = vec![];
    for (x, dtype) in sample.make(7, &device())?.into_iter().zip(dtypes) {
        let (Some(x), Some(dtype)) = (x, dtype) else {
            operands.push(None);
            continue;
        };
        // Nothing is cut; then a dimension is cut over both axes, or over the first one and its
        // neighbour over the second.
        let sharding = match (layout.checked_sub(1), x.rank()) {
            (Some(way), rank) if rank > 0 => {
                let (first, second) = (way / 2 % rank, (way / 2 + way % 2) % rank);
                Sharding::replicated().cut(first, 0).cut(second, 1)
            }
            _ => Sharding::replicated(),
        };
        operands.push(Some(x.cast(*dtype)?.to_mesh(mesh, sharding)?));
    }
    let attrs = Attrs::new(entry, &sample.attrs)?;
    entry.call(&operands, &attrs, Place::from(mesh))
}

/// What a decision stands for in the table, seen from the op that was called: its own rule, or the
/// name of another op or step.
fn ran(op: &str, decision: &Decision) -> String {
    if decision.op == op {
        decision.step.into()
    } else {
        decision.op.into()
    }
}

/// Whether the rule of a decision is that of the op itself.
fn is_own(info: &OpInfo, decision: &Decision) -> bool {
    decision.op == info.name
        && match (&decision.source, info.rule) {
            (Source::Text(text), rule) => rule.texts().contains(&text.as_str()),
            (Source::Built(name), RuleForm::Built(built)) => *name == built.name,
            _ => false,
        }
}

/// The names that an op may run: those that it lists, and what those run in turn.
fn allowed(table: &BTreeMap<&str, OpInfo>, info: &OpInfo) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut open: Vec<&str> = info.runs.to_vec();
    while let Some(name) = open.pop() {
        if names.insert(name.to_string()) {
            let of = table
                .get(name)
                .unwrap_or_else(|| panic!("{} runs {name}, which is in no table", info.name));
            open.extend(of.runs);
        }
    }
    names
}

#[test]
fn what_the_table_of_ops_says_is_what_runs() {
    let (mesh, catalog) = (Mesh::new("a=2, b=2", &device()).unwrap(), ops::catalog());
    let table: BTreeMap<&str, OpInfo> = ops::steps()
        .into_iter()
        .chain(catalog.iter().copied())
        .map(|info| (info.name, info))
        .collect();
    let mut wrong = vec![];
    let mut steps: BTreeSet<String> = BTreeSet::new();
    for info in &catalog {
        let decisions = decisions(registry::find(info.name).unwrap(), &mesh);
        let allowed = allowed(&table, info);
        let (mut texts, mut others) = (BTreeSet::new(), BTreeSet::new());
        for decision in &decisions {
            steps.insert(decision.step.into());
            if is_own(info, decision) {
                texts.insert(decision.source.clone());
            } else {
                others.insert(ran(info.name, decision));
            }
        }
        let own: BTreeSet<Source> = match info.rule {
            RuleForm::Built(built) => [Source::Built(built.name)].into(),
            rule => rule
                .texts()
                .iter()
                .map(|t| Source::Text((*t).into()))
                .collect(),
        };
        for never in own.difference(&texts) {
            wrong.push(format!("{}: never ran by {never:?}", info.name));
        }
        for unlisted in others.difference(&allowed) {
            wrong.push(format!(
                "{}: ran {unlisted}, which it does not list",
                info.name
            ));
        }
        for never in info.runs.iter().filter(|name| !others.contains(**name)) {
            // What it lists may itself run as others.
            let of = &table[never];
            if !matches!(of.rule, RuleForm::Composed)
                || !of.runs.iter().any(|n| others.contains(*n))
            {
                wrong.push(format!("{}: never ran {never}", info.name));
            }
        }
    }
    for step in ops::steps() {
        if !steps.contains(step.name) {
            wrong.push(format!("step {} never ran", step.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A rule with every factor in brackets that must be whole cannot be written: what is in brackets
/// with it may be cut.
fn is_writable(rule: &Rule) -> bool {
    use anymesh_core::spmd::rule::FactorKind;
    let dims = || rule.inputs.iter().chain(&rule.outputs).flatten();
    let whole = |f: &u8| rule.factors[*f as usize].kind == FactorKind::Whole;
    rule.factors.len() <= 26 && !dims().any(|d| d.len() > 1 && d.iter().any(whole))
}

#[test]
fn a_rule_prints_itself_in_the_notation_that_it_is_read_from() {
    let mesh = Mesh::new("a=2, b=2", &device()).unwrap();
    let (mut read, mut seen) = (0, BTreeSet::new());
    for entry in registry::entries() {
        for decision in decisions(entry, &mesh) {
            let text = decision.rule.to_string();
            let types: Vec<String> = decision.inputs.iter().map(Tensor::type_string).collect();
            if !is_writable(&decision.rule) || !seen.insert((text.clone(), types)) {
                continue;
            }
            let given: Vec<Given<'_>> = decision.inputs.iter().map(Into::into).collect();
            let sizes: Vec<(char, usize)> = (decision.rule.letters().into_iter())
                .zip(decision.rule.factors.iter().map(|f| f.size))
                .collect();
            let again = Rule::with_sizes(&text, &given, &[], &sizes)
                .unwrap_or_else(|e| panic!("{}: '{text}': {e}", decision.op));
            assert_eq!(again.to_string(), text, "{}", decision.op);
            let solved = Decision {
                rule: again,
                ..decision.clone()
            }
            .solve()
            .unwrap();
            let expected = decision.solve().unwrap();
            assert_eq!(
                (solved.bytes, solved.owed, solved.decompose),
                (expected.bytes, expected.owed, expected.decompose),
                "{}: '{text}'",
                decision.op
            );
            read += 1;
        }
    }
    assert!(read > 200, "{read} rules were read");
}

#[test]
fn a_clause_says_which_operand_is_added_once() {
    let (x, y) = (Shape::from([4]), Shape::from([6]));
    let given = [Given::Shape(&x), Given::Shape(&y)];
    let text = "a, b -> a ; reduce b sum ; linear 0 1";
    let usual = Rule::new(text, &given, &[]).unwrap();
    assert_eq!((usual.addends, usual.to_string()), (0b11, text.into()));
    let text = format!("{text} ; addend 0");
    let one = Rule::new(&text, &given, &[]).unwrap();
    assert_eq!((one.addends, one.to_string()), (0b01, text));
    assert!(matches!(
        Rule::new("a, b -> ab ; offset", &given, &[]),
        Err(Error::Parse { .. })
    ));
}

fn on(mesh: &Mesh, shape: &[usize], sharding: &str) -> Tensor {
    Tensor::ones(Shape::from(shape), DType::F32, &device())
        .unwrap()
        .to_mesh(mesh, sharding)
        .unwrap()
}

#[test]
fn ops_of_users_that_share_a_name_or_a_text_keep_their_own_rules() {
    let mesh = Mesh::new("a=2", &device()).unwrap();
    let x = on(&mesh, &[4, 6], "[_, @a]");
    let sum = |text: String, axis: i64| {
        spmd::apply("mine", &text, &[&x], |x| {
            Ok(vec![x[0].sum(&[axis], false)?])
        })
        .unwrap()
        .remove(0)
        .type_string()
    };
    // Each text is a new string, where the one before it was.
    for _ in 0..3 {
        let rows = sum(format!("m{} -> m ; reduce k sum", 'k'), 1);
        let columns = sum(format!("m{} -> k ; reduce m sum", 'k'), 0);
        assert_eq!((&rows[..], &columns[..]), ("f32[4]{sum:a}", "f32[6@a]"));
    }
}

#[test]
fn a_rule_of_a_user_is_held_against_the_sizes_of_every_call() {
    let mesh = Mesh::new("a=2", &device()).unwrap();
    let x = on(&mesh, &[4, 6], "[@a, _]");
    let pass = |rows: usize| {
        let w = on(&mesh, &[rows], "[_]");
        spmd::apply("pass", "mk, k -> mk", &[&x, &w], |x| Ok(vec![x[0].clone()])).map(|_| ())
    };
    assert_eq!(pass(6), Ok(()));
    assert!(matches!(pass(5), Err(Error::Shape { .. })), "k is 6 and 5");
}

#[test]
fn a_gradient_that_only_repeats_has_the_shape_of_its_own_operand() {
    // A mean of f16 is computed in f32, so its gradient is a map of the gradient alone, over a
    // space that no operand of the map has: its size must not come from the call before.
    let mesh = Mesh::new("a=2", &device()).unwrap();
    for columns in [6, 10, 6] {
        let x = on(&mesh, &[4, columns], "[@a, _]")
            .cast(DType::F16)
            .unwrap()
            .require_grad()
            .unwrap();
        let var = x.var(&[1], false, 0).unwrap().sum(&[], false).unwrap();
        let found = grad(&[&var], &[&x], &GradOptions::default()).unwrap();
        assert_eq!(found[0].type_string(), format!("f16[4@a, {columns}]"));
    }
}

#[test]
fn a_decision_tells_the_sizes_of_its_own_operands() {
    let mesh = Mesh::new("a=2", &device()).unwrap();
    for rows in [4, 6] {
        let x = on(&mesh, &[rows, 8], "[@a, _]");
        let (result, decisions) = trace(|| x.softmax(1));
        result.unwrap();
        let sizes: Vec<usize> = decisions[0].rule.factors.iter().map(|f| f.size).collect();
        assert_eq!(sizes, [rows, 8], "it was solved for 4 rows");
    }
}
