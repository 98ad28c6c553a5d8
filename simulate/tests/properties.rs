//! What must hold for every layout.

use anymesh_simulate::{
    Context, Layout, Limits, Machine, Model, Precision, Recompute, estimate, machine, machines,
    preset, presets, search,
};

/// Numbers that look random and are the same every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// Layouts that can be, of all models and machines.
fn cases(count: usize) -> Vec<(Model, Machine, Layout)> {
    let mut numbers = Numbers(0x2545_f491_4f6c_dd1d);
    let mut cases = vec![];
    let powers = [1, 2, 4, 8, 16];
    while cases.len() < count {
        let model = numbers.of(&presets()).model;
        let dp = numbers.of(&[1, 2, 8, 64]);
        let chunks = numbers.of(&[1, 1, 2, 3]);
        let schedule = match chunks {
            1 => numbers.of(&["1f1b", "zbh1", "fthenb", "eager-1f1b"]),
            2 => numbers.of(&["interleaved", "zbv", "dualpipev", "interleaved-zb"]),
            _ => "interleaved",
        };
        let layout = Layout {
            dp,
            tp: numbers.of(&powers),
            pp: numbers.of(&powers),
            cp: numbers.of(&[1, 1, 2, 4]),
            ep: if model.experts.is_some() {
                numbers.of(&[1, 2, 8])
            } else {
                1
            },
            chunks,
            zero: numbers.below(4) as u8,
            micro: numbers.of(&[1, 2, 4]),
            sequence: numbers.of(&[2048, 8192]),
            batch: 4 * dp * numbers.of(&[1, 2, 8, 9]),
            recompute: numbers.of(&[Recompute::None, Recompute::Selective, Recompute::Full]),
            sequence_parallel: numbers.below(2) == 0,
            regather: numbers.below(2) == 0,
            schedule: schedule.into(),
            attention: numbers.of(&[
                anymesh_simulate::Attention::Plain,
                anymesh_simulate::Attention::Flash,
            ]),
            context: numbers.of(&[Context::Gather, Context::Ring]),
            precision: numbers.of(&[Precision::Bf16, Precision::Fp8]),
            gradient_bytes: numbers.of(&[2, 4]),
        };
        let machine = numbers.of(&machines());
        if estimate(&model, &machine, &layout).is_ok() {
            cases.push((model, machine, layout));
        }
    }
    cases
}

#[test]
fn more_bandwidth_and_more_peak_are_never_slower() {
    let faster: [fn(&mut Machine); 6] = [
        |m| m.inside.bandwidth *= 2.0,
        |m| m.between.bandwidth *= 3.0,
        |m| m.bandwidth *= 2.0,
        |m| (m.bf16, m.fp8) = (m.bf16 * 2.0, m.fp8 * 2.0),
        |m| m.node *= 2,
        |m| (m.inside.latency, m.between.latency) = (0.0, 0.0),
    ];
    for (model, machine, layout) in cases(150) {
        let step = estimate(&model, &machine, &layout).unwrap();
        for (i, change) in faster.iter().enumerate() {
            let mut better = machine.clone();
            change(&mut better);
            let other = estimate(&model, &better, &layout).unwrap();
            assert!(
                other.seconds <= step.seconds * (1.0 + 1e-9),
                "change {i}: {} {}\n{step}",
                other.seconds,
                step.seconds
            );
            assert_eq!(other.bytes, step.bytes);
        }
    }
}

#[test]
fn memory_grows_with_what_is_held_and_shrinks_with_what_is_shared() {
    for (model, machine, layout) in cases(150) {
        let held = |model: &Model, layout: &Layout| {
            let step = estimate(model, &machine, layout).ok()?;
            Some(step.memory.iter().map(|m| m.total).fold(0.0, f64::max))
        };
        let own = held(&model, &layout).unwrap();
        let more = |what: &str, model: &Model, layout: Layout, more: bool| {
            let Some(other) = held(model, &layout) else {
                return;
            };
            let good = if more {
                other >= own * (1.0 - 1e-9)
            } else {
                other <= own * (1.0 + 1e-9)
            };
            assert!(good, "{what}: {own} {other} {layout:?}");
        };
        let deeper = Model {
            layers: model.layers + layout.pp * layout.chunks,
            ..model.clone()
        };
        more("layers", &deeper, layout.clone(), true);
        let mut other = layout.clone();
        (other.micro, other.batch) = (2 * layout.micro, 2 * layout.batch);
        more("micro", &model, other, true);
        let mut other = layout.clone();
        other.sequence *= 2;
        more("sequence", &model, other, true);
        let mut other = layout.clone();
        other.gradient_bytes = 4;
        more("gradients", &model, other, true);
        if layout.zero < 2 {
            let mut other = layout.clone();
            other.zero += 1;
            more("zero", &model, other, false);
        }
        let mut other = layout.clone();
        other.sequence_parallel = true;
        // What is gathered for a moment may be more than what is saved where little is alive.
        if layout.recompute == Recompute::None && layout.pp > 1 && !layout.sequence_parallel {
            more("sequence parallel", &model, other, false);
        }
    }
}

#[test]
fn parts_make_the_whole() {
    for (model, machine, layout) in cases(150) {
        let step = estimate(&model, &machine, &layout).unwrap();
        let off = (step.spent.total() / step.seconds - 1.0).abs();
        assert!(off < 1e-9, "{off}\n{step}");
        assert!(step.mfu > 0.0 && step.mfu < 1.0, "{step}");
        assert_eq!(step.split.iter().sum::<usize>(), model.layers);
        assert!((0.0..1.0).contains(&step.bubble), "{step}");
        for m in &step.memory {
            let parts = [
                m.parameters,
                m.gradients,
                m.optimizer,
                m.activations,
                m.ends,
                m.working,
            ];
            assert!((parts.iter().sum::<f64>() / m.total - 1.0).abs() < 1e-9);
            assert!(m.at <= step.seconds);
        }
        // Every parameter is somewhere, on tensor parallel ranks that share it once.
        let lanes = step.lanes();
        assert_eq!(lanes.len(), layout.pp);
        for lane in lanes {
            let mut ends = lane.spans.iter().map(|s| s.end);
            assert!(ends.all(|end| end <= step.seconds * (1.0 + 1e-9)));
        }
    }
}

#[test]
fn what_is_held_is_the_whole_model() {
    // Without axes of which ranks hold the same, all ranks together hold everything once.
    for (name, layout) in [
        (
            "llama-3-8b",
            Layout {
                dp: 4,
                zero: 3,
                batch: 4,
                ..Layout::default()
            },
        ),
        (
            "llama-3-8b",
            Layout {
                pp: 8,
                batch: 8,
                ..Layout::default()
            },
        ),
        (
            "deepseek-v3",
            Layout {
                pp: 4,
                batch: 8,
                ..Layout::default()
            },
        ),
        (
            "smollm2-135m",
            Layout {
                dp: 8,
                zero: 3,
                batch: 8,
                ..Layout::default()
            },
        ),
    ] {
        let model = preset(name).unwrap().model;
        let step = estimate(&model, &machine("h100").unwrap(), &layout).unwrap();
        let bytes: f64 = step.memory.iter().map(|m| m.parameters).sum();
        let all = bytes / 2.0 * layout.dp as f64;
        assert!(
            (all / model.parameters() - 1.0).abs() < 1e-12,
            "{name}: {all}"
        );
    }
}

#[test]
fn what_a_search_finds_uses_all_ranks_and_fits() {
    for (name, ranks, sequence, batch) in [
        ("llama-3-8b", 24, 8192, 96),
        ("smollm2-135m", 8, 2048, 512),
        ("deepseek-v3", 1024, 4096, 4096),
        ("gpt-3-175b", 256, 2048, 1536),
    ] {
        let model = preset(name).unwrap().model;
        let machine = machine("h100").unwrap();
        let found = search(&model, &machine, ranks, &Limits::new(sequence, batch)).unwrap();
        assert!(found.fitting <= found.candidates && !found.ranked.is_empty());
        let mut last = 0.0;
        for ranked in found.ranked {
            let step = ranked.estimate;
            println!("{step}\n{}\n{}\n", ranked.why.join("\n"), ranked.limit);
            assert_eq!(step.layout.ranks(), Some(ranks));
            assert!(step.fits && step.seconds >= last);
            assert!(step.layout.check(&model, ranks).is_ok());
            last = step.seconds;
        }
    }
}

#[test]
fn a_search_keeps_what_is_pinned_and_says_what_does_not_fit() {
    let model = preset("llama-3-70b").unwrap().model;
    let machine = machine("h100").unwrap();
    let mut limits = Limits::new(8192, 2048);
    limits.pinned = vec!["tp".into(), "schedule".into()];
    limits.layout.tp = 8;
    limits.layout.schedule = "zbh1".into();
    let found = search(&model, &machine, 512, &limits).unwrap();
    assert!(
        found
            .ranked
            .iter()
            .all(|r| r.estimate.layout.tp == 8 && r.estimate.layout.schedule == "zbh1")
    );
    // A 70B model's parameters alone are more than a GPU.
    let error = search(&model, &machine, 1, &Limits::new(8192, 8)).unwrap_err();
    assert!(error.to_string().contains("nothing fits"), "{error}");
    // No layout of 7 ranks has 8 of something.
    let error = search(&model, &machine, 7, &limits).unwrap_err();
    assert!(error.to_string().contains("pin less"), "{error}");
}
