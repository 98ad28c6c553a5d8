//! The collectives in terms of `exchange`: what a transport has that does not override them.

use super::{Message, Part, Transport, check, reduce};
use crate::{Mesh, Reduction, Result, Shape, Tensor, split};

/// Up to this many bytes an all-reduce takes one round in which everybody sends everything: a
/// second round would cost more than the bytes it saves.
const ONE_ROUND_BYTES: u64 = 32 << 10;

type Answers = Result<Vec<Option<Tensor>>>;

pub(super) fn all_reduce<T: Transport + ?Sized>(
    transport: &T,
    mesh: &Mesh,
    parts: &[Part],
    reduction: Reduction,
) -> Answers {
    check::check_parts("all_reduce", mesh, parts, &[], &[])?;
    let shape = &parts[0].shape;
    // Between two ranks one round moves no more than two.
    if parts.len() <= 2 || parts[0].bytes() <= ONE_ROUND_BYTES {
        return each(
            swap("all_reduce", transport, mesh, parts, |part, _| {
                Ok(part.clone())
            })?,
            |pieces| reduce(&pieces, reduction),
        );
    }
    let flat = parts
        .iter()
        .map(|part| reshaped(part, &Shape::from([shape.numel()])))
        .collect::<Result<Vec<_>>>()?;
    let pieces = transport.reduce_scatter(mesh, &flat, reduction, 0)?;
    let piece = |(i, (part, data)): (usize, (&Part, Option<Tensor>))| {
        let shape = Shape::from([split(shape.numel(), i, parts.len()).len()]);
        Part {
            rank: part.rank,
            dtype: part.dtype,
            shape,
            data,
        }
    };
    let pieces: Vec<Part> = parts.iter().zip(pieces).enumerate().map(piece).collect();
    each(transport.all_gather(mesh, &pieces, 0)?, |whole| {
        whole.reshape(shape)
    })
}

pub(super) fn all_gather<T: Transport + ?Sized>(
    transport: &T,
    mesh: &Mesh,
    parts: &[Part],
    dim: usize,
) -> Answers {
    check::check_parts("all_gather", mesh, parts, &[dim], &[dim])?;
    each(
        swap("all_gather", transport, mesh, parts, |part, _| {
            Ok(part.clone())
        })?,
        |pieces| concat(&pieces, dim),
    )
}

pub(super) fn reduce_scatter<T: Transport + ?Sized>(
    transport: &T,
    mesh: &Mesh,
    parts: &[Part],
    reduction: Reduction,
    dim: usize,
) -> Answers {
    check::check_parts("reduce_scatter", mesh, parts, &[dim], &[])?;
    each(
        swap("reduce_scatter", transport, mesh, parts, |part, to| {
            cut(part, dim, to, parts.len())
        })?,
        |pieces| reduce(&pieces, reduction),
    )
}

pub(super) fn all_to_all<T: Transport + ?Sized>(
    transport: &T,
    mesh: &Mesh,
    parts: &[Part],
    cut_dim: usize,
    join: usize,
) -> Answers {
    check::check_parts("all_to_all", mesh, parts, &[cut_dim, join], &[join])?;
    each(
        swap("all_to_all", transport, mesh, parts, |part, to| {
            cut(part, cut_dim, to, parts.len())
        })?,
        |pieces| concat(&pieces, join),
    )
}

pub(super) fn broadcast<T: Transport + ?Sized>(
    transport: &T,
    mesh: &Mesh,
    root: &Part,
    group: &[usize],
) -> Answers {
    check_broadcast(mesh, root, group)?;
    let mut out: Vec<Option<Tensor>> = vec![None; group.len()];
    let (mut messages, mut slots) = (vec![], vec![]);
    for (i, rank) in group.iter().enumerate() {
        let at = mesh.position_of(*rank);
        if *rank == root.rank {
            out[i] = root.data.clone();
        } else if let (0, Some(at)) = (root.shape.numel(), at) {
            out[i] = Some(Tensor::nothing(
                root.dtype,
                root.shape.clone(),
                mesh.device(at),
            ));
        } else if root.shape.numel() > 0 && (root.data.is_some() || at.is_some()) {
            messages.push(Message {
                part: root.clone(),
                to: *rank,
            });
            slots.push(i);
        }
    }
    for (i, data) in slots
        .into_iter()
        .zip(deliver("broadcast", transport, mesh, messages)?)
    {
        out[i] = data;
    }
    Ok(out)
}

/// Refuses a broadcast whose root is not in its group, or whose group or part is mistaken. For
/// broadcasts of other transports.
pub fn check_broadcast(mesh: &Mesh, root: &Part, group: &[usize]) -> Result<()> {
    check::check_group("broadcast", mesh, group.iter().copied())?;
    root.check("broadcast", mesh)?;
    if group.contains(&root.rank) {
        Ok(())
    } else {
        Err(check::fail(
            "broadcast",
            &[root.rank],
            format!("the root is not in the group {group:?}"),
        ))
    }
}

pub(super) fn concat(pieces: &[Tensor], dim: usize) -> Result<Tensor> {
    Tensor::concat(&pieces.iter().collect::<Vec<_>>(), dim as i64)
}

/// Every member gives `piece(part, j)` to member `j`; what each addressable member gets, in the
/// order of the parts.
///
/// Pieces without elements are not sent: every process knows where they are.
fn swap<T: Transport + ?Sized>(
    op: &'static str,
    transport: &T,
    mesh: &Mesh,
    parts: &[Part],
    piece: impl Fn(&Part, usize) -> Result<Part>,
) -> Result<Vec<Option<Vec<Tensor>>>> {
    let mut got: Vec<Option<Vec<Option<Tensor>>>> = parts
        .iter()
        .map(|p| p.data.as_ref().map(|_| vec![None; parts.len()]))
        .collect();
    let (mut messages, mut slots) = (vec![], vec![]);
    for (to, receiver) in parts.iter().enumerate() {
        for (from, sender) in parts
            .iter()
            .enumerate()
            .filter(|(_, sender)| sender.data.is_some() || receiver.data.is_some())
        {
            let piece = piece(sender, to)?;
            let stays = from == to || piece.shape.numel() == 0;
            match (&mut got[to], &receiver.data) {
                (Some(got), Some(_)) if from == to => got[from] = piece.data,
                (Some(got), Some(mine)) if stays => {
                    got[from] = Some(Tensor::nothing(piece.dtype, piece.shape, mine.device()))
                }
                _ if stays => {}
                _ => {
                    messages.push(Message {
                        part: piece,
                        to: receiver.rank,
                    });
                    slots.push((to, from));
                }
            }
        }
    }
    for ((to, from), data) in slots
        .into_iter()
        .zip(deliver(op, transport, mesh, messages)?)
    {
        if let Some(got) = &mut got[to] {
            got[from] = data;
        }
    }
    let whole = |got: Option<Vec<Option<Tensor>>>| {
        got.map(|g| {
            g.into_iter()
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| lost(op, parts))
        })
        .transpose()
    };
    got.into_iter().map(whole).collect()
}

/// An exchange that happens only if there is something to send, and answers every message whose
/// receiver is here.
fn deliver<T: Transport + ?Sized>(
    op: &'static str,
    transport: &T,
    mesh: &Mesh,
    messages: Vec<Message>,
) -> Answers {
    if messages.is_empty() {
        return Ok(vec![]);
    }
    let here: Vec<(usize, bool)> = messages
        .iter()
        .map(|m| (m.to, mesh.position_of(m.to).is_some()))
        .collect();
    let answers = transport.exchange(mesh, messages)?;
    match here
        .iter()
        .enumerate()
        .find(|(i, (_, here))| *here && !answers.get(*i).is_some_and(Option::is_some))
    {
        Some((_, (rank, _))) => Err(check::fail(
            op,
            &[*rank],
            format!(
                "{} did not deliver what was sent to the rank",
                transport.name()
            ),
        )),
        None => Ok(answers),
    }
}

fn lost(op: &'static str, parts: &[Part]) -> crate::Error {
    check::fail(
        op,
        &parts.iter().map(|p| p.rank).collect::<Vec<_>>(),
        "a piece of a member is missing",
    )
}

/// Piece `i` of `n` along a dimension.
fn cut(part: &Part, dim: usize, i: usize, n: usize) -> Result<Part> {
    let range = split(part.shape[dim], i, n);
    let data = part
        .data
        .as_ref()
        .map(|t| t.narrow(dim as i64, range.start, range.len()))
        .transpose()?;
    Ok(Part {
        rank: part.rank,
        dtype: part.dtype,
        shape: part.shape.with(dim, range.len()),
        data,
    })
}

fn reshaped(part: &Part, shape: &Shape) -> Result<Part> {
    let data = part.data.as_ref().map(|t| t.reshape(shape)).transpose()?;
    Ok(Part {
        rank: part.rank,
        dtype: part.dtype,
        shape: shape.clone(),
        data,
    })
}

/// A function of what every addressable member has.
fn each<A>(got: Vec<Option<A>>, make: impl Fn(A) -> Result<Tensor>) -> Answers {
    got.into_iter()
        .map(|mine| mine.map(&make).transpose())
        .collect()
}
