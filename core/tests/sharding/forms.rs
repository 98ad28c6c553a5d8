//! Values that are at hand in several shardings: what ops bring is used again, and gives the same.

use crate::support::{device, same, whole_numbers};
use anymesh_conformance::registry::{Attrs, entries};
use anymesh_core::{
    DType, Mesh, Result, Tensor, meta,
    spmd::{Held, Keep, Ledger, Policy, with_held, with_kept, with_policy},
};

const NOTHING: Held = Held { calls: 0, bytes: 0 };

/// Every way to lay a tensor of this rank on two axes that cut one dimension each, or add up.
fn layouts(rank: usize, float: bool) -> Vec<String> {
    let dims = |a: Option<usize>, b: Option<usize>| {
        let each = (0..rank).map(|d| match (a == Some(d), b == Some(d)) {
            (true, true) => "@a@b",
            (true, false) => "@a",
            (false, true) => "@b",
            (false, false) => "_",
        });
        format!("[{}]", each.collect::<Vec<_>>().join(", "))
    };
    let mut all: Vec<String> = (0..rank)
        .map(|d| dims(Some(d), Some((d + 1) % rank)))
        .collect();
    if float {
        all.push(dims(None, None) + "{sum:a}");
        all.push(dims(None, rank.checked_sub(1)) + "{sum:a}");
    }
    all.push(dims(None, None));
    all
}

/// Each op three times on the same operands: as they lie, and twice with what was brought. All give
/// the same bits on every rank, and the last one sends no more than the one before it.
#[test]
fn every_op_gives_the_same_from_what_is_at_hand() -> Result<()> {
    let device = device();
    let mesh = Mesh::new("a=2, b=2", &device)?;
    let (mut saved, mut cases) = (0, 0);
    for entry in entries() {
        for sample in entry.samples() {
            let attrs = Attrs::new(entry, &sample.attrs)?;
            let inputs = sample.make(1, &device)?;
            for turn in 0..3 {
                let placed = inputs.iter().enumerate().map(|(i, x)| {
                    let place = |x: &Tensor| {
                        let all = layouts(x.rank(), x.dtype().is_float());
                        x.to_mesh(&mesh, all[(turn * 2 + i) % all.len()].as_str())
                    };
                    x.as_ref().map(place).transpose()
                });
                let placed = placed.collect::<Result<Vec<_>>>()?;
                let call = || entry.call(&placed, &attrs, &mesh);
                let Ok(expected) = with_held(NOTHING, call) else {
                    continue;
                };
                let (_, first) = Ledger::record(call);
                let (again, second) = Ledger::record(call);
                for (a, b) in again?.iter().zip(&expected) {
                    assert_eq!(
                        a.full_tensor()?.to_bytes()?,
                        b.full_tensor()?.to_bytes()?,
                        "{} of {:?}",
                        entry.name,
                        placed
                            .iter()
                            .flatten()
                            .map(Tensor::type_string)
                            .collect::<Vec<_>>(),
                    );
                }
                assert!(
                    second.bytes() <= first.bytes(),
                    "{}: {first}\nthen {second}",
                    entry.name
                );
                saved += first.bytes() - second.bytes();
                cases += 1;
            }
        }
    }
    assert!(
        cases > 1000 && saved > 100_000,
        "{cases} cases, {saved} bytes"
    );
    Ok(())
}

#[test]
fn what_was_gathered_goes_with_the_last_tensor_of_the_value() -> Result<()> {
    // One of its own, so that nothing else is counted.
    let device = meta().decorated(|backend, kernel| backend.launch(kernel));
    let mesh = Mesh::new("tp=4", &device)?;
    let w = Tensor::zeros([64, 64], DType::F32, (&mesh, "[@tp, _]"))?;
    let x = Tensor::zeros([256, 64], DType::F32, (&mesh, "[@tp, _]"))?;
    let gathered = 256 * 64 * 4;
    let before = device.memory().in_use;
    drop(x.linear(&w, None)?);
    assert_eq!(
        device.memory().in_use - before,
        gathered,
        "held for the next op"
    );
    drop(x);
    assert_eq!(
        before - device.memory().in_use,
        gathered / 4,
        "and gone with it"
    );
    Ok(())
}

#[test]
fn what_is_held_is_bounded_in_calls_and_bytes() -> Result<()> {
    let mesh = Mesh::new("tp=4", &meta())?;
    let w = Tensor::zeros([64, 64], DType::F32, (&mesh, "[@tp, _]"))?;
    let x = Tensor::zeros([256, 64], DType::F32, (&mesh, "[@tp, _]"))?;
    let other = Tensor::zeros([8], DType::F32, &mesh)?;
    let bytes_again = |held: Held, calls: usize| -> Result<u64> {
        let x = x.add(1.0)?;
        with_held(held, || {
            x.linear(&w, None)?;
            for _ in 0..calls {
                other.exp()?;
            }
            let (y, ledger) = Ledger::record(|| x.linear(&w, None));
            y?;
            Ok(ledger.bytes())
        })
    };
    let whole = 256 * 64 * 4;
    let held = |calls, bytes| Held { calls, bytes };
    assert_eq!(bytes_again(held(8, whole), 6)?, 0);
    assert_eq!(
        bytes_again(held(8, whole), 8)?,
        whole / 4 * 3,
        "too long ago"
    );
    assert_eq!(
        bytes_again(held(8, whole - 1), 0)?,
        whole / 4 * 3,
        "too large"
    );
    Ok(())
}

#[test]
fn gradients_keep_what_was_used_and_parameters_as_they_lie() -> Result<()> {
    let mesh = Mesh::new("tp=4", &meta())?;
    let w = Tensor::zeros([64, 64], DType::F32, (&mesh, "[@tp, _]"))?.require_grad()?;
    let step = |x: &Tensor| -> Result<u64> {
        let y = x.linear(&w, None)?;
        let seed = y.ones_like()?;
        // Others come between, so that nothing is held by chance.
        let (out, ledger) = with_held(
            Held {
                calls: 1,
                bytes: u64::MAX,
            },
            || {
                for _ in 0..4 {
                    seed.exp()?;
                }
                Ok::<_, anymesh_core::Error>(Ledger::record(|| y.backward_with(&seed)))
            },
        )?;
        out?.of(&w)?;
        Ok(ledger.bytes())
    };
    let given = Tensor::zeros([256, 64], DType::F32, (&mesh, "[@tp, _]"))?;
    let third = 256 * 64 * 4 / 4 * 3;
    assert_eq!(step(&given.add(&given)?)?, 0, "an activation");
    assert_eq!(step(&given)?, third, "what was given is brought again");
    let again = with_kept(Keep::Nothing, &["tp"], || step(&given.add(&given)?))?;
    assert_eq!(again, third);
    let all = with_kept(Keep::Everything, &[], || step(&given))?;
    assert_eq!(all, 0);
    Ok(())
}

#[test]
fn a_reshard_and_its_way_back_cost_one_of_them() -> Result<()> {
    let mesh = Mesh::new("a=4", &device())?;
    let numbers = whole_numbers(&[8, 6]);
    let x = numbers.to_mesh(&mesh, "[@a, _]")?.add(0.0)?;
    let (y, there) = Ledger::record(|| x.reshard("[_, _]"));
    let y = y?;
    let (back, none) = Ledger::record(|| (y.reshard("[@a, _]"), x.reshard("[_, _]")));
    same(&back.0?, &numbers);
    same(&back.1?, &numbers);
    assert_eq!((there.entries.len(), none.entries.len()), (1, 0), "{none}");
    Ok(())
}

#[test]
fn under_an_explicit_policy_only_what_is_given_counts() -> Result<()> {
    let mesh = Mesh::new("a=2", &device())?;
    let x = whole_numbers(&[4, 6]).to_mesh(&mesh, "[@a, _]")?;
    let whole = x.reshard("[_, _]")?;
    let sorted = |x: &Tensor| with_policy(Policy::Explicit, &[], || x.cumsum(0));
    assert!(sorted(&x).is_err());
    assert!(sorted(&whole).is_ok());
    Ok(())
}
