//! The ops on tensors that are cut over ranks.

use super::{
    Caller, Marked, Unique, check_positions, coordinates, find, gathered, is_nonzero, nonzero,
    parts::{Parts, Selected},
    replicated, starts, taken, unique, widths,
};
use crate::{
    DType, Result, Tensor, ledger,
    ops::{Order, Side, map1},
};

/// [`Tensor::nonzero`] of a tensor that is cut.
pub(super) async fn nonzero_of_parts(parts: &Parts) -> Result<Tensor> {
    let (op, x) = ("nonzero", &parts.x);
    check_positions(op, x.numel())?;
    let program = is_nonzero(x.dtype())?;
    let mark = |t: Tensor| map1(op, &program, &[&t], &[]);
    let marks = (parts.flat()?.into_iter().map(mark)).collect::<Result<Vec<_>>>()?;
    let selected = parts.select(op, &marks).await?;
    if (selected.total() * 4) as u64 > parts.whole_bytes()? {
        let whole = gathered_for(parts.caller(), op, x)?;
        return replicated(nonzero(&whole).await?, x.mesh());
    }
    // The same on every rank, so one puts it in order.
    let positions = parts
        .join(&selected, &places(op, parts, &selected)?)?
        .part(0);
    let ordered = if parts.in_order() {
        positions
    } else {
        positions.sort(0, Order::Ascending)?.0
    };
    replicated(coordinates(op, x.shape(), &ordered)?, x.mesh())
}

/// Where in the tensor lies what each addressable rank selects.
fn places(op: &'static str, parts: &Parts, selected: &Selected) -> Result<Vec<Tensor>> {
    (selected.positions.iter().enumerate())
        .map(|(i, positions)| parts.global(op, i, positions))
        .collect()
}

/// [`Tensor::masked_select`] of a tensor that is cut, with a mask that is cut alike.
pub(super) async fn selected_of_parts(parts: &Parts, mask: &Parts) -> Result<Tensor> {
    let (op, x) = ("masked_select", &parts.x);
    check_positions(op, x.numel())?;
    let mark = |t: Tensor| t.cast(DType::I32);
    let marks = (mask.flat()?.into_iter().map(mark)).collect::<Result<Vec<_>>>()?;
    let selected = parts.select(op, &marks).await?;
    let each = x.dtype().size() + if parts.in_order() { 0 } else { 4 };
    if (selected.total() * each) as u64 > parts.whole_bytes()? + mask.whole_bytes()? {
        let whole = |t: &Parts| gathered_for(t.caller(), op, &t.x);
        let found = taken(op, &whole(parts)?, &whole(mask)?).await?;
        return replicated(found, x.mesh());
    }
    let own = parts.flat()?;
    let take = |(x, positions): (&Tensor, &Tensor)| x.index_select(0, positions);
    let taken = own.iter().zip(&selected.positions).map(take);
    let values = parts.join(&selected, &taken.collect::<Result<Vec<_>>>()?)?;
    if parts.in_order() {
        return Ok(values);
    }
    let order = parts.join(&selected, &places(op, parts, &selected)?)?;
    let order = order.part(0).argsort(0, Order::Ascending)?;
    replicated(values.part(0).index_select(0, &order)?, x.mesh())
}

/// [`Tensor::unique`] of a tensor that is cut: of the values that the parts have, each once.
pub(super) async fn unique_of_parts(parts: &Parts) -> Result<Unique> {
    let (op, x) = ("unique", &parts.x);
    check_positions(op, x.numel())?;
    let (mut marks, mut sorted) = (vec![], vec![]);
    for flat in parts.flat()? {
        let (values, order) = flat.sort(0, Order::Ascending)?;
        marks.push(starts(op, &values)?);
        sorted.push((values, order));
    }
    let selected = parts.select(op, &marks).await?;
    let each = x.dtype().size() + if parts.in_order() { 4 } else { 8 };
    if (selected.total() * each) as u64 > parts.whole_bytes()? {
        let found = unique(&gathered_for(parts.caller(), op, x)?).await?;
        return found.on(x.mesh());
    }
    let (mut values, mut counts, mut firsts) = (vec![], vec![], vec![]);
    for (i, ((sorted, order), positions)) in sorted.iter().zip(&selected.positions).enumerate() {
        values.push(sorted.index_select(0, positions)?);
        counts.push(widths(positions, sorted.numel())?);
        firsts.push(parts.global(op, i, &order.index_select(0, positions)?)?);
    }
    // The same on every rank, so one finds it.
    let (mut values, mut counts) = (
        parts.join(&selected, &values)?.part(0),
        parts.join(&selected, &counts)?.part(0),
    );
    if !parts.in_order() {
        // Of equal values the first one is kept.
        let firsts = parts.join(&selected, &firsts)?.part(0);
        let order = firsts.argsort(0, Order::Ascending)?;
        values = values.index_select(0, &order)?;
        counts = counts.index_select(0, &order)?;
    }
    let (sorted, order) = values.sort(0, Order::Ascending)?;
    let Marked { positions, .. } = find(op, &starts(op, &sorted)?).await?;
    let running = counts.index_select(0, &order)?.cumsum(0)?;
    let last = positions
        .add(&widths(&positions, sorted.numel())?)?
        .sub(1)?;
    let ends = running.index_select(0, &last)?;
    let found = ends.numel();
    let before = if found == 1 {
        Tensor::zeros([1], DType::I32, ends.device())?
    } else {
        ends.narrow(0, 0, found - 1)?.padded(0, 1, 0)?
    };
    let values = replicated(sorted.index_select(0, &positions)?, x.mesh())?;
    let place = |(i, _)| values.part(i).searchsorted(&x.part(i), Side::Left);
    let places = x.mesh().held().map(place).collect::<Result<Vec<_>>>()?;
    let (mesh, sharding) = (x.mesh(), x.sharding().clone());
    Ok(Unique {
        inverse: Tensor::from_parts(mesh, sharding, DType::I32, x.shape().clone(), places),
        counts: replicated(ends.sub(&before)?, x.mesh())?,
        values,
    })
}

/// Every rank gets a tensor whole after all.
fn gathered_for(caller: Caller, op: &'static str, x: &Tensor) -> Result<Tensor> {
    let _scope = ledger::enter(caller.0, caller.1);
    gathered(op, x)
}
