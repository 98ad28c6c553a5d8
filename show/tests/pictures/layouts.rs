//! What the search for a layout found.

use crate::{hostile::names, svg};
use anymesh_core::cost::CostModel;
use anymesh_layout::{Llama, Report, Search};
use anymesh_show::Show;

/// The layouts of a small model on 16 ranks with so many bytes each.
fn report(memory: u64) -> Report {
    let config = r#"{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 32000}"#;
    let model = Llama::from_config(config, 2048).unwrap();
    let mut cost = CostModel::preset("h100").unwrap();
    cost.device.memory = Some(memory);
    let search = Search {
        model: &model,
        cost: &cost,
        ranks: 16,
        sequences: 16,
        optimizer: 12.0,
    };
    search.run().unwrap()
}

#[test]
fn layouts_are_bars_of_time_with_the_reason_for_each() {
    let found = report(80 << 30);
    let picture = svg(&found);
    assert!(picture.contains("16 ranks of h100") && picture.contains("computing"));
    let best = found.best().unwrap();
    assert!(picture.contains(&format!(">{}<", best.layout.summary())));
    let html = found.html();
    assert!(html.contains("the fastest that fits") && html.contains("% slower"));
}

#[test]
fn where_nothing_fits_that_is_said() {
    let found = report(1 << 10);
    assert!(found.best().is_none());
    assert!(svg(&found).contains("Nothing fits"));
}

#[test]
fn layouts_with_every_name_and_any_time() {
    let found = report(80 << 30);
    for (i, name) in names().into_iter().enumerate() {
        let mut found = found.clone();
        found.cost.name = name.clone();
        found.candidates.truncate(40);
        for candidate in &mut found.candidates {
            for axis in &mut candidate.layout.mesh {
                axis.0 = name.clone();
            }
            for parameter in &mut candidate.layout.parameters {
                parameter.0 = name.clone();
            }
            candidate.compute = [f64::NAN, f64::INFINITY, 0.0, 1e300][i % 4];
        }
        svg(&found);
    }
}
