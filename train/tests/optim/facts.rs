//! Three steps of each optimizer, as torch, optax and lion-pytorch take them.

use super::{close, device, floats};
use anymesh_core::{DType, Tensor};
use anymesh_train::{
    Result,
    optim::{Adafactor, AdamW, Adjust, Lion, Muon, Rule, Sgd, Step, newton_schulz},
};
use serde_json::Value;

pub(crate) fn facts() -> Value {
    let text = include_str!("../facts/optimizers.json");
    serde_json::from_str(text).expect("the facts are JSON")
}

/// The numbers of nested lists, in order.
pub(crate) fn flat(v: &Value) -> Vec<f64> {
    match v {
        Value::Array(all) => all.iter().flat_map(flat).collect(),
        other => vec![other.as_f64().expect("a number")],
    }
}

fn shape(v: &Value) -> Vec<usize> {
    match v {
        Value::Array(all) => [vec![all.len()], shape(&all[0])].concat(),
        _ => vec![],
    }
}

pub(crate) fn tensor(v: &Value, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::from_slice(&flat(v), shape(v), &device())?.cast(dtype)?)
}

/// The rule that a row is of. Every setting that the row names is set from it.
fn rule(row: &Value) -> Rule {
    let (name, hyper) = (row["name"].as_str().expect("a name"), &row["hyper"]);
    let number = |key: &str, default: f64| hyper[key].as_f64().unwrap_or(default);
    let truth = |key: &str| hyper[key].as_bool().unwrap_or(false);
    let (lr, decay) = (number("lr", f64::NAN), number("weight_decay", 0.0));
    let betas = match hyper["betas"].as_array() {
        Some(_) => flat(&hyper["betas"]),
        None => vec![number("b1", f64::NAN), number("b2", f64::NAN)],
    };
    let known: &[&str] = match name.split('_').next() {
        Some("sgd") => &["lr", "weight_decay", "momentum", "dampening", "nesterov"],
        Some("adam" | "adamw") => &[
            "lr",
            "weight_decay",
            "betas",
            "b1",
            "b2",
            "eps",
            "eps_root",
            "amsgrad",
        ],
        Some("lion") => &["lr", "weight_decay", "betas", "b1", "b2"],
        Some("adafactor") => &["lr", "weight_decay", "beta2_decay", "eps", "d"],
        _ => &[
            "lr",
            "weight_decay",
            "momentum",
            "beta",
            "nesterov",
            "ns_coefficients",
            "ns_coeffs",
            "ns_steps",
            "eps",
            "adjust_lr_fn",
        ],
    };
    for key in hyper.as_object().expect("settings").keys() {
        assert!(
            known.contains(&key.as_str()),
            "{name}: {key} is not expressed"
        );
    }
    match name.split('_').next() {
        Some("sgd") => Rule::Sgd(Sgd {
            lr,
            decay,
            momentum: number("momentum", 0.0),
            dampening: number("dampening", 0.0),
            nesterov: truth("nesterov"),
        }),
        Some("adam" | "adamw") => Rule::AdamW(AdamW {
            lr,
            decay,
            betas: [betas[0], betas[1]],
            eps: number("eps", f64::NAN),
            eps_root: number("eps_root", 0.0),
            coupled: name == "adam_l2",
            amsgrad: truth("amsgrad"),
        }),
        Some("lion") => Rule::Lion(Lion {
            lr,
            decay,
            betas: [betas[0], betas[1]],
        }),
        Some("adafactor") => Rule::Adafactor(Adafactor {
            lr,
            decay,
            beta2_decay: number("beta2_decay", f64::NAN),
            eps1: hyper["eps"][0].as_f64(),
            eps2: hyper["eps"][1].as_f64().expect("a number"),
            d: number("d", f64::NAN),
            ..Adafactor::default()
        }),
        _ => {
            let optax = name == "muon_optax";
            let coefficients = flat(
                &hyper[if optax {
                    "ns_coeffs"
                } else {
                    "ns_coefficients"
                }],
            );
            Rule::Muon(Muon {
                lr,
                decay,
                momentum: number(if optax { "beta" } else { "momentum" }, f64::NAN),
                nesterov: truth("nesterov"),
                bias_correction: optax,
                coefficients: [coefficients[0], coefficients[1], coefficients[2]],
                steps: hyper["ns_steps"].as_u64().expect("a count") as usize,
                eps: number("eps", f64::NAN),
                add_eps: optax,
                adjust: match hyper["adjust_lr_fn"].as_str() {
                    Some("match_rms_adamw") => Adjust::MatchRmsAdamw,
                    Some("spectral_unclamped") => Adjust::SpectralUnclamped,
                    _ => Adjust::Original,
                },
                bf16: name == "muon_torch_bf16",
            })
        }
    }
}

/// What the row calls a state.
fn recorded(state: &str) -> &'static str {
    match state {
        "sgd.momentum" | "muon.momentum" => "momentum_buffer",
        "adam.m" | "lion.m" => "exp_avg",
        "adam.v" => "exp_avg_sq",
        "adam.v_max" => "max_exp_avg_sq",
        "adafactor.v" => "variance",
        "adafactor.rows" => "row_var",
        "adafactor.columns" => "col_var",
        other => panic!("{other} is in no row"),
    }
}

/// The values after each step of a row, and what they should be.
fn run(row: &Value, rule: &Rule, dtype: DType, tolerance: f64) -> Result<Vec<Vec<f64>>> {
    let name = row["name"].as_str().expect("a name");
    // optax keeps weights [in, out]; ours are [out, in].
    let turned = |t: Tensor| -> Result<Tensor> {
        match name == "muon_optax" {
            true => Ok(t.transpose(0, 1)?.contiguous()?),
            false => Ok(t),
        }
    };
    rule.check("rule")?;
    let mut value = turned(tensor(&row["param"], dtype)?)?;
    let (names, mut state): (Vec<_>, Vec<_>) = rule.state(&value)?.into_iter().unzip();
    let mut values = vec![];
    let (gradients, steps) = (row["grads"].as_array(), row["steps"].as_array());
    let pairs = gradients
        .expect("gradients")
        .iter()
        .zip(steps.expect("steps"));
    for (i, (gradient, after)) in pairs.enumerate() {
        let gradient = turned(tensor(gradient, dtype)?)?;
        let step = Step::new(i as u64 + 1, rule.lr());
        (value, state) = rule.update(&step, &value, &gradient, &state)?;
        assert_eq!(value.dtype(), dtype);
        let what = format!("{name} in {dtype}, step {}", i + 1);
        let expected = floats(&turned(tensor(&after["param"], DType::F64)?)?);
        if tolerance > 0.0 {
            close(&what, &floats(&value), &expected, tolerance);
            for (kind, tensor) in names.iter().zip(&state) {
                if let Some(recorded) = after.get(recorded(kind)) {
                    let what = format!("{what}, {kind}");
                    close(&what, &floats(tensor), &flat(recorded), tolerance);
                }
            }
        }
        values.push(floats(&value));
    }
    Ok(values)
}

#[test]
fn every_recorded_optimizer_takes_the_same_steps() -> Result<()> {
    let facts = facts();
    let rows = facts["optimizers"].as_array().expect("rows");
    let (mut in_f64, mut in_f32) = (0, 0);
    for row in rows {
        let name = row["name"].as_str().expect("a name");
        match (name, row["dtype"].as_str()) {
            // Has a test beside the rule: optax's averages have weights in f32.
            ("adafactor_optax", _) => continue,
            // Below.
            ("muon_torch_bf16", _) => continue,
            (_, Some("float64")) => {
                run(row, &rule(row), DType::F64, 1e-12)?;
                in_f64 += 1;
            }
            _ => {}
        }
        run(row, &rule(row), DType::F32, 1e-6)?;
        in_f32 += 1;
    }
    assert_eq!((rows.len(), in_f64, in_f32), (25, 22, 23));
    Ok(())
}

/// torch's Newton-Schulz rounds to bf16 whatever the parameter is; ours does when asked to.
#[test]
fn muon_in_bf16_is_as_near_as_torch() -> Result<()> {
    let facts = facts();
    let rows = facts["optimizers"].as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|r| r["name"] == name).expect("is there");
    let values = run(
        row("muon_torch_bf16"),
        &rule(row("muon_torch_bf16")),
        DType::F32,
        0.0,
    )?;
    let steps = row("muon_torch_bf16")["steps"].as_array().expect("steps");
    let apart = |a: &[f64], b: &[f64]| {
        let each = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        each.fold(0.0, f64::max)
    };
    for (value, step) in values.iter().zip(steps) {
        assert!(apart(value, &flat(&step["param"])) < 2e-3);
    }
    let recorded = &facts["muon_max_difference_of_torch_bf16_from_f64"];
    for (case, theirs) in recorded.as_object().expect("cases") {
        let row = row(&format!("muon_{case}"));
        let Rule::Muon(muon) = rule(row) else {
            panic!("{case} is Muon")
        };
        let rounded = Rule::Muon(Muon { bf16: true, ..muon });
        let values = run(row, &rounded, DType::F32, 0.0)?;
        let steps = row["steps"].as_array().expect("steps").iter();
        for ((value, step), theirs) in values.iter().zip(steps).zip(flat(theirs)) {
            let ours = apart(value, &flat(&step["param"]));
            // The same rounding in another order: of the same size, and there at all.
            assert!(
                ours < 2.0 * theirs && ours > 0.1 * theirs,
                "{case}: {ours:e} against {theirs:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn newton_schulz_gives_the_recorded_matrix() -> Result<()> {
    let fact = &facts()["newton_schulz"];
    let settings = Muon::default();
    assert_eq!(settings.coefficients.to_vec(), flat(&fact["coefficients"]));
    assert_eq!(
        settings.steps as u64,
        fact["steps"].as_u64().expect("a count")
    );
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6)] {
        let input = tensor(&fact["input"], dtype)?.unsqueeze(0)?;
        // Both sides of the choice of the smaller product, and a stack.
        let output = newton_schulz(&input, &settings)?;
        let turned = newton_schulz(&input.transpose(-1, -2)?, &settings)?.transpose(-1, -2)?;
        let stacked = Tensor::stack(&[&input.squeeze(&[0])?, &output.squeeze(&[0])?], 0)?;
        let stacked = newton_schulz(&stacked, &settings)?.narrow(0, 0, 1)?;
        for (what, x) in [("wide", &output), ("tall", &turned), ("stack", &stacked)] {
            close(what, &floats(x), &flat(&fact["output_f64"]), tolerance);
        }
        // The squares of the singular values add up to that of the norm.
        let squares = flat(&fact["singular_values_out"])
            .iter()
            .map(|s| s * s)
            .sum::<f64>();
        let norm = output.square()?.sum_all()?.item()?.to_f64();
        assert!((norm - squares).abs() < tolerance * 10.0 * squares);
    }
    Ok(())
}
