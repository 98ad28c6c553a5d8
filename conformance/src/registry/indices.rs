//! Which operands hold positions, and of what.

use super::{Attrs, Entry};

/// Dimensions of the operands of a call; `None` for one that is left out.
pub type Shapes<'a> = &'a [Option<&'a [usize]>];

impl Entry {
    /// The sizes of the dimensions that the values of operand `at` are positions in, where they are
    /// positions: one for all values, or one for each element along the operand's last dimension.
    ///
    /// ```
    /// # use anymesh_conformance::registry::{self, Attrs};
    /// let gather = registry::find("gather")?;
    /// let attrs = Attrs::new(gather, &serde_json::json!({"axis": 1}))?;
    /// let shapes: [Option<&[usize]>; 2] = [Some(&[4, 512]), Some(&[4, 3])];
    /// assert_eq!(gather.positions(1, &shapes, &attrs), Some(vec![512]));
    /// assert_eq!(gather.positions(0, &shapes, &attrs), None);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn positions(&self, at: usize, shapes: Shapes<'_>, attrs: &Attrs) -> Option<Vec<usize>> {
        let dims = |operand: usize| shapes.get(operand).copied().flatten();
        let along = |operand: usize| {
            let (dims, axis) = (dims(operand)?, attrs.int("axis").ok()?);
            let axis = if axis < 0 {
                axis + dims.len() as i64
            } else {
                axis
            };
            dims.get(usize::try_from(axis).ok()?).copied()
        };
        // Tuples of positions, one for each of the first dimensions.
        let tuple = |whole: &[usize]| {
            let width = *dims(at)?.last()?;
            whole.get(..width).map(<[usize]>::to_vec)
        };
        let one = |size: Option<usize>| size.map(|n| vec![n]);
        match (self.name, at) {
            (
                "gather" | "take_along_axis" | "index_select" | "index_add" | "scatter"
                | "put_along_axis",
                1,
            ) => one(along(0)),
            ("embedding", 1) => one(dims(0)?.first().copied()),
            // Where groups of rows end: behind the last one at most.
            ("grouped_matmul" | "grouped_outer", 2) => one(dims(0)?.first().map(|n| n + 1)),
            ("index_get", 1..) => one(dims(0)?.get(at - 1).copied()),
            ("index_put", 1..) if at + 1 < shapes.len() => one(dims(0)?.get(at - 1).copied()),
            ("gather_axes", 1..) => {
                let axis = *attrs.sizes("axes").ok()?.get(at - 1)?;
                one(dims(0)?.get(axis).copied())
            }
            ("gather_nd" | "scatter_nd_add", 1) => tuple(dims(0)?),
            ("scatter_nd", 0) => tuple(&attrs.sizes("shape").ok()?),
            ("one_hot", 0) => one(attrs.size("classes").ok()),
            ("bincount", 0) => one(attrs.size("minlength").ok().map(|n| n.max(8))),
            // A target of one dimension less is classes, one of the same rank probabilities.
            ("cross_entropy" | "nll_loss", 1) if dims(1)?.len() < dims(0)?.len() => {
                let classes = usize::from(dims(0)?.len() > 1);
                one(dims(0)?.get(classes).copied())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Fill, entries};
    use super::*;

    #[test]
    fn every_sample_draws_its_positions_from_the_dimension_they_index() {
        let mut seen = 0;
        for entry in entries() {
            for sample in entry.samples() {
                let attrs = Attrs::new(entry, &sample.attrs).expect("attributes of a sample");
                let shapes: Vec<Option<&[usize]>> = sample
                    .inputs
                    .iter()
                    .map(|i| i.as_ref().map(|i| &i.shape[..]))
                    .collect();
                for (at, input) in sample.inputs.iter().enumerate() {
                    let sizes = entry.positions(at, &shapes, &attrs);
                    let Some(Fill::Index(size)) = input.as_ref().map(|i| i.fill) else {
                        continue;
                    };
                    seen += 1;
                    let sizes = sizes.unwrap_or_else(|| panic!("{} {at}", entry.name));
                    let open = matches!(entry.name, "bincount" | "one_hot");
                    assert!(
                        open || sizes.iter().min() == Some(&size),
                        "{} {at}: {sizes:?}, {size}",
                        entry.name
                    );
                }
            }
        }
        assert!(seen > 30, "only {seen}");
    }
}
