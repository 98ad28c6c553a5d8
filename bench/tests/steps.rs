//! What a training step launches.

use anymesh_bench::{Result, idle, step::Spec};
use std::collections::BTreeMap;

/// How often each op launches each family of kernels in a step, but for conversions: gradients on a
/// mesh are made wide before they are added up.
fn launches(mesh: Option<&str>) -> Result<BTreeMap<String, usize>> {
    // Enough rows for queries, keys and values to be one product.
    let mut spec = Spec::parse(&["tiny", "bf16", "16x16"])?;
    spec.mesh = mesh.map(Into::into);
    let mut all = BTreeMap::new();
    for row in spec.profile(&idle(), 1)?.rows {
        if row.op != "cast" {
            *all.entry(format!("{} ({})", row.op, row.family))
                .or_default() += row.count;
        }
    }
    Ok(all)
}

#[test]
fn a_step_on_a_mesh_of_one_rank_makes_the_launches_of_one_device() -> Result<()> {
    let one = launches(None)?;
    assert!(
        one.contains_key("linear_each (matmul)") && one.contains_key("cross_entropy (row_program)")
    );
    assert_eq!(one, launches(Some("dp=1"))?);
    Ok(())
}

#[test]
fn gradients_of_norms_are_one_launch_where_rows_are_whole() -> Result<()> {
    // Ranks along tp hold the same stream, and one of them computes for all.
    let (one, many) = (launches(None)?, launches(Some("dp=2, tp=2"))?);
    for norm in ["add_layer_norm", "layer_norm"] {
        let name = format!("{norm} (row_program)");
        assert_eq!(many[&name], 2 * one[&name], "{name}");
        assert!(!many.contains_key(&format!("{norm} (reduce)")), "{many:?}");
    }
    Ok(())
}
