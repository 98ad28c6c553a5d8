//! The names that macros are expanded over, and patterns that match them.

use super::statement::Var;
use std::collections::{BTreeMap, BTreeSet};

/// What an optimizer keeps beside a weight: its name is the weight's and one of these.
pub const STATES: [&str; 5] = [
    ".w_0",
    ".moment1_0",
    ".moment2_0",
    ".beta1_pow_acc_0",
    ".beta2_pow_acc_0",
];

/// The weight's name of an optimizer state, and which state it is.
pub(super) fn split_state(name: &str) -> Option<(&str, &'static str)> {
    STATES.into_iter().find_map(|state| {
        name.strip_suffix(state)
            .filter(|base| !base.is_empty())
            .map(|base| (base, state))
    })
}

/// The tensors on both sides of a mapping as it is written. Each has its tensor-parallel degree:
/// into how many parts it was cut when it was fused (1: whole).
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Names on the left of the arrows.
    pub left: BTreeMap<String, usize>,
    /// Names on the right. May be empty where they are not known.
    pub right: BTreeMap<String, usize>,
}

impl Names {
    /// All names of a side, also the weights of which there are only optimizer states.
    pub(super) fn known(side: &BTreeMap<String, usize>) -> BTreeSet<String> {
        side.keys()
            .flat_map(|name| [Some(name.as_str()), split_state(name).map(|(base, _)| base)])
            .flatten()
            .map(str::to_string)
            .collect()
    }
}

/// A macro in a name that stands for a number. A statement with some of them is repeated for every
/// combination of numbers that names have; combinations count up in this order, the last fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Id {
    Expert,
    Layer,
    /// One less on the right.
    Offset,
}

/// Longer words first: one begins with another.
const IDS: [(&str, Id); 3] = [
    ("$LAYER_ID_OFFSET", Id::Offset),
    ("$LAYER_ID", Id::Layer),
    ("$EXPERT_ID", Id::Expert),
];

/// The numbers of the ids, in the order of [`Id`].
pub(super) type Binding = [Option<u64>; 3];

/// A piece of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    Id(Id),
    Star,
}

/// Which side of the arrow a name is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// A name cut at its macros; an error for a `$` that is none.
pub(super) fn parts(var: &Var) -> Result<Vec<Part>, String> {
    if var.quoted {
        return Ok(vec![Part::Text(var.name.clone())]);
    }
    let mut out = Vec::new();
    let mut rest = var.name.as_str();
    while let Some(at) = rest.find(['$', '*']) {
        if at > 0 {
            out.push(Part::Text(rest[..at].into()));
        }
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix('*') {
            out.push(Part::Star);
            rest = after;
        } else {
            let found = IDS
                .into_iter()
                .find_map(|(word, id)| rest.strip_prefix(word).map(|after| (id, after)));
            let (id, after) = found.ok_or_else(|| {
                format!(
                    "'{}': after '$' stands LAYER_ID, EXPERT_ID or LAYER_ID_OFFSET; \
                     other names with '$' are written in quotes",
                    var.name
                )
            })?;
            out.push(Part::Id(id));
            rest = after;
        }
    }
    if !rest.is_empty() {
        out.push(Part::Text(rest.into()));
    }
    Ok(out)
}

/// The ids of a pattern, sorted.
pub(super) fn ids(parts: &[Part]) -> BTreeSet<Id> {
    parts
        .iter()
        .filter_map(|part| {
            if let Part::Id(id) = part {
                Some(*id)
            } else {
                None
            }
        })
        .collect()
}

/// The combinations of ids (and the number for `*`) with which a pattern is one of the names.
pub(super) fn matches(
    parts: &[Part],
    side: Side,
    names: &BTreeSet<String>,
) -> BTreeSet<(Binding, Option<u64>)> {
    let prefix = if let Some(Part::Text(text)) = parts.first() {
        text.as_str()
    } else {
        ""
    };
    let candidates = names
        .range(prefix.to_string()..)
        .take_while(|name| name.starts_with(prefix));
    candidates
        .filter_map(|name| bind(parts, side, name, ([None; 3], None)))
        .collect()
}

/// The numbers with which a pattern is this name, added to those that are `bound` already; `None`
/// where it cannot be. Digits are tried from the longest run to the shortest, so that a pattern may
/// go on with a digit.
fn bind(
    parts: &[Part],
    side: Side,
    name: &str,
    bound: (Binding, Option<u64>),
) -> Option<(Binding, Option<u64>)> {
    let Some((part, rest)) = parts.split_first() else {
        return name.is_empty().then_some(bound);
    };
    if let Part::Text(text) = part {
        return bind(rest, side, name.strip_prefix(text.as_str())?, bound);
    }
    let digits = name.bytes().take_while(u8::is_ascii_digit).count();
    // A number with a zero in front would be written back as another name.
    let digits = if name.starts_with('0') {
        digits.min(1)
    } else {
        digits
    };
    (1..=digits).rev().find_map(|length| {
        let number: u64 = name[..length].parse().ok()?;
        let mut bound = bound;
        let (slot, number) = match part {
            Part::Id(Id::Offset) if side == Side::Right => {
                (&mut bound.0[Id::Offset as usize], number.checked_add(1)?)
            }
            Part::Id(id) => (&mut bound.0[*id as usize], number),
            _ => (&mut bound.1, number),
        };
        if slot.is_some_and(|before| before != number) {
            return None;
        }
        *slot = Some(number);
        bind(rest, side, &name[length..], bound)
    })
}

/// The name with numbers for ids; ids that are not bound and `*` stay. An error where an offset
/// would leave the numbers.
pub(super) fn substitute(parts: &[Part], side: Side, binding: &Binding) -> Result<String, String> {
    let mut out = String::new();
    for part in parts {
        match part {
            Part::Text(text) => out.push_str(text),
            Part::Star => out.push('*'),
            Part::Id(id) => match (binding[*id as usize], side, id) {
                (Some(0), Side::Right, Id::Offset) => return Err(
                    "$LAYER_ID_OFFSET is one less on the right, and layer 0 has no layer before it"
                        .into(),
                ),
                (Some(n), Side::Right, Id::Offset) => out.push_str(&(n - 1).to_string()),
                (Some(n), ..) => out.push_str(&n.to_string()),
                (None, ..) => out.push_str(
                    IDS.iter()
                        .find(|(_, other)| other == id)
                        .map_or("", |(word, _)| word),
                ),
            },
        }
    }
    Ok(out)
}
