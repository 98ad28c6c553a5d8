//! The parity gate with sequences that are cut: every way on every mesh gives the losses of one
//! device.

use super::support::{WAYS, Way, gpt2, llama, on, run};
use anymesh_core::{DType, Mesh, ops::SequenceOrder};
use anymesh_train::{
    Error, Result, Zero,
    models::ModelConfig,
    nn::{Context, ContextAttention},
};

const STEPS: usize = 3;
const ROWS: [usize; 1] = [4];

#[track_caller]
fn hold_to(config: &ModelConfig, ways: &[Way], rows: &[usize], within: f64) -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let mut alone: Vec<(Way, Vec<(f64, f64)>)> = vec![];
    for way in ways {
        let same = |(one, _): &&(Way, _)| {
            (one.documents, one.length, one.dtype) == (way.documents, way.length, way.dtype)
        };
        let expected = match alone.iter().find(same) {
            Some((_, losses)) => losses.clone(),
            None => {
                let one = Way {
                    documents: way.documents,
                    length: way.length,
                    dtype: way.dtype,
                    ..Way::default()
                };
                let losses = run(&cpu, config, &one, rows, STEPS)?;
                let changed = |pair: &[(f64, f64)]| (pair[0].0 - pair[1].0).abs() > 1e-5;
                assert!(losses.windows(2).all(changed), "it is trained: {losses:?}");
                alone.push((one, losses.clone()));
                losses
            }
        };
        let there = run(&cpu, config, way, rows, STEPS)?;
        for (step, (a, b)) in expected.iter().zip(&there).enumerate() {
            let apart = ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs());
            assert!(
                apart <= within,
                "{way:?}, step {step}: {b:?} instead of {a:?}, {apart:e} apart"
            );
        }
    }
    Ok(())
}

#[track_caller]
fn hold(config: &ModelConfig, ways: &[Way]) -> Result<()> {
    hold_to(config, ways, &ROWS, 1e-12)
}

/// Every way with pairs and without, with documents and without.
fn all(axes: &'static str) -> Vec<Way> {
    let mut ways = vec![];
    for attention in WAYS {
        for (balance, documents) in [(false, false), (true, false), (false, true), (true, true)] {
            ways.push(Way {
                documents,
                ..on(axes, attention, balance)
            });
        }
    }
    ways
}

/// Every way with pairs and documents.
fn packed(axes: &'static str) -> Vec<Way> {
    let ways = all(axes).into_iter();
    ways.filter(|way| way.documents && way.context.balance == Some(true))
        .collect()
}

#[test]
fn every_way_on_two_and_four_ranks_gives_the_losses_of_one_device() -> Result<()> {
    hold(&llama(4), &all("cp=2"))?;
    hold(&llama(4), &all("cp=4"))?;
    hold(&gpt2(0.0), &packed("cp=4"))
}

#[test]
fn long_sequences_mix_with_the_other_axes() -> Result<()> {
    hold(&llama(4), &all("cp=2, tp=2"))?;
    hold(&llama(4), &all("dp=2, cp=2"))?;
    hold(&gpt2(0.0), &packed("tp=2, cp=2"))?;
    let mixed = |way: Way| Way {
        sequence_parallel: true,
        recompute: true,
        zero: Zero::Three,
        documents: true,
        ..way
    };
    let ways = WAYS.map(|way| mixed(on("dp=2, cp=2, tp=2", way, true)));
    hold(&llama(4), &ways)
}

#[test]
fn layers_that_run_again_and_states_that_are_cut() -> Result<()> {
    let again = |way: Way| Way {
        recompute: true,
        ..way
    };
    let cut = |way: Way, zero| Way { zero, ..way };
    for way in WAYS {
        let balanced = on("cp=2", way, true);
        let ways = [
            again(balanced),
            cut(balanced, Zero::One),
            cut(again(balanced), Zero::Three),
        ];
        hold(&llama(4), &ways)?;
    }
    Ok(())
}

#[test]
fn fewer_heads_of_keys_than_ranks() -> Result<()> {
    use ContextAttention::{Auto, Gather, Heads, Ring};
    let ways = [
        on("cp=4", Gather, true),
        on("cp=4", Ring, true),
        on("cp=4", Ring, false),
        on("cp=4", Auto, true),
        on("cp=2, tp=4", Ring, true),
        on("cp=2, tp=4", Gather, true),
    ];
    hold(&llama(2), &ways)?;
    let cpu = anymesh_backend_cpu::device();
    let refused = run(&cpu, &llama(2), &on("cp=4", Heads, false), &ROWS, 1);
    let Err(Error::Config { key, detail }) = refused else {
        panic!("two heads of keys went to four ranks");
    };
    assert_eq!(key, "context.attention");
    assert!(detail.contains("gather or ring"), "{detail}");
    Ok(())
}

#[test]
fn lengths_that_do_not_divide_are_cut_unevenly() -> Result<()> {
    let uneven = |way: Way, length| Way { length, ..way };
    for attention in WAYS {
        let ways = [
            uneven(on("cp=4", attention, false), 10),
            uneven(on("cp=4", attention, false), 3),
            Way {
                documents: true,
                ..uneven(on("cp=2", attention, false), 13)
            },
        ];
        hold(&llama(4), &ways)?;
    }
    // By itself the order is straight where pairs do not fit, and an error where they are asked for.
    let auto = Way {
        axes: "cp=4",
        length: 12,
        ..Way::default()
    };
    hold(&llama(2), &[auto])?;
    let cpu = anymesh_backend_cpu::device();
    let asked = uneven(on("cp=4", ContextAttention::Ring, true), 12);
    let error = run(&cpu, &llama(4), &asked, &ROWS, 1).expect_err("12 does not divide by 8");
    assert!(error.to_string().contains("8 or 16"), "{error}");
    Ok(())
}

#[test]
fn dropout_of_attention_is_the_same_where_heads_are_exchanged_or_keys_gathered() -> Result<()> {
    use ContextAttention::{Auto, Gather, Heads};
    let ways = [on("cp=2", Heads, false), on("cp=2", Gather, false)];
    hold(&gpt2(0.1), &ways)?;
    // What is chosen by itself can be done.
    let auto = Way {
        axes: "cp=2",
        context: Context::default(),
        ..Way::default()
    };
    hold(&gpt2(0.1), &[auto])?;
    let cpu = anymesh_backend_cpu::device();
    for way in [
        on("cp=2", ContextAttention::Ring, false),
        on("cp=2", Gather, true),
    ] {
        let error = run(&cpu, &gpt2(0.1), &way, &ROWS, 1).expect_err("dropout");
        assert!(matches!(error, Error::Config { .. }), "{error}");
    }
    assert_eq!(Context::default().attention, Auto);
    Ok(())
}

#[test]
fn single_precision_is_as_near_as_it_can_be() -> Result<()> {
    let single = |way: Way| Way {
        dtype: DType::F32,
        ..way
    };
    let ways: Vec<Way> = packed("cp=4").into_iter().map(single).collect();
    hold_to(&llama(4), &ways, &ROWS, 1e-5)
}

#[test]
fn several_micro_batches_and_stages() -> Result<()> {
    let mut ways = vec![];
    for attention in WAYS {
        ways.push(Way {
            documents: true,
            ..on("pp=2, cp=2", attention, true)
        });
    }
    ways.push(on("cp=2, pp=2, tp=2", ContextAttention::Ring, true));
    hold_to(&llama(4), &ways, &[2, 4, 2], 1e-12)?;
    let recompute = Way {
        recompute: true,
        ..on("dp=2, pp=2, cp=2", ContextAttention::Ring, true)
    };
    hold_to(&gpt2(0.0), &[recompute], &[2, 4], 1e-12)
}

#[test]
fn the_order_is_chosen_where_it_helps() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let order = |axes: &str, keys: usize, context: Context, length| {
        let mesh = Mesh::new(axes, &cpu)?;
        let way = Way {
            context,
            ..Way::default()
        };
        super::support::model(&mesh, &llama(keys), &way)?.order(length)
    };
    let paired = SequenceOrder::Paired { ranks: 4 };
    let auto = Context::default();
    // Exchanged heads are balanced as they are.
    assert_eq!(order("cp=4", 4, auto, 16)?, SequenceOrder::Straight);
    assert_eq!(order("cp=4", 2, auto, 16)?, paired);
    assert_eq!(order("cp=4, pp=2", 2, auto, 16)?, paired);
    assert_eq!(order("cp=4", 2, auto, 12)?, SequenceOrder::Straight);
    assert_eq!(order("dp=4", 2, auto, 16)?, SequenceOrder::Straight);
    assert_eq!(order("cp=1", 2, auto, 16)?, SequenceOrder::Straight);
    let ring = Context {
        attention: ContextAttention::Ring,
        balance: None,
    };
    assert_eq!(order("cp=4", 4, ring, 16)?, paired);
    Ok(())
}
