//! The parity gate with experts.

use crate::support::{Texts, Way, deep, mesh, mixtral, on, run_on, trainer};
use anymesh_train::{
    Module, Pass, Result, Zero,
    models::MoeConfig,
    trainer::{Feed, Settings, Task},
};

const STEPS: usize = 3;

fn hold(config: &MoeConfig, ways: &[Way]) -> Result<()> {
    let alone = run_on(&mesh("")?, config, &on(""), STEPS)?;
    let falls = |pair: &[_]| -> bool {
        let [a, b]: &[anymesh_train::trainer::StepReport; 2] = pair.try_into().expect("two");
        (a.loss - b.loss).abs() > 1e-5
    };
    assert!(alone.windows(2).all(falls), "it is trained: {alone:?}");
    for way in ways {
        let there = run_on(&mesh(way.axes)?, config, way, STEPS)?;
        for (a, b) in alone.iter().zip(&there) {
            let apart = ((a.loss - b.loss) / a.loss).abs();
            let apart = apart.max(((a.norm - b.norm) / a.norm).abs());
            assert!(apart <= 1e-12, "{way:?}: {b:?} instead of {a:?}");
            assert_eq!(a.more, b.more, "{way:?}");
        }
    }
    Ok(())
}

fn ways() -> Vec<Way> {
    let zero = |zero| Way {
        zero,
        ..on("dp=2, ep=2")
    };
    vec![
        on("dp=2"),
        on("ep=2"),
        on("ep=4"),
        on("dp=2, ep=2"),
        on("ep=2, tp=2"),
        on("pp=2, ep=2"),
        Way {
            schedule: "zbh1",
            recompute: true,
            ..on("pp=2, ep=2")
        },
        zero(Zero::One),
        zero(Zero::Two),
        zero(Zero::Three),
    ]
}

#[test]
fn experts_that_take_all_give_the_losses_of_one_device() -> Result<()> {
    hold(&mixtral(), &ways())
}

#[test]
fn a_shared_expert_drops_and_a_bias_give_the_losses_of_one_device() -> Result<()> {
    hold(&deep(), &ways())
}

#[test]
fn what_balances_experts_reaches_the_objective_and_the_log() -> Result<()> {
    let mesh = mesh("ep=2")?;
    let plain = MoeConfig {
        router_aux_loss_coef: 0.0,
        router_z_loss_coef: 0.0,
        ..mixtral()
    };
    let loss =
        |config: &MoeConfig| -> Result<f64> { Ok(run_on(&mesh, config, &on("ep=2"), 1)?[0].loss) };
    let (with, without) = (loss(&mixtral())?, loss(&plain)?);
    // Of two layers, each at least its weight: the least that the loss of even experts can be.
    assert!(with - without > 2.0 * 0.02 * 0.99, "{with} and {without}");
    // An evaluation has the model's own loss.
    let evaluated = |config: &MoeConfig| -> Result<f64> {
        let mut trainer = trainer(&mesh, config, &on("ep=2"), Settings::default())?;
        let (batches, _) = Texts(mesh.clone()).global_batch(0)?.expect("data");
        Ok(trainer
            .task
            .loss(&batches[0], &Pass::eval())?
            .item()?
            .to_f64())
    };
    assert_eq!(evaluated(&mixtral())?, evaluated(&plain)?);
    let report = run_on(&mesh, &deep(), &on("ep=2"), 1)?.remove(0);
    let names: Vec<&str> = report.more.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["expert_load", "expert_drops"]);
    assert!(
        report.more[0].1 >= 1.0 && report.more[0].1 <= 2.0,
        "{report:?}"
    );
    assert!(
        report.more[1].1 > 0.0 && report.more[1].1 < 0.5,
        "{report:?}"
    );
    Ok(())
}

#[test]
fn the_bias_is_state_that_steps_move_and_optimizers_do_not() -> Result<()> {
    let mesh = mesh("dp=2, ep=2")?;
    let mut trainer = trainer(&mesh, &deep(), &on("dp=2, ep=2"), Settings::default())?;
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    let bias = |t: &anymesh_train::trainer::Trainer<_>| -> Result<Vec<f64>> {
        let task: &anymesh_train::trainer::LanguageModel = &t.task;
        Ok(task.model.values()[name].to_vec::<f64>()?)
    };
    assert_eq!(bias(&trainer)?, [0.0; 4]);
    crate::support::steps(&mut trainer, 1)?;
    let moved = bias(&trainer)?;
    assert!(
        moved.iter().all(|b| [0.0, 0.05, -0.05].contains(b)),
        "{moved:?}"
    );
    assert!(moved.iter().any(|b| *b != 0.0));
    let contents = trainer.contents().tensors;
    assert!(contents.contains_key(name));
    assert!(!contents.keys().any(|k| k != name && k.contains(name)));
    Ok(())
}
