//! Times that others measured. What the coefficients are fitted to must come out, and what they are not
//! fitted to shows whether they mean something.

use anymesh_simulate::{
    Attention, Estimate, Layout, Model, Published, Recompute, estimate, machine, preset, published,
};

fn step(run: &Published) -> Estimate {
    let model = preset(run.model).unwrap().model;
    let step = estimate(&model, &machine(run.machine).unwrap(), &run.layout).unwrap();
    assert_eq!(step.ranks, run.ranks);
    step
}

fn near(what: &str, got: f64, said: f64, percent: f64) {
    let off = (got / said - 1.0) * 100.0;
    println!("{what}: {got:.2}, published {said}, {off:+.1} %");
    assert!(off.abs() <= percent, "{what}: {got} {said} {off}");
}

#[test]
fn all_eight_iteration_times_of_the_paper() {
    let runs = published().into_iter().filter(|r| r.machine == "a100-80");
    let runs: Vec<_> = runs.filter(|r| r.layout.dp == 1).collect();
    assert_eq!(runs.len(), 8);
    for run in runs {
        let what = format!("{} {:?}", run.model, run.layout.recompute);
        near(&what, step(&run).seconds, run.seconds.unwrap(), 10.0);
    }
}

#[test]
fn a_run_on_2240_gpus_that_the_coefficients_are_not_fitted_to() {
    let run = published().into_iter().find(|r| r.ranks == 2240).unwrap();
    near("530B, dp 8", step(&run).seconds, run.seconds.unwrap(), 10.0);
}

#[test]
fn a_layer_of_22b_forward_and_backward() {
    let whole = preset("gpt-22b").unwrap().model;
    let machine = machine("a100").unwrap();
    for (recompute, sequence_parallel, forward, backward) in [
        (Recompute::None, false, 7.7, 11.9),
        (Recompute::None, true, 7.2, 11.8),
        (Recompute::Full, false, 7.7, 19.5),
    ] {
        let layout = Layout {
            tp: 8,
            micro: 4,
            batch: 4,
            attention: Attention::Plain,
            recompute,
            sequence_parallel,
            ..Layout::default()
        };
        // What one layer more takes.
        let passes = |layers| {
            let model = Model {
                layers,
                ..whole.clone()
            };
            let step = estimate(&model, &machine, &layout).unwrap();
            let spans = step.timing.spans[0].clone();
            [0, 1].map(|pass: usize| (spans[pass].end - spans[pass].start) * 1e3)
        };
        let (one, two) = (passes(1), passes(2));
        let what = format!("{recompute:?}, sequence parallel {sequence_parallel}");
        near(
            &format!("{what}, forward ms"),
            two[0] - one[0],
            forward,
            10.0,
        );
        near(
            &format!("{what}, backward ms"),
            two[1] - one[1],
            backward,
            10.0,
        );
    }
}

#[test]
fn llama_405b_on_up_to_16384_gpus() {
    for run in published().into_iter().filter(|r| r.machine == "h100") {
        let step = step(&run);
        let each = step.model_flops / step.seconds / run.ranks as f64 / 1e12;
        let what = format!("405B, {} GPUs, cp {}", run.ranks, run.layout.cp);
        near(&what, each, run.teraflops.unwrap(), 10.0);
    }
}

#[test]
fn deepseek_v3_on_2048_gpus_that_nothing_is_fitted_to() {
    let run = published()
        .into_iter()
        .find(|r| r.machine == "h800")
        .unwrap();
    let own = step(&run);
    println!("{own}");
    near("V3, seconds", own.seconds, run.seconds.unwrap(), 15.0);
    // Pairs of passes hide the exchange with experts; one after the other they do not.
    let mut plain = run.clone();
    plain.layout.schedule = "interleaved".into();
    let plain = step(&plain);
    assert!(
        own.spent.ep < plain.spent.ep && own.seconds < plain.seconds,
        "{plain}"
    );
}
