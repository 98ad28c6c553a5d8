//! Names of tensors and patterns of them.

use crate::{Error, Result};
use std::collections::BTreeSet;

/// Whether a name matches a pattern in which `*` stands for anything.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len()).any(|i| rest.is_char_boundary(i) && matches(tail, &rest[i..]))
        }),
    }
}

/// The names that one of the patterns of `keep` matches (all where there is none) and none of
/// `remove` does; `*` stands for anything. A pattern that matches nothing is an error, and so are
/// patterns that leave nothing.
pub fn select<'n, T: AsRef<str>>(
    names: &BTreeSet<&'n str>,
    keep: &[T],
    remove: &[T],
) -> Result<BTreeSet<&'n str>> {
    let any = |patterns: &[T], name: &str| {
        patterns
            .iter()
            .any(|pattern| matches(pattern.as_ref(), name))
    };
    for pattern in keep.iter().chain(remove).map(AsRef::as_ref) {
        if !names.iter().any(|name| matches(pattern, name)) {
            return Err(Error::Argument(format!(
                "'{pattern}' matches no tensor: {}; `*` stands for anything",
                examples(names.iter().copied())
            )));
        }
    }
    let left: BTreeSet<&str> = names
        .iter()
        .copied()
        .filter(|name| (keep.is_empty() || any(keep, name)) && !any(remove, name))
        .collect();
    if left.is_empty() && !names.is_empty() {
        return Err(Error::Argument(
            "no tensor is left: what is kept is removed too".into(),
        ));
    }
    Ok(left)
}

/// Some of the names that are there, for errors.
pub(crate) fn examples<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let some: Vec<&str> = names.take(3).collect();
    if some.is_empty() {
        "there are no tensors".into()
    } else {
        format!("names are such as '{}'", some.join("', '"))
    }
}
