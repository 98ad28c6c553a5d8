//! Calls that share their first operand: where it is brought for all of them.
//!
//! Each call by itself would count what its operand costs as its own, and several of them may each
//! choose a way that is cheap once and dear three times.

use super::{
    Call,
    call::{AtHand, at_hand},
    policy,
    solve::{self, Operand},
};
use crate::{DType, Result, Shape, Sharding, Tensor, reshard::Held, table::Table};
use smallvec::SmallVec;

/// What the choice depends on: of every operand of every call its type and its other forms.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    op: &'static str,
    mesh: u64,
    missing: SmallVec<[u32; 4]>,
    operands: Vec<(Shape, DType, Sharding, Vec<Sharding>)>,
}

thread_local! {
    static CHOSEN: Table<Key, Sharding> = Table::default();
}

/// The sharding of the first operand, which all calls have, with the fewest bytes for it once and
/// for everything else that the calls bring and owe.
pub(crate) fn shared_operand(calls: &[Call<'_>]) -> Result<Option<Sharding>> {
    let [first, _, ..] = calls else {
        return Ok(None);
    };
    if policy::is_explicit() {
        return Ok(None);
    }
    let x = first.inputs[0];
    let at_hand: Vec<AtHand> = calls
        .iter()
        .map(|call| call.inputs.iter().map(|t| at_hand(t)).collect())
        .collect();
    let operand = |(t, held): (&&Tensor, &Vec<Sharding>)| {
        (
            t.shape().clone(),
            t.dtype(),
            t.sharding().clone(),
            held.clone(),
        )
    };
    let key = Key {
        op: first.op,
        mesh: x.mesh().key(),
        missing: calls.iter().map(|call| call.missing).collect(),
        operands: (calls.iter().zip(&at_hand))
            .flat_map(|(call, held)| call.inputs.iter().zip(held).map(operand))
            .collect(),
    };
    if let Some(chosen) = CHOSEN.with(|table| table.get(&key)) {
        return Ok(Some(chosen));
    }
    let brought = |to: &Sharding| -> Result<u64> {
        let forms = std::iter::once(x.sharding()).chain(&at_hand[0][0]);
        let price = |from| Held::new(x.mesh(), x.shape(), x.dtype(), from).exact(to);
        forms
            .map(price)
            .try_fold(u64::MAX, |least, bytes| Ok(least.min(bytes?)))
    };
    // For each target, what all calls take that know it, and how many do.
    let mut totals: Vec<(Sharding, u64, usize)> = vec![];
    for (n, (call, held)) in calls.iter().zip(&at_hand).enumerate() {
        let operands: SmallVec<[Operand<'_>; 3]> = (call.inputs.iter().zip(held))
            .map(|(t, held)| Operand::of(t, held))
            .collect();
        for solution in solve::alternatives(x.mesh(), &call.rule()?, &operands)? {
            let to = &solution.inputs[0];
            let own = brought(to)?;
            let rest = solution.bytes.saturating_sub(own) + solution.owed;
            match totals.iter_mut().find(|(s, ..)| s == to) {
                // Alternatives come best first: the first of a call for a target counts.
                Some((_, total, calls)) if *calls == n => {
                    (*total, *calls) = (total.saturating_add(rest), n + 1);
                }
                Some(_) => {}
                None if n == 0 => totals.push((to.clone(), own.saturating_add(rest), 1)),
                None => {}
            }
        }
    }
    totals.retain(|(.., n)| *n == calls.len());
    let Some((chosen, ..)) = totals.into_iter().min_by_key(|(_, total, _)| *total) else {
        return Ok(None);
    };
    CHOSEN.with(|table| table.insert(key, chosen.clone()));
    Ok(Some(chosen))
}
