//! Checkpoints of experts go on on other meshes.

use crate::support::{Scratch, Way, deep, mesh, mixtral, on, steps, trainer};
use anymesh_core::Tensor;
use anymesh_train::{
    Result, Zero,
    models::MoeConfig,
    trainer::{Save, Settings},
};
use std::collections::BTreeMap;

fn values(tensors: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Vec<f64>>> {
    let read = |(name, t): (&String, &Tensor)| Ok((name.clone(), t.full_tensor()?.to_vec()?));
    tensors.iter().map(read).collect()
}

fn hold(config: &MoeConfig, name: &str) -> Result<()> {
    let scratch = Scratch::new(name);
    let settings = Settings {
        save: Save {
            folder: Some(scratch.0.clone()),
            ..Save::default()
        },
        ..Settings::default()
    };
    let four = mesh("ep=4")?;
    let mut first = trainer(&four, config, &on("ep=4"), settings.clone())?;
    steps(&mut first, 2)?;
    anymesh_checkpoint::save(&scratch.0, "step-2", &first.contents())?;
    let saved = values(&first.contents().tensors)?;
    let stack = "model.layers.1.mlp.experts.gate_proj";
    let ty = first.contents().tensors[stack].type_string();
    assert_eq!(ty, "f64[4@ep, 10, 12]");
    let gone_on = steps(&mut first, 2)?;
    let zero = Way {
        zero: Zero::Three,
        ..on("dp=2, ep=2")
    };
    let stages = on("pp=2, ep=2");
    for way in [on("ep=4"), on("ep=2"), on(""), on("dp=2"), zero, stages] {
        let mut again = trainer(&mesh(way.axes)?, config, &way, settings.clone())?;
        let found = again.resume()?.expect("a checkpoint");
        assert!(found.ends_with("step-2"), "{found:?}");
        assert_eq!(values(&again.contents().tensors)?, saved, "{way:?}");
        let there = steps(&mut again, 2)?;
        if way.axes == "ep=4" {
            assert_eq!(there, gone_on, "the same bits on the same mesh");
        }
        for (a, b) in gone_on.iter().zip(&there) {
            let apart = ((a.loss - b.loss) / a.loss).abs();
            assert!(apart <= 1e-12, "{way:?}: {b:?} instead of {a:?}");
            assert_eq!(a.more, b.more, "{way:?}");
        }
    }
    Ok(())
}

#[test]
fn experts_saved_on_four_ranks_go_on_on_two_on_one_and_without_their_axis() -> Result<()> {
    hold(&mixtral(), "all")
}

#[test]
fn so_does_the_bias_of_their_routers() -> Result<()> {
    hold(&deep(), "bias")
}
