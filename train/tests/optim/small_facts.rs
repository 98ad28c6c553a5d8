//! Clipping, loss scaling, schedules, 8-bit moments, averages.

use super::{
    Bag, close, device,
    facts::{facts, flat, tensor},
    floats, sums,
};
use anymesh_core::{DType, Tensor};
use anymesh_train::{
    Module, Param, Policy, Result, Zero,
    optim::{
        Accumulator, Adam8, Clip, Ema, Fall, Groups, LossScaler, Norm, Optimizer, Rounding, Rule,
        Schedule, Sgd, Step, norm_of,
    },
};
use std::collections::BTreeMap;

#[test]
fn clipping_is_torchs_and_optaxs() -> Result<()> {
    let fact = &facts()["clipping"];
    let gradients: Vec<Tensor> = (fact["grads"].as_array().expect("gradients").iter())
        .map(|g| tensor(g, DType::F64))
        .collect::<Result<_>>()?;
    let clipped = |clip: &Clip, norm: f64, expected: &serde_json::Value| -> Result<()> {
        for (g, expected) in gradients
            .iter()
            .zip(expected.as_array().expect("gradients"))
        {
            let g = g.mul(clip.factor(norm))?;
            close(&format!("{clip:?}"), &floats(&g), &flat(expected), 1e-12);
        }
        Ok(())
    };
    for case in fact["torch"].as_array().expect("cases") {
        let clip = Clip {
            max_norm: case["max_norm"].as_f64(),
            norm: serde_json::from_value(
                case["norm_type"]
                    .as_str()
                    .expect("text")
                    .trim_end_matches(".0")
                    .into(),
            )
            .expect("a norm"),
            ..Clip::default()
        };
        let norm = norm_of(&gradients, clip.norm)?;
        assert_eq!(Some(norm), case["total_norm"].as_f64());
        clipped(&clip, norm, &case["clipped"])?;
    }
    let optax = Clip {
        eps: 0.0,
        ..Clip::to(17.0)
    };
    clipped(
        &optax,
        norm_of(&gradients, Norm::Two)?,
        &fact["optax_max_norm_17"],
    )
}

#[test]
fn the_loss_scaler_goes_through_the_recorded_sequence() -> Result<()> {
    let fact = &facts()["loss_scaler"];
    let (defaults, own) = (&fact["defaults"], LossScaler::default());
    assert_eq!(Some(own.scale), defaults["init_scale"].as_f64());
    assert_eq!(Some(own.growth), defaults["growth_factor"].as_f64());
    assert_eq!(Some(own.backoff), defaults["backoff_factor"].as_f64());
    assert_eq!(Some(own.interval), defaults["growth_interval"].as_u64());

    // By a whole optimizer, whose steps are left out where a gradient is not finite.
    let value = Tensor::new(&[1f32], &device())?;
    let mut model = Bag::new([("w".into(), value)])?;
    let sgd = Rule::Sgd(Sgd {
        lr: 0.5,
        ..Sgd::default()
    });
    let mut optimizer = Optimizer::new(&model, &Groups::all(sgd))?;
    optimizer.clip = None;
    optimizer.scaler = Some(LossScaler {
        interval: fact["hyper"]["growth_interval"].as_u64().expect("a count"),
        ..own
    });
    let mut expected = 1.0;
    for (i, step) in fact["sequence"]
        .as_array()
        .expect("steps")
        .iter()
        .enumerate()
    {
        let overflow = step["found_inf"].as_bool().expect("a truth");
        let gradient = if overflow {
            f64::INFINITY
        } else {
            0.25 * optimizer.loss_scale()
        };
        let gradient = Tensor::new(&[gradient as f32], &device())?;
        let gradients = BTreeMap::from([("w".to_string(), gradient)]);
        let outcome = optimizer.step(&mut model, sums(gradients), 1.0)?;
        assert_eq!(Some(!outcome.skipped), step["stepped"].as_bool());
        assert_eq!(
            Some(optimizer.loss_scale()),
            step["scale_after"].as_f64(),
            "step {i}"
        );
        if !overflow {
            expected -= 0.125;
            assert_eq!(outcome.norm, Some(0.25), "without the scale");
        }
        assert_eq!(model.value("w"), [expected]);
    }
    assert_eq!(optimizer.steps(), 9, "steps that changed something");
    Ok(())
}

/// The schedule that a row names.
fn schedule(name: &str) -> Schedule {
    let (warmup, warmup_from, total, min) = (10, 0.0, 100, 0.1);
    let wsd = |shape: Fall, warmup_from: f64| Schedule::Wsd {
        warmup,
        warmup_from,
        stable: 60,
        decay: 30,
        min,
        shape,
    };
    let cosine = |min: f64| Schedule::Cosine {
        warmup,
        warmup_from,
        total,
        min,
    };
    match name {
        "linear warmup=10 total=100" => Schedule::Linear {
            warmup,
            warmup_from,
            total,
            min: 0.0,
        },
        "cosine warmup=10 total=100" => cosine(0.0),
        "cosine_with_min_lr rate=0.1 warmup=10 total=100"
        | "optax warmup_cosine_decay init=0 peak=1 warmup=10 decay_steps=100 end=0.1" => {
            cosine(min)
        }
        // Those of transformers begin where they end.
        "wsd linear warmup=10 stable=60 decay=30 min=0.1" => wsd(Fall::Linear, min),
        "wsd cosine warmup=10 stable=60 decay=30 min=0.1" => wsd(Fall::Cosine, min),
        "wsd 1-sqrt warmup=10 stable=60 decay=30 min=0.1" => wsd(Fall::OneMinusSqrt, min),
        "megatron WSD linear warmup=10 total=100 decay=30 min=0.1" => wsd(Fall::Linear, 0.0),
        "megatron WSD cosine warmup=10 total=100 decay=30 min=0.1" => wsd(Fall::Cosine, 0.0),
        "megatron WSD exponential warmup=10 total=100 decay=30 min=0.1" => {
            wsd(Fall::Exponential, 0.0)
        }
        "megatron WSD minus_sqrt warmup=10 total=100 decay=30 min=0.1" => {
            wsd(Fall::OneMinusSqrt, 0.0)
        }
        "inverse_sqrt warmup=10" => Schedule::InverseSqrt {
            warmup,
            warmup_from,
            timescale: None,
        },
        "polynomial power=2 warmup=10 total=100 lr_end=0.1 (lr 1)" => Schedule::Polynomial {
            warmup,
            warmup_from,
            total,
            min,
            power: 2.0,
        },
        other => panic!("{other} is no schedule"),
    }
}

#[test]
fn schedules_have_the_recorded_factors() {
    let facts = facts();
    let rows = facts["schedules"].as_object().expect("schedules");
    assert_eq!(rows.len(), 13);
    for (name, row) in rows {
        let schedule = schedule(name);
        schedule.check("schedule").expect("makes sense");
        for (step, factor) in row["factor_at_step"].as_object().expect("factors") {
            let step: u64 = step.parse().expect("a step");
            let mut expected = factor.as_f64().expect("a number");
            // The cosines of transformers rise again after the end; ours stay.
            if step == 101 && name.starts_with("cosine") {
                let last = row["factor_at_step"]["100"].as_f64().expect("a number");
                assert!(expected > last);
                expected = last;
            }
            let actual = schedule.factor(step);
            assert!(
                (actual - expected).abs() < 1e-12,
                "{name} at {step}: {actual}, {expected}"
            );
        }
        // As text and back, and without settings that it does not have.
        let text = toml::to_string(&schedule).expect("text");
        assert_eq!(
            toml::from_str::<Schedule>(&text).expect("a schedule"),
            schedule
        );
        let error = toml::from_str::<Schedule>(&format!("{text}speed = 3\n")).expect_err("unknown");
        assert!(error.to_string().contains("speed"), "{error}");
    }
}

#[test]
fn moments_of_8_bits_have_torchaos_codes() -> Result<()> {
    let fact = &facts()["adamw_8bit"];
    let hyper = &fact["hyper"];
    let betas = flat(&hyper["betas"]);
    let rule = Rule::Adam8(Adam8 {
        lr: hyper["lr"].as_f64().expect("a number"),
        betas: [betas[0], betas[1]],
        eps: hyper["eps"].as_f64().expect("a number"),
        decay: hyper["weight_decay"].as_f64().expect("a number"),
        ..Adam8::default()
    });
    let start: Vec<f32> = (0..4096)
        .map(|i| ((i * 29 % 97) as f32 - 48.0) / 32.0)
        .collect();
    let mut value = Tensor::from_slice(&start, [4096], &device())?;
    let (names, mut state): (Vec<_>, Vec<_>) = rule.state(&value)?.into_iter().unzip();
    assert_eq!(
        names,
        ["adam8.m", "adam8.m_scale", "adam8.v", "adam8.v_scale"]
    );
    for (t, expected) in (1u64..).zip(fact["steps"].as_array().expect("steps")) {
        let gradient: Vec<f32> = (0..4096u64)
            .map(|i| ((i * 37 + t * 11) % 101) as f32)
            .map(|g| (g - 50.0) / 64.0)
            .collect();
        let gradient = Tensor::from_slice(&gradient, [4096], &device())?;
        (value, state) = rule.update(&Step::new(t, rule.lr()), &value, &gradient, &state)?;
        let what = |kind: &str| format!("{kind} after step {t}");
        let values = &floats(&value)[..8];
        close(
            &what("values"),
            values,
            &flat(&expected["param_first_8"]),
            1e-6,
        );
        for (codes, scale, kind) in [(0, 1, "m"), (2, 3, "v")] {
            let codes = state[codes].to_vec::<u8>()?;
            let first: Vec<f64> = codes[..8].iter().map(|c| f64::from(*c)).collect();
            assert_eq!(
                first,
                flat(&expected[format!("{kind}_codes_first_8")]),
                "{}",
                what(kind)
            );
            let sum: u64 = codes.iter().map(|c| u64::from(*c)).sum();
            assert_eq!(
                Some(sum),
                expected[format!("sum_of_{kind}_codes")].as_u64(),
                "{}",
                what(kind)
            );
            let scale = f64::from(state[scale].to_vec::<f32>()?[0]);
            close(
                &what("scales"),
                &[scale],
                &flat(&expected[format!("{kind}_scale_0")]),
                1e-6,
            );
        }
    }
    // One value less, and moments stay f32.
    let small = Tensor::zeros([4095], DType::F32, &device())?;
    let state = rule.state(&small)?;
    assert_eq!(state.len(), 2);
    assert!(state.iter().all(|(_, t)| t.type_string() == "f32[4095]"));
    Ok(())
}

#[test]
fn small_steps_need_a_master_or_chance() -> Result<()> {
    let fact = &facts()["bf16_without_master"];
    let count = fact["steps_of_0.001"].as_u64().expect("a count");
    let sgd = Rule::Sgd(Sgd {
        lr: 1.0,
        ..Sgd::default()
    });
    let run = |parameter: DType, compute: DType, rounding: Rounding| -> Result<Param> {
        let value = Tensor::full([4096], 1.0, parameter, &device())?;
        let policy = Policy {
            parameter,
            compute,
            ..Policy::f32()
        };
        let place = value.sharding().clone();
        let mut model = Bag(vec![(
            "w".into(),
            Param::new("w", value, place, policy, Zero::Off)?,
        )]);
        let mut optimizer = Optimizer::new(&model, &Groups::all(sgd.clone()))?;
        optimizer.rounding = rounding;
        for _ in 0..count {
            let gradient = Tensor::full([4096], 0.001, DType::F32, &device())?;
            let gradients = BTreeMap::from([("w".to_string(), gradient)]);
            optimizer.step(&mut model, sums(gradients), 1.0)?;
        }
        Ok(model.0.remove(0).1)
    };
    let lost = run(DType::BF16, DType::BF16, Rounding::Nearest)?;
    assert_eq!(Some(floats(lost.value())[0]), fact["bf16_weight"].as_f64());

    let master = run(DType::F32, DType::BF16, Rounding::Nearest)?;
    close(
        "master",
        &floats(master.value())[..1],
        &flat(&fact["f32_master"]),
        1e-7,
    );
    assert_eq!(
        Some(floats(&master.get()?)[0]),
        fact["master_as_bf16"].as_f64()
    );

    let chance = floats(run(DType::BF16, DType::BF16, Rounding::default())?.value());
    let mean = chance.iter().sum::<f64>() / chance.len() as f64;
    // Each of the ten roundings has a deviation below half of 1/256: 6e-3 for one value after ten,
    // 1e-4 for the mean of 4096.
    assert!((mean - 0.99).abs() < 4e-4, "{mean}");
    Ok(())
}

#[test]
fn the_mean_of_a_batch_is_over_all_its_tokens() -> Result<()> {
    let fact = &facts()["accumulation"];
    let batches = fact["token_losses_of_two_micro_batches"].as_array();
    let batches: Vec<Vec<f64>> = batches.expect("batches").iter().map(flat).collect();
    let tokens: usize = batches.iter().map(Vec::len).sum();
    let model = Bag::new([("w".into(), Tensor::new(&[1f64], &device())?)])?;
    // The gradient of the mean of w * loss is the mean loss.
    let run = |count: &dyn Fn(&[f64]) -> f64| -> Result<f64> {
        let mut sums = Accumulator::default();
        for batch in &batches {
            let losses = Tensor::from_slice(batch, [batch.len()], &device())?;
            let loss = model.0[0]
                .1
                .get()?
                .mul(&losses)?
                .sum_all()?
                .div(count(batch))?;
            sums.add(&model, &loss.backward()?)?;
        }
        assert_eq!(sums.passes(), 2);
        Ok(floats(&sums.finish(&model)?.gradients["w"])[0])
    };
    let whole = run(&|_| tokens as f64)?;
    close(
        "whole",
        &[whole],
        &flat(&fact["mean_over_all_tokens"]),
        1e-12,
    );
    let of_means = run(&|batch| 2.0 * batch.len() as f64)?;
    close(
        "mean of means",
        &[of_means],
        &flat(&fact["mean_of_means"]),
        1e-12,
    );
    Ok(())
}

#[test]
fn averages_have_the_recorded_values() -> Result<()> {
    let fact = &facts()["ema"];
    let start = fact["start"].as_f64().expect("a number");
    let decay = fact["decay"].as_f64().expect("a number");
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let at = |x: f64| Tensor::full([1], x, dtype, &device());
        let mut model = Bag::new([("w".into(), at(start)?)])?;
        let (mut ema, mut warm) = (
            Ema::new(&model, decay)?,
            Ema::new(&model, decay)?.with_warmup(),
        );
        let mut own = start;
        for (t, (value, expected)) in
            (1u64..).zip(flat(&fact["values"]).iter().zip(flat(&fact["average"])))
        {
            model.set_values(&BTreeMap::from([("w".to_string(), at(*value)?)]))?;
            ema.update(&model)?;
            warm.update(&model)?;
            // These values are exact in bf16, and averages are wider.
            let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-6 };
            close("average", &floats(&ema.values["w"]), &[expected], tolerance);
            let kept = decay.min((1.0 + t as f64) / (10.0 + t as f64));
            own = kept * own + (1.0 - kept) * value;
            close("warm", &floats(&warm.values["w"]), &[own], tolerance);
        }
    }
    assert!(Ema::new(&Bag(vec![]), 1.0).is_err());
    Ok(())
}
