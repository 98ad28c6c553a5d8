//! The real step without values: against the simulator's closed forms, and against the trainer's own
//! pieces run as a whole.
//!
//! Where the two disagree the difference is known and stands here as a formula:
//! - **Attention's output** is kept twice, as heads and as rows for the next product: `2 T h / tp`
//!   bytes more in each layer.
//! - **The loss** over a cut vocabulary sends statistics to where they are used, half of the three
//!   all-reduces of the formula.
//! - **The embedding's gradient** over `dp` and `tp` is made where rows of tokens are sent to: less
//!   is sent in the end, and something in every backward pass.
//! - **ZeRO 3** has no second copy of a parameter in 16 bits: 16 bytes of each, not 18.
//! - **A tied head** on another stage is a copy: its owner has the optimizer's state. On one stage its
//!   weights are gathered twice, and its gradient added up twice in every pass, with ZeRO 2 and 3.

use anymesh_core::{DType, Mesh, Tensor, meta, ops::Rng, spmd::Ledger};
use anymesh_schedule::Placement;
use anymesh_simulate::{
    Estimate, Layout, Machine, Model, Recompute, bytes, compare, estimate, machine, preset,
};
use anymesh_train::{
    Build, Pass, Policy, Result, Zero,
    config::{RunConfig, parse},
    data::Batch,
    measure::{Measured, measure, run_of, settings_of},
    objective::Language,
    optim::{AdamW, Clip, Groups, Optimizer, Rule},
    pipeline::{ScheduleChoice, Stages},
    trainer::{LanguageModel, Task},
};

fn h100() -> Machine {
    machine("h100").expect("it is one")
}

/// A Llama, or a GPT with tied ends.
fn small(gated: bool) -> Model {
    Model {
        name: "small".into(),
        layers: 8,
        hidden: 512,
        heads: 8,
        kv_heads: if gated { 4 } else { 8 },
        head_size: 64,
        ffn: 2048,
        gated,
        vocabulary: 8192,
        tied: !gated,
        positions: if gated { 0 } else { 256 },
        biases: !gated,
        dropout: false,
        experts: None,
        latent: None,
    }
}

fn base() -> Layout {
    Layout {
        sequence: 256,
        batch: 32,
        micro: 2,
        regather: false,
        ..Layout::default()
    }
}

fn both(model: &Model, layout: &Layout) -> Result<(Estimate, Measured)> {
    let closed = estimate(model, &h100(), layout).expect("it can be");
    let real = measure(&run_of(model, layout)?, None, &h100())?;
    println!("{}\n{}", layout.summary(), compare(&closed, &real.estimate));
    Ok((closed, real))
}

/// What the layers of a rank's stages keep of a micro-batch.
fn kept(step: &Estimate, rank: usize) -> f64 {
    let own = step.stages.iter().filter(|s| s.rank == rank);
    own.map(|s| s.kept).sum()
}

fn state(step: &Estimate, rank: usize) -> [f64; 3] {
    let own = step.stages.iter().filter(|s| s.rank == rank);
    own.fold([0.0; 3], |all, s| [0, 1, 2].map(|i| all[i] + s.state[i]))
}

fn near(real: f64, closed: f64, within: f64) {
    let off = (real / closed - 1.0).abs();
    assert!(off <= within, "{real} and {closed} differ by {off}");
}

#[test]
fn data_parallel_steps_send_and_hold_what_formulas_say() -> Result<()> {
    for zero in 0..=3 {
        for recompute in [Recompute::None, Recompute::Full] {
            let layout = Layout {
                dp: 4,
                zero,
                recompute,
                ..base()
            };
            let (closed, real) = both(&small(true), &layout)?;
            let real = &real.estimate;
            // The norm of all gradients is a few bytes.
            near(real.bytes.dp, closed.bytes.dp, 1e-6);
            let ([p, g, o], [parameters, gradients, optimizer]) =
                (state(real, 0), state(&closed, 0));
            assert_eq!(g, gradients);
            match zero {
                3 => assert_eq!(
                    p + o,
                    parameters + optimizer - 2.0 * small(true).parameters() / 4.0
                ),
                _ => assert_eq!((p, o), (parameters, optimizer)),
            }
            let out = match recompute {
                Recompute::None => 2.0 * 2.0 * 256.0 * 512.0 * 8.0,
                _ => 0.0,
            };
            assert_eq!(kept(real, 0), kept(&closed, 0) + out);
            // The loss keeps the log-sum-exp of each position, which its gradient reads.
            let lse = 4.0 * 2.0 * 256.0;
            assert_eq!(real.stages[0].ends, closed.stages[0].ends + lse);
        }
    }
    Ok(())
}

#[test]
fn tensor_parallel_steps_send_and_hold_what_formulas_say() -> Result<()> {
    for gated in [true, false] {
        for sequence_parallel in [false, true] {
            for recompute in [Recompute::None, Recompute::Full] {
                let layout = Layout {
                    tp: 4,
                    sequence_parallel,
                    recompute,
                    ..base()
                };
                let (closed, real) = both(&small(gated), &layout)?;
                let real = &real.estimate;
                let tokens = 2.0 * 256.0;
                let loss = bytes::cross_entropy(tokens, 4) / 2.0;
                assert_eq!(real.stages[0].bytes.tp, closed.stages[0].bytes.tp - loss);
                let ([p, g, o], [parameters, gradients, optimizer]) =
                    (state(real, 0), state(&closed, 0));
                assert_eq!((p, o), (parameters, optimizer));
                // Positions of a stream that is cut have gradients that are.
                near(g, gradients, if gated { 0.0 } else { 0.02 });
                // Where queries and keys are turned, attention's result is copied into rows.
                let out = match recompute {
                    Recompute::None if gated => 2.0 * tokens * 512.0 * 8.0 / 4.0,
                    _ => 0.0,
                };
                assert_eq!(kept(real, 0), kept(&closed, 0) + out);
                // Statistics of the loss.
                near(real.stages[0].ends, closed.stages[0].ends, 2e-3);
            }
        }
    }
    Ok(())
}

#[test]
fn pipelines_send_and_hold_what_formulas_say() -> Result<()> {
    for (pp, chunks, schedule) in [
        (4, 1, "1f1b"),
        (4, 1, "fthenb"),
        (4, 2, "interleaved"),
        (4, 1, "zbh1"),
        (2, 2, "zbv"),
    ] {
        let layout = Layout {
            pp,
            chunks,
            schedule: schedule.into(),
            ..base()
        };
        let (closed, real) = both(&small(true), &layout)?;
        let real = &real.estimate;
        near(real.bytes.pp, closed.bytes.pp, 1e-9);
        assert_eq!(real.split, closed.split);
        for rank in 0..pp {
            assert_eq!(state(real, rank), state(&closed, rank), "rank {rank}");
            let layers = (real.stages.iter()).filter(|s| s.rank == rank);
            let layers: usize = layers.map(|s| s.layers).sum();
            let out = 2.0 * 2.0 * 256.0 * 512.0 * layers as f64;
            let halves = ["zbh1", "zbv"].contains(&schedule);
            match halves {
                // Between the halves gradients of outputs wait.
                true => assert!(kept(real, rank) >= kept(&closed, rank)),
                false => assert_eq!(kept(real, rank), kept(&closed, rank) + out),
            }
        }
        near(real.bubble, closed.bubble, 0.35);
    }
    Ok(())
}

#[test]
fn all_axes_at_once_and_a_tied_head() -> Result<()> {
    let layout = Layout {
        pp: 2,
        dp: 4,
        tp: 2,
        ..base()
    };
    let u = bytes::gather(2.0 * 256.0 * 512.0 * 2.0, 2);
    let (closed, real) = both(&small(true), &layout)?;
    let first = |e: &Estimate| e.stages[0].bytes;
    // The embedding's gradient goes over both axes together.
    assert_eq!(first(&real.estimate).tp, first(&closed).tp - u);
    assert!(first(&real.estimate).dp > 0.0);
    let last = |e: &Estimate| e.stages[1].bytes;
    let loss = bytes::cross_entropy(2.0 * 256.0, 2) / 2.0;
    assert_eq!(last(&real.estimate).tp, last(&closed).tp - loss);
    assert_eq!(last(&real.estimate).dp, 0.0);
    for rank in 0..2 {
        let (real, closed) = (state(&real.estimate, rank), state(&closed, rank));
        assert_eq!((real[0], real[2]), (closed[0], closed[2]));
    }

    let (closed, real) = both(&small(false), &layout)?;
    let real = &real.estimate;
    assert_eq!(state(real, 0)[2], state(&closed, 0)[2]);
    let copy = 8192.0 * 512.0 / 2.0;
    assert_eq!(state(real, 1)[2], state(&closed, 1)[2] - 12.0 * copy / 4.0);
    assert_eq!(state(real, 1)[0], state(&closed, 1)[0]);
    // The weights go there, and their gradient, which micro-batches were added up in, comes back wide.
    assert_eq!(real.bytes.pp, closed.bytes.pp);
    Ok(())
}

#[test]
fn models_that_are_real() -> Result<()> {
    let step = |name: &str, layout: Layout| -> Result<(Estimate, Estimate)> {
        let preset = preset(name).expect("it is one");
        let layout = Layout {
            sequence: preset.sequence,
            regather: false,
            ..layout
        };
        let (closed, real) = both(&preset.model, &layout)?;
        Ok((closed, real.estimate))
    };
    let wide = |dp, batch| Layout {
        dp,
        batch,
        ..Layout::default()
    };
    let cut = Layout {
        dp: 16,
        tp: 8,
        pp: 4,
        batch: 512,
        ..Layout::default()
    };
    for (name, layout, time) in [
        ("smollm2-135m", wide(8, 64), 0.8),
        ("llama-3-8b", wide(16, 64), 0.25),
        ("llama-3-70b", cut.clone(), 0.15),
        // Few tokens in a micro-batch: kernels that add up gradients are a fifth of the step.
        ("gpt-3-175b", Layout { pp: 8, ..cut }, 0.3),
    ] {
        let (closed, real) = step(name, layout)?;
        assert_eq!(state(&real, 0)[0], state(&closed, 0)[0], "{name}");
        assert_eq!(state(&real, 0)[2], state(&closed, 0)[2], "{name}");
        near(real.bytes.dp, closed.bytes.dp, 0.05);
        if closed.bytes.tp > 0.0 {
            near(real.bytes.tp, closed.bytes.tp, 0.01);
        }
        near(kept(&real, 0), kept(&closed, 0), 0.07);
        near(real.seconds, closed.seconds, time);
        near(real.hardware_flops, closed.hardware_flops, 0.01);
    }
    Ok(())
}

/// The trainer's own pieces on all stages and micro-batches, and what they send.
fn whole(model: &Model, layout: &Layout) -> Result<Ledger> {
    let axes = format!("pp={}, dp={}, tp={}", layout.pp, layout.dp, layout.tp);
    let mesh = Mesh::new(&axes, &meta())?;
    let policy = Policy::bf16();
    let zero = [Zero::Off, Zero::One, Zero::Two, Zero::Three][layout.zero as usize];
    let build = Build::new(&mesh, policy, 0)
        .zero(zero, &["dp"])
        .sequence_parallel(layout.sequence_parallel)
        .stages(Stages {
            chunks: layout.chunks,
            placement: Placement::Loop,
            layers: None,
            costs: None,
        });
    let built = settings_of(model, layout.sequence)?.build(&build)?;
    let adamw = Groups::all(Rule::AdamW(AdamW::default()));
    let mut optimizer = Optimizer::new(&built, &adamw)?;
    optimizer.clip = Some(Clip::to(1.0));
    let language = Language {
        output: policy.output,
        ..Language::default()
    };
    let mut task = LanguageModel::new(built, language, layout.sequence);
    task.mix_documents = true;
    task.schedule = ScheduleChoice::Named(layout.schedule.clone());
    let rows = layout.micro * layout.dp;
    let batch = || -> Result<Batch> {
        let ids = Tensor::zeros([rows, layout.sequence], DType::I32, (&mesh, "[@dp, _]"))?;
        Ok(Batch::new(ids.clone(), ids))
    };
    let micros = layout.batch / rows;
    let batches = (0..micros).map(|_| batch()).collect::<Result<Vec<_>>>()?;
    let (done, ledger) = Ledger::record(|| -> Result<()> {
        let pass = |i: usize| Pass::train(Rng::new(i as u64));
        let mut computed = task.gradients(&batches, 1.0, &pass)?;
        let sums = computed.gradients.finish(task.model())?;
        optimizer.step(task.model_mut(), sums, 1.0)?;
        Ok(())
    });
    done?;
    Ok(ledger)
}

#[test]
fn stages_together_send_what_the_whole_step_sends() -> Result<()> {
    for gated in [true, false] {
        for (zero, schedule, chunks) in [(1, "1f1b", 1), (2, "interleaved", 2), (3, "zbh1", 1)] {
            let layout = Layout {
                pp: 2,
                dp: 2,
                tp: 2,
                zero,
                chunks,
                schedule: schedule.into(),
                ..base()
            };
            let ledger = whole(&small(gated), &layout)?;
            let real = measure(&run_of(&small(gated), &layout)?, None, &h100())?;
            for axes in ["tp", "dp", "dp tp", ""] {
                let sent = ledger.entries.iter().filter(|e| e.axes.join(" ") == axes);
                let sent: f64 = sent.map(|e| e.bytes as f64).sum();
                let once = ["borrow", "reduce", "update", "return"];
                let parts = real.parts.iter().filter(|p| {
                    let kernel = ["kernel", "products"].contains(&p.item.kind.as_str());
                    !kernel && p.item.axes == axes
                });
                let counted: f64 = parts
                    .map(|p| {
                        let micros = if once.contains(&p.part) { 1 } else { 8 };
                        p.amount.bytes * (p.stages.len() * micros) as f64
                    })
                    .sum();
                // Losses and the norm of gradients are numbers, which every process reads. What is
                // still at hand in the second half of a backward pass depends on what ran between.
                let few = match schedule {
                    "zbh1" => 0.01 * sent + 1000.0,
                    _ => 1000.0,
                };
                assert!(
                    (sent - counted).abs() < few,
                    "{gated} {schedule} over '{axes}': {sent}, {counted}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn runs_of_any_kind_are_measured() -> Result<()> {
    let text = r#"
        data = []
        [model]
        model_type = "llama"
        vocab_size = 1000
        hidden_size = 96
        intermediate_size = 200
        num_hidden_layers = 3
        num_attention_heads = 6
        num_key_value_heads = 2
        [mesh]
        axes = "pp=2, dp=2, tp=2"
        [batch]
        global = 8
        micro = 2
        length = 33
    "#;
    for sets in [
        &[][..],
        &["mesh.axes="],
        &["mesh.axes=tp=4", "mesh.dtype=bf16"],
        &["mesh.dtype=f16"],
        &["batch.global=4"],
        &["batch.mix_documents=false"],
        &["model.tie_word_embeddings=true", "pipeline.schedule=zbv"],
        &[
            "pipeline.layers=[0, 3]",
            "groups=[{of = \"*norm*\", rule = {kind = \"adamw\"}, decay = 0.0}]",
        ],
        &[
            "optimizer={kind = \"muon\"}",
            "groups=[{of = \"*norm*, *embed*, lm_head*\", rule = {kind = \"adamw\"}}]",
        ],
        &["freeze=*embed*", "mesh.recompute=true"],
        &["lora={rank = 4}"],
    ] {
        let run: RunConfig = match parse(text, sets) {
            Ok(run) => run,
            Err(error) => panic!("{sets:?}: {error}"),
        };
        let step = measure(&run, None, &h100());
        let step = step
            .unwrap_or_else(|error| panic!("{sets:?}: {error}"))
            .estimate;
        assert!(
            step.seconds > 0.0 && step.memory.iter().all(|m| m.total > 0.0),
            "{sets:?}"
        );
        let held: f64 = step.memory.iter().map(|m| m.parameters + m.optimizer).sum();
        assert!(held > 0.0, "{sets:?}");
    }
    // In f32 a parameter is its own weight, with two moments beside it.
    let run: RunConfig = parse(text, &["mesh.axes="])?;
    let step = measure(&run, None, &h100())?.estimate;
    let [p, g, o] = state(&step, 0);
    assert_eq!((g, o), (p, 2.0 * p));
    // Frozen parameters have no gradients and no state.
    let run: RunConfig = parse(text, &["mesh.axes=", "freeze=*embed*"])?;
    let frozen = state(&measure(&run, None, &h100())?.estimate, 0);
    assert_eq!(frozen[1], p - 1000.0 * 96.0 * 4.0);
    assert_eq!(frozen[0], p);
    Ok(())
}

#[test]
fn what_no_run_has_is_said() {
    let refused = |layout: Layout, why: &str| {
        let error = run_of(&small(true), &layout).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(
        Layout {
            precision: anymesh_simulate::Precision::Fp8,
            ..base()
        },
        "no fp8",
    );
    refused(
        Layout {
            recompute: Recompute::Selective,
            ..base()
        },
        "no selective recompute",
    );
    refused(Layout { tp: 3, ..base() }, "do not divide");
    let deepseek = preset("deepseek-v3").expect("it is one").model;
    let error = settings_of(&deepseek, 4096).unwrap_err().to_string();
    assert!(error.contains("latent vectors"), "{error}");
}
