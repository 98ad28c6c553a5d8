//! A fault is put somewhere into a step of training, and the op that is named must be the one it
//! was put into. What is expected is what ran when the fault struck, not what the test knows of the
//! program.

use super::{
    lossy::{Shared, Struck, WRONGS, broken, lossy, trigger},
    step::{MESHES, Phase, Program, train},
};
use anymesh_core::{
    Device, Mesh, Result, Tensor,
    compare::{Compare, Comparison, Finding, Given, Tolerance, Why, compare},
};
use std::cell::Cell;

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

/// The finaliser of splitmix64 over a counter.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n.max(1)
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// A seed that can be given, and is printed.
fn random(what: &str) -> (Random, u64) {
    let given = |name: &str| std::env::var(name).ok()?.parse().ok();
    let seed = given("ANYMESH_FAULT_SEED").unwrap_or(15);
    let faults = given("ANYMESH_FAULTS").unwrap_or(60);
    println!("{what}: seed {seed}, {faults} faults");
    (Random(seed), faults)
}

/// Whether what was named is what the fault struck. Lines of the block are called `times` a step.
fn is_right(found: &Finding, struck: &Struck, times: u32) -> bool {
    let Some((op, line, phase, what)) = struck else {
        return false;
    };
    let step = |nth: u32| match phase {
        Phase::Forward(step) => nth == *step || nth == times * step,
        Phase::Backward(step) => nth == *step || nth / times == *step,
        Phase::Update(n) => nth == *n,
        Phase::Setup => true,
    };
    // Gradients are added up between the parts of a pass: beside the op that gave the last of them.
    let adds = ["add", "sum", "concat", "reduction"].contains(what);
    let between = adds && matches!(phase, Phase::Backward(_));
    match found.given {
        Given::Sum(_) => return between && step(found.nth),
        Given::Total => return between && found.op == "leaf",
        _ => {}
    }
    let same_op = found.op == *op || found.within.as_deref() == Some(op);
    let same_line = found.caller == line.to_string();
    // Every line is called once a step; moves and parameters are counted otherwise.
    let counted =
        matches!(found.why, Why::Values(_)) && found.op != "leaf" && found.within.is_none();
    let same_call = step(found.nth);
    let same_pass = match phase {
        Phase::Backward(_) => true,
        // What an op keeps for its gradient is made in the forward pass.
        Phase::Forward(_) => true,
        Phase::Setup | Phase::Update(_) => matches!(found.given, Given::Result(_)),
    };
    same_op && same_line && (same_call || !counted) && same_pass
}

/// What became of faults.
#[derive(Debug, Default)]
struct Tally {
    right: u64,
    /// By where they struck.
    forward: u64,
    backward: u64,
    update: u64,
    /// Nothing that any op gave was changed.
    harmless: u64,
    wrong: Vec<String>,
}

impl Tally {
    /// Judges a comparison; `clean` compares the same place without and with the fault, to the bit.
    fn add(
        &mut self,
        name: &str,
        found: &Comparison,
        (struck, times): (&Struck, u32),
        clean: impl FnOnce() -> Result<Comparison>,
    ) -> Result<()> {
        match found.first() {
            Some(first) if is_right(first, struck, times) => {
                self.right += 1;
                match struck.map(|(_, _, phase, _)| phase) {
                    Some(Phase::Backward(_)) => self.backward += 1,
                    Some(Phase::Update(_)) => self.update += 1,
                    _ => self.forward += 1,
                }
            }
            Some(_) => self.wrong.push(format!(
                "{name}: {struck:?} struck, and this was named:\n{found}"
            )),
            None => match clean()? {
                none if none.is_same() => self.harmless += 1,
                some => self
                    .wrong
                    .push(format!("{name}: {struck:?} struck and was missed:\n{some}")),
            },
        }
        Ok(())
    }

    fn check(&self, least: u64) {
        println!(
            "{} right ({} forward, {} backward, {} updates), {} without effect, {} wrong",
            self.right,
            self.forward,
            self.backward,
            self.update,
            self.harmless,
            self.wrong.len()
        );
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n\n"));
        assert!(
            self.right >= least,
            "too few faults had an effect: {self:?}"
        );
    }
}

fn bits() -> Compare {
    Compare {
        tolerance: Some(Tolerance::BITS),
        ..Compare::default()
    }
}

/// How many launches, or reductions, there are in a run, after the parameters are made.
fn counted(shared: &Shared) -> (u64, u64) {
    let trigger = shared.lock().expect("no panic under the lock");
    let setup = |p: &&Phase| **p == Phase::Setup;
    (
        trigger.phases.iter().filter(setup).count() as u64,
        trigger.count,
    )
}

#[test]
fn an_element_that_a_kernel_gets_wrong_names_its_op() -> Result<()> {
    let (mut random, faults) = random("elements");
    let mut tally = Tally::default();
    for _ in 0..faults {
        let (axes, wrong) = (random.of(&MESHES), random.of(&WRONGS));
        let program = Program {
            recompute: random.below(3) == 0,
            ..Program::default()
        };
        let count = trigger(None);
        train(
            &program,
            &Mesh::new(axes, &broken(&cpu(), &count, wrong, 0))?,
        )?;
        let (setup, all) = counted(&count);
        let (at, element) = (setup + random.below(all - setup), random.below(1 << 20));
        let fault = trigger(Some(at));
        let device = broken(&cpu(), &fault, wrong, element);
        let mesh = Mesh::new(axes, &device)?;
        let found = compare(|m: &Mesh| train(&program, m), &Mesh::single(&cpu()), &mesh)?;
        let struck = fault.lock().expect("no panic under the lock").struck;
        let name = format!("{wrong:?} at launch {at} of {all} on {axes}");
        let times = if program.recompute { 2 } else { 1 };
        tally.add(&name, &found, (&struck, times), || {
            let again = broken(&cpu(), &trigger(Some(at)), wrong, element);
            let clean = Mesh::new(axes, &cpu())?;
            bits().run(
                |m: &Mesh| train(&program, m),
                &clean,
                &Mesh::new(axes, &again)?,
            )
        })?;
    }
    tally.check(faults * 3 / 4);
    assert!(tally.backward > 0 && tally.forward > 0 && tally.update > 0);
    Ok(())
}

#[test]
fn a_lost_reduction_names_the_op_that_needed_it() -> Result<()> {
    let (mut random, faults) = random("reductions");
    let mut tally = Tally::default();
    let program = Program::default();
    for _ in 0..faults / 2 {
        let axes = random.of(&MESHES);
        let on = |shared: &Shared| -> Result<Mesh> {
            Ok(Mesh::new(axes, &cpu())?.with_transport(lossy(shared)))
        };
        let count = trigger(None);
        train(&program, &on(&count)?)?;
        let (_, all) = counted(&count);
        if all == 0 {
            continue;
        }
        let at = random.below(all);
        let fault = trigger(Some(at));
        let run = |m: &Mesh| train(&program, m);
        let found = compare(run, &Mesh::single(&cpu()), &on(&fault)?)?;
        let struck = fault.lock().expect("no panic under the lock").struck;
        let name = format!("reduction {at} of {all} on {axes}");
        tally.add(&name, &found, (&struck, 1), || {
            bits().run(run, &on(&trigger(None))?, &on(&trigger(Some(at)))?)
        })?;
    }
    tally.check(faults / 4);
    Ok(())
}

/// Rules that do not hold: rows are cut that must be whole, what is not linear lets sums pass, and
/// sums are put together as something else.
const WRONG_RULES: [(usize, &str, &str); 5] = [
    (0, "centred", "...rc -> ...rc"),
    (1, "squashed", "...rc, c -> ...rc ; linear 0"),
    (1, "squashed", "...rc, c -> ...rc ; linear 0 1"),
    (2, "powers", "...rc -> ...r ; reduce c max"),
    (2, "powers", "...rc -> ...r ; reduce c prod"),
];

#[test]
fn an_op_with_a_wrong_rule_is_named() -> Result<()> {
    let mut named = 0;
    for (which, op, rule) in WRONG_RULES {
        for axes in MESHES {
            let mut rules = super::step::RULES;
            rules[which] = rule;
            let wrong = Program {
                rules,
                ..Program::default()
            };
            let found = compare(
                |m: &Mesh| train(&wrong, m),
                &Mesh::single(&cpu()),
                &Mesh::new(axes, &cpu())?,
            )?;
            if let Some(first) = found.first() {
                assert_eq!(first.op, op, "{rule} on {axes}:\n{found}");
                named += 1;
                continue;
            }
            // Nothing was cut, or lay as partial sums, where the rule matters: it is as good as the
            // right one there.
            let runs = Cell::new(0);
            let either = |m: &Mesh| {
                runs.set(runs.get() + 1);
                match runs.get() {
                    1 => train(&Program::default(), m),
                    _ => train(&wrong, m),
                }
            };
            let mesh = Mesh::new(axes, &cpu())?;
            let found = Compare::default().run(either, &mesh, &mesh)?;
            assert!(found.is_same(), "{rule} on {axes} was missed:\n{found}");
        }
    }
    println!("{named} wrong rules mattered and were named");
    assert!(named >= 8, "only {named} wrong rules mattered");
    Ok(())
}

#[test]
fn a_fault_on_one_device_is_named_against_another() -> Result<()> {
    let (mut random, faults) = random("one device");
    let mut tally = Tally::default();
    let program = Program::default();
    let count = trigger(None);
    train(
        &program,
        &Mesh::single(&broken(&cpu(), &count, WRONGS[0], 0)),
    )?;
    let (setup, all) = counted(&count);
    for _ in 0..faults / 2 {
        let (wrong, element) = (random.of(&WRONGS), random.below(1 << 20));
        let at = setup + random.below(all - setup);
        let fault = trigger(Some(at));
        let run = |m: &Mesh| train(&program, m);
        let faulty = Mesh::single(&broken(&cpu(), &fault, wrong, element));
        // The fault may be in the run that should be right: the op is the same.
        let found = match random.below(2) {
            0 => compare(run, &Mesh::single(&cpu()), &faulty)?,
            _ => compare(run, &faulty, &Mesh::single(&cpu()))?,
        };
        let struck = fault.lock().expect("no panic under the lock").struck;
        let name = format!("{wrong:?} at launch {at} of {all}");
        tally.add(&name, &found, (&struck, 1), || {
            let again = broken(&cpu(), &trigger(Some(at)), wrong, element);
            bits().run(run, &Mesh::single(&cpu()), &Mesh::single(&again))
        })?;
    }
    tally.check(faults * 3 / 8);
    Ok(())
}

#[test]
fn with_all_every_fault_is_found_and_nothing_else() -> Result<()> {
    // Two ops that are wrong: in step the second is found too, and what lies between them is not.
    let wrong = |op: &'static str| {
        cpu().decorated(
            move |cpu, kernel| match kernel.op() == op || kernel.op() == "tanh" {
                true => Ok([cpu.upload(&[0; 32])?].into_iter().collect()),
                false => cpu.launch(kernel),
            },
        )
    };
    let run = |m: &Mesh| -> Result<Tensor> {
        let x = Tensor::ones([8], anymesh_core::DType::F32, m)?;
        x.exp()?.mul(2.0)?.sub(1.0)?.tanh()?.add(3.0)
    };
    let compare = Compare {
        all: true,
        ..Compare::default()
    };
    let found = compare.run(run, &Mesh::single(&cpu()), &Mesh::single(&wrong("exp")))?;
    let ops: Vec<&str> = found.findings.iter().map(|f| f.op.as_str()).collect();
    assert_eq!(ops, ["exp", "tanh"]);
    Ok(())
}
