//! The axes of a mesh for another number of ranks.

use crate::{Error, Result};

/// The axes of a run's mesh, such as `dp=2, tp=4`, for so many ranks: `dp` is what is left of them.
/// And what was changed for that, in words.
///
/// ```
/// use anymesh_train::measure::for_ranks;
/// let (axes, notes) = for_ranks("pp=4, tp=8", Some(512))?;
/// assert_eq!(axes, [("pp".into(), 4), ("dp".into(), 16), ("tp".into(), 8)]);
/// assert_eq!(notes, ["dp is 16: pp 4 * tp 8 is 32 ranks, not 512"]);
/// let error = for_ranks("tp=8", Some(12)).unwrap_err().to_string();
/// assert!(error.ends_with("12 ranks do not divide by tp 8: 8 or 16 ranks would do"), "{error}");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn for_ranks(axes: &str, ranks: Option<usize>) -> Result<(Vec<(String, usize)>, Vec<String>)> {
    let mut all = parse(axes)?;
    let Some(product) = product(&all) else {
        return Err(bad(format!("{axes} are more ranks than can be counted")));
    };
    let ranks = ranks.unwrap_or(product);
    if ranks == 0 {
        return Err(bad("there must be a rank"));
    }
    if product == ranks {
        return Ok((all, vec![]));
    }
    let words = |all: &[(String, usize)]| {
        let each = all.iter().map(|(name, size)| format!("{name} {size}"));
        each.collect::<Vec<_>>().join(" * ")
    };
    let why = match all.is_empty() {
        true => "the file has no axes".into(),
        false => format!("{} is {product} ranks, not {ranks}", words(&all)),
    };
    let before = all.iter().position(|a| a.0 == "dp");
    let others: Vec<_> = all.iter().filter(|a| a.0 != "dp").cloned().collect();
    let rest = others.iter().map(|a| a.1).product::<usize>();
    if !ranks.is_multiple_of(rest) {
        let down = ranks / rest * rest;
        let near = [down, down + rest].map(|n| n.to_string());
        let near = if down == 0 { &near[1..] } else { &near[..] };
        let detail = format!(
            "{ranks} ranks do not divide by {}: {} ranks would do",
            words(&others),
            near.join(" or ")
        );
        return Err(bad(detail));
    }
    let dp = ranks / rest;
    let note = match before {
        Some(at) => {
            let was = std::mem::replace(&mut all[at].1, dp);
            format!("dp is {dp}, not {was}: {why}")
        }
        None => {
            // Stages are farthest apart, what cuts a layer is nearest to each other.
            let at = usize::from(all.first().is_some_and(|a| a.0 == "pp"));
            all.insert(at, ("dp".into(), dp));
            format!("dp is {dp}: {why}")
        }
    };
    Ok((all, vec![note]))
}

/// The axes that a training run knows, from those whose ranks are farthest apart to those that are
/// nearest.
pub(crate) const AXES: [&str; 4] = ["pp", "dp", "cp", "tp"];

/// That a training run knows all of them.
pub(crate) fn check(axes: &[(String, usize)]) -> Result<()> {
    match axes.iter().find(|a| !AXES.contains(&a.0.as_str())) {
        None => Ok(()),
        Some((other, _)) => {
            let known = AXES.join(", ");
            Err(bad(format!(
                "a training run has the axes {known}, not {other}"
            )))
        }
    }
}

/// Ranks along an axis.
pub(crate) fn size(axes: &[(String, usize)], name: &str) -> usize {
    axes.iter().find(|a| a.0 == name).map_or(1, |a| a.1)
}

/// Ranks that have other sequences each: experts are spread over some of them.
pub(crate) fn data_ranks(axes: &[(String, usize)]) -> usize {
    size(axes, "dp") * size(axes, "ep")
}

/// As a mesh reads them.
pub(crate) fn text(axes: &[(String, usize)]) -> String {
    let each = axes.iter().map(|(name, size)| format!("{name}={size}"));
    each.collect::<Vec<_>>().join(", ")
}

fn bad(detail: impl Into<String>) -> Error {
    Error::config("mesh.axes", detail)
}

fn product(axes: &[(String, usize)]) -> Option<usize> {
    axes.iter().try_fold(1usize, |all, a| all.checked_mul(a.1))
}

fn parse(axes: &str) -> Result<Vec<(String, usize)>> {
    let parts = axes.split(',').map(str::trim).filter(|p| !p.is_empty());
    let mut all: Vec<(String, usize)> = vec![];
    for part in parts {
        let read = part.split_once('=').and_then(|(name, size)| {
            let size = size.trim().parse().ok().filter(|n: &usize| *n > 0)?;
            Some((name.trim().to_string(), size))
        });
        match read {
            Some((name, _)) if all.iter().any(|a| a.0 == name) => {
                return Err(bad(format!("{name} is there twice")));
            }
            Some(axis) => all.push(axis),
            None => return Err(bad(format!("'{part}' is no axis such as tp=8"))),
        }
    }
    Ok(all)
}
