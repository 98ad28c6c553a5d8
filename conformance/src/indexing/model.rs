//! What index expressions mean, element by element, as plain loops over lists of places. Nothing
//! here is shared with the code under test.

use std::fmt;

/// An array of the model: sizes, and elements in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// The sizes.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<T>,
}

/// One entry of an expression.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Entry {
    At(i64),
    Slice(Option<i64>, Option<i64>, i64),
    Ellipsis,
    NewAxis,
    Flag(bool),
    Mask(Array<bool>),
    Places(Array<i64>),
}

/// What an expression selects.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The shape of the result.
    pub shape: Vec<usize>,
    /// For each of its elements the position in the tensor.
    pub places: Vec<usize>,
}

/// Why an expression selects nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Refusal {
    OutOfRange,
    Shapes,
    Expression,
}

/// All positions of a shape, the last dimension fastest.
pub fn positions(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, size| {
        all.iter()
            .flat_map(|p| (0..*size).map(move |i| [p.as_slice(), &[i]].concat()))
            .collect()
    })
}

/// The row-major offset of a position.
fn offset(shape: &[usize], position: &[usize]) -> usize {
    shape
        .iter()
        .zip(position)
        .fold(0, |offset, (size, i)| offset * size + i)
}

/// The offset of the element that an array broadcast to a larger shape has at `position`.
pub fn broadcast_offset(shape: &[usize], position: &[usize]) -> usize {
    // Leading dimensions of size 1 may be too many.
    let extra = shape.len().saturating_sub(position.len());
    let lead = position.len().saturating_sub(shape.len());
    let own: Vec<usize> = shape[extra..]
        .iter()
        .zip(&position[lead..])
        .map(|(size, i)| if *size == 1 { 0 } else { *i })
        .collect();
    offset(&shape[extra..], &own)
}

fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Refusal> {
    let rank = a.len().max(b.len());
    let pad = |s: &[usize]| [vec![1; rank - s.len()], s.to_vec()].concat();
    pad(a)
        .into_iter()
        .zip(pad(b))
        .map(|(a, b)| {
            if a == b || b == 1 {
                Ok(a)
            } else if a == 1 {
                Ok(b)
            } else {
                Err(Refusal::Shapes)
            }
        })
        .collect()
}

/// The places of a Python slice.
fn walk(
    size: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> Result<Vec<usize>, Refusal> {
    if step == 0 {
        return Err(Refusal::Expression);
    }
    let n = size as i64;
    let (lowest, highest) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let clamp = |bound: i64| {
        if bound < 0 {
            (bound + n).max(lowest)
        } else {
            bound.min(highest)
        }
    };
    let (first, end) = if step > 0 {
        (lowest, highest)
    } else {
        (highest, lowest)
    };
    let (mut at, stop) = (start.map_or(first, clamp), stop.map_or(end, clamp));
    let mut places = vec![];
    while if step > 0 { at < stop } else { at > stop } {
        places.push(at as usize);
        at += step;
    }
    Ok(places)
}

fn place(size: usize, at: i64) -> Result<usize, Refusal> {
    let n = size as i64;
    if (-n..n).contains(&at) {
        Ok(at.rem_euclid(n) as usize)
    } else {
        Err(Refusal::OutOfRange)
    }
}

/// A dimension of the result.
enum Dim {
    /// It walks over places of an axis.
    Axis(usize, Vec<usize>),
    New,
}

/// What an expression selects of a shape.
pub fn select(shape: &[usize], entries: &[Entry]) -> Result<Selection, Refusal> {
    let uses = |e: &Entry| match e {
        Entry::At(_) | Entry::Slice(..) | Entry::Places(_) => 1,
        Entry::Mask(mask) => mask.shape.len(),
        _ => 0,
    };
    let used: usize = entries.iter().map(uses).sum();
    let ellipses = entries.iter().filter(|e| **e == Entry::Ellipsis).count();
    if used > shape.len() || ellipses > 1 {
        return Err(Refusal::Expression);
    }
    let mut entries = entries.to_vec();
    if ellipses == 0 {
        entries.push(Entry::Ellipsis);
    }

    // Integers give one place of an axis, index arrays one for each position of their common shape.
    let (mut fixed, mut flags) = (vec![], vec![]);
    let mut indices: Vec<(usize, Array<i64>)> = vec![];
    let (mut dims, mut axis) = (vec![], 0);
    // Which entries are integers or index arrays, and how many dimensions of the result came before
    // each.
    let (mut looks, mut before) = (vec![], vec![]);
    let mut arrays = false;
    for entry in &entries {
        looks.push(matches!(
            entry,
            Entry::At(_) | Entry::Flag(_) | Entry::Mask(_) | Entry::Places(_)
        ));
        before.push(dims.len());
        match entry {
            Entry::At(at) => fixed.push((axis, place(shape[axis], *at)?)),
            Entry::Slice(start, stop, step) => {
                dims.push(Dim::Axis(axis, walk(shape[axis], *start, *stop, *step)?))
            }
            Entry::Ellipsis => (axis..axis + shape.len() - used)
                .for_each(|d| dims.push(Dim::Axis(d, (0..shape[d]).collect()))),
            Entry::NewAxis => dims.push(Dim::New),
            Entry::Flag(flag) => flags.push(usize::from(*flag)),
            Entry::Mask(mask) if mask.shape.is_empty() => flags.push(usize::from(mask.data[0])),
            Entry::Mask(mask) => {
                if mask.shape != shape[axis..axis + mask.shape.len()] {
                    return Err(Refusal::Shapes);
                }
                let held: Vec<Vec<usize>> = positions(&mask.shape)
                    .into_iter()
                    .zip(&mask.data)
                    .filter(|(_, holds)| **holds)
                    .map(|(p, _)| p)
                    .collect();
                for d in 0..mask.shape.len() {
                    indices.push((
                        axis + d,
                        Array {
                            shape: vec![held.len()],
                            data: held.iter().map(|p| p[d] as i64).collect(),
                        },
                    ));
                }
            }
            Entry::Places(places) => {
                // Without dimensions it is an integer, which must exist.
                if places.shape.is_empty() {
                    place(shape[axis], places.data[0])?;
                }
                indices.push((axis, places.clone()));
            }
        }
        arrays |= matches!(entry, Entry::Flag(_) | Entry::Mask(_))
            || matches!(entry, Entry::Places(p) if !p.shape.is_empty());
        axis += if *entry == Entry::Ellipsis {
            shape.len() - used
        } else {
            uses(entry)
        };
    }
    let mut batch = vec![];
    for (_, index) in &indices {
        batch = broadcast(&batch, &index.shape)?;
    }
    for flag in flags {
        batch = broadcast(&batch, &[flag])?;
    }
    let (first, last) = (
        looks.iter().position(|l| *l),
        looks.iter().rposition(|l| *l),
    );
    let front = match (first, last) {
        (Some(first), Some(last)) if arrays && looks[first..=last].iter().all(|l| *l) => {
            before[first]
        }
        _ => 0,
    };

    let size = |d: &Dim| {
        if let Dim::Axis(_, places) = d {
            places.len()
        } else {
            1
        }
    };
    let mut sizes: Vec<usize> = dims.iter().map(size).collect();
    sizes.splice(front..front, batch.iter().copied());
    // Places are checked if any of them is asked for.
    for at in positions(&batch) {
        for (axis, index) in &indices {
            place(
                shape[*axis],
                index.data[broadcast_offset(&index.shape, &at)],
            )?;
        }
    }
    let mut places = vec![];
    for position in positions(&sizes) {
        let (at, mut rest) = (
            position[front..front + batch.len()].to_vec(),
            position.clone(),
        );
        rest.drain(front..front + batch.len());
        let mut source = vec![0; shape.len()];
        for (dim, i) in dims.iter().zip(&rest) {
            if let Dim::Axis(axis, walked) = dim {
                source[*axis] = walked[*i];
            }
        }
        for (axis, place) in &fixed {
            source[*axis] = *place;
        }
        for (axis, index) in &indices {
            source[*axis] = place(
                shape[*axis],
                index.data[broadcast_offset(&index.shape, &at)],
            )?;
        }
        places.push(offset(shape, &source));
    }
    Ok(Selection {
        shape: sizes,
        places,
    })
}

/// For each selected element the element of a value of this shape that it gets.
pub fn sources(selection: &Selection, value: &[usize]) -> Vec<usize> {
    positions(&selection.shape)
        .iter()
        .map(|p| broadcast_offset(value, p))
        .collect()
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = |b: &Option<i64>| b.map_or(String::new(), |b| b.to_string());
        match self {
            Entry::At(at) => write!(f, "{at}"),
            Entry::Slice(start, stop, step) => write!(f, "{}:{}:{step}", bound(start), bound(stop)),
            Entry::Ellipsis => write!(f, "..."),
            Entry::NewAxis => write!(f, "None"),
            Entry::Flag(flag) => write!(f, "{flag}"),
            Entry::Mask(mask) => write!(
                f,
                "mask{:?}{:?}",
                mask.shape,
                mask.data.iter().map(|b| u8::from(*b)).collect::<Vec<_>>()
            ),
            Entry::Places(places) => write!(f, "array{:?}{:?}", places.shape, places.data),
        }
    }
}
