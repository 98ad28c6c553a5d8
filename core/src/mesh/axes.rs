//! The axes of a mesh: their names and sizes.

use crate::{Error, Result};
use smallvec::SmallVec;

/// The largest number of ranks of a mesh that fits in one process or one description.
const MAX_RANKS: usize = 1 << 20;

/// Reads `dp=2, tp=4`.
pub(super) fn parse_axes(text: &str) -> Result<SmallVec<[(String, usize); 3]>> {
    let error = || Error::Parse {
        what: "mesh",
        text: text.into(),
        expected: "axes with sizes, major first, such as `dp=2, tp=4`".into(),
    };
    text.split(',')
        .map(|axis| {
            let (name, size) = axis.split_once('=').ok_or_else(error)?;
            let size = size.trim().parse().map_err(|_| error())?;
            Ok((name.trim().to_string(), size))
        })
        .collect()
}

/// Whether an axis may be called so.
pub(crate) fn is_axis_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The number of ranks, if the axes make sense.
pub(super) fn check_axes(axes: &[(String, usize)]) -> Result<usize> {
    let fail = |detail: String| Err(Error::mesh(axes, detail));
    for (i, (name, size)) in axes.iter().enumerate() {
        if !is_axis_name(name) {
            return fail(format!(
                "'{name}' is no axis name: use letters, digits and _"
            ));
        }
        if axes[..i].iter().any(|(n, _)| n == name) {
            return fail(format!("axis {name} is named twice"));
        }
        if *size == 0 {
            return fail(format!("axis {name} has no ranks"));
        }
    }
    if axes.len() > 16 {
        return fail(format!("{} axes: at most 16", axes.len()));
    }
    match axes
        .iter()
        .try_fold(1usize, |n, (_, size)| n.checked_mul(*size))
        .filter(|n| *n <= MAX_RANKS)
    {
        Some(ranks) => Ok(ranks),
        None => fail(format!("more than {MAX_RANKS} ranks")),
    }
}
