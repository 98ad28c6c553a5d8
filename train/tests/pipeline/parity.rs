//! The parity gate with stages: every schedule on every mesh gives the losses of one device.

use super::support::{Way, named, run, tied, untied};
use anymesh_schedule::{Placement, Schedule};
use anymesh_train::{
    Result, Zero,
    models::ModelConfig,
    pipeline::{ScheduleChoice, Stages},
};

const STEPS: usize = 4;
/// Six micro-batches; the sizes of some differ.
const ROWS: [(usize, usize); 6] = [(4, 6), (2, 6), (4, 5), (4, 6), (2, 4), (4, 6)];

fn hold(config: &ModelConfig, ways: &[Way], rows: &[(usize, usize)]) -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let plain = Way {
        lora: ways[0].lora,
        ..Way::default()
    };
    let alone = run(&cpu, config, &plain, rows, STEPS)?;
    let changed = |pair: &[(f64, f64)]| (pair[0].0 - pair[1].0).abs() > 1e-5;
    assert!(alone.windows(2).all(changed), "it is trained: {alone:?}");
    for way in ways {
        let there = run(&cpu, config, way, rows, STEPS)?;
        for (step, (a, b)) in alone.iter().zip(&there).enumerate() {
            let apart = ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs());
            assert!(
                apart <= 1e-12,
                "{way:?}, step {step}: {b:?} instead of {a:?}, {apart:e} apart"
            );
        }
    }
    Ok(())
}

#[test]
fn every_schedule_gives_the_losses_of_one_device() -> Result<()> {
    let ways = [
        named("pp=2", "fthenb", 1),
        named("pp=2", "1f1b", 1),
        named("pp=4", "1f1b", 1),
        named("pp=3", "eager1f1b", 1),
        named("pp=2", "interleaved", 2),
        named("pp=4", "zbh1", 1),
        named("pp=2", "zbv", 2),
        named("pp=2", "dualpipev", 2),
        Way {
            schedule: ScheduleChoice::Searched(4),
            ..named("pp=3", "1f1b", 1)
        },
    ];
    hold(&tied(), &ways, &ROWS)?;
    hold(&untied(), &ways, &ROWS)
}

#[test]
fn pipelines_mix_with_every_other_axis() -> Result<()> {
    let zero = |way: Way, zero| Way { zero, ..way };
    let ways = [
        named("dp=2, pp=2", "1f1b", 1),
        named("pp=2, tp=2", "zbh1", 1),
        named("dp=2, pp=2, tp=2", "1f1b", 1),
        zero(named("pp=2, dp=2", "zbv", 2), Zero::One),
        zero(named("dp=2, pp=2", "1f1b", 1), Zero::Two),
        zero(named("dp=2, pp=2, tp=2", "interleaved", 2), Zero::Three),
        // An axis of size 1.
        named("pp=1, dp=2", "1f1b", 1),
        named("dp=1, pp=2, tp=1", "zbh1", 1),
        Way {
            recompute: true,
            ..named("dp=2, pp=2", "zbh1", 1)
        },
    ];
    hold(&tied(), &ways, &ROWS)?;
    hold(&untied(), &ways, &ROWS)
}

#[test]
fn adapters_with_dropout_and_frozen_stages() -> Result<()> {
    let lora = |way: Way| Way { lora: true, ..way };
    let recompute = Way {
        recompute: true,
        ..named("dp=2, pp=2", "zbh1", 1)
    };
    let ways = [
        named("pp=2", "1f1b", 1),
        named("pp=4", "zbh1", 1),
        recompute,
    ];
    hold(&untied(), &ways.map(lora), &ROWS)
}

#[test]
fn fewer_micro_batches_than_stages() -> Result<()> {
    let rows = [(4, 6), (2, 5)];
    let ways = ["fthenb", "1f1b"].map(|name| named("pp=4", name, 1));
    hold(&untied(), &ways, &rows)?;
    let searched = Way {
        schedule: ScheduleChoice::Searched(2),
        ..named("pp=4", "1f1b", 1)
    };
    hold(&untied(), &[searched], &rows)?;
    hold(&untied(), &[named("pp=3", "1f1b", 1)], &rows[..1])
}

#[test]
fn stages_by_hand_and_an_own_schedule() -> Result<()> {
    let own = Schedule::from_csv("0F0,0F1,0I1,0I0,0W0,0W1\n1F1,1B1,1F0,1B0\n")?;
    let way = Way {
        stages: Stages {
            layers: Some(vec![0, 5]),
            placement: Placement::Loop,
            ..Stages::default()
        },
        schedule: ScheduleChoice::Own(own),
        ..named("pp=2", "1f1b", 1)
    };
    hold(&tied(), &[way], &[(4, 6), (4, 5)])
}

#[test]
fn what_does_not_fit_is_said() {
    let cpu = anymesh_backend_cpu::device();
    let said = |way: Way| {
        run(&cpu, &untied(), &way, &ROWS, 1)
            .expect_err("it does not fit")
            .to_string()
    };
    // Stages of a V on ranks of a loop.
    let mut loops = named("pp=2", "zbv", 2);
    loops.stages.placement = Placement::Loop;
    assert!(said(loops).contains("placement"), "the placement");
    assert!(said(named("pp=2", "zigzag", 1)).contains("zigzag"));
    let mut layers = named("pp=2", "1f1b", 1);
    layers.stages.layers = Some(vec![1, 1]);
    assert!(said(layers).contains("4"), "the model has four layers");
    // Not proven: a backward pass before its forward pass.
    let own = Schedule::from_csv("0B0,0F0\n1F0,1B0\n").expect("text");
    let way = Way {
        schedule: ScheduleChoice::Own(own),
        ..named("pp=2", "1f1b", 1)
    };
    assert!(said(way).contains("0B0"));
}
