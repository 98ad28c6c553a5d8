//! DPO and GRPO.

use crate::support::{
    Operand, as_the_formula, facts, integers, log_sum_exp, meshes, near, numbers,
};
use anymesh_core::{DType, Mesh, Tensor};
use anymesh_train::{
    Result,
    objective::{
        Dpo, DpoLoss, Grpo, Pair, Rollout, advantages, dpo, grpo, normalised, sequence_log_probs,
        token_log_probs,
    },
};

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[test]
fn dpo_gives_the_recorded_loss_and_rewards() -> Result<()> {
    let fact = facts("dpo");
    let number = |key: &str| fact[key].as_f64().expect("a number");
    for mesh in meshes() {
        let new = |key: &str| Tensor::from_fn([1], (&mesh, "[@dp?]"), |_| number(key));
        let policy = Pair {
            chosen: &new("policy_chosen")?,
            rejected: &new("policy_rejected")?,
        };
        let reference = Pair {
            chosen: &new("reference_chosen")?,
            rejected: &new("reference_rejected")?,
        };
        let beta = number("beta");
        let found = dpo(
            policy,
            reference,
            &Dpo {
                beta,
                ..Default::default()
            },
        )?;
        near("loss", &found.losses.to_vec()?, &[number("loss")], 1e-12);
        let rewards = [&found.chosen_rewards, &found.rejected_rewards];
        let rewards = rewards.map(|r| r.item().expect("a number").to_f64());
        near("rewards", &rewards, &numbers(&fact["rewards"]), 1e-12);
    }
    Ok(())
}

#[test]
fn dpo_with_smoothing_and_ipo_are_their_formulas() {
    let cases = [
        (DpoLoss::Sigmoid, 0.0),
        (DpoLoss::Sigmoid, 0.3),
        (DpoLoss::Ipo, 0.0),
    ];
    for (loss, smoothing) in cases {
        let options = Dpo {
            beta: 0.4,
            smoothing,
            loss,
        };
        let reference = Operand::mixed(9, &[2, 5], "[_, _]").values;
        as_the_formula(
            &[
                Operand::mixed(7, &[5], "[@dp?]"),
                Operand::mixed(8, &[5], "[@tp?]"),
            ],
            &|mesh, x| {
                let of = |row: usize| {
                    Tensor::from_fn([5], (mesh, "[@dp?]"), |at| reference[row * 5 + at[0]])
                };
                let policy = Pair {
                    chosen: &x[0],
                    rejected: &x[1],
                };
                let reference = Pair {
                    chosen: &of(0)?,
                    rejected: &of(1)?,
                };
                let sum = dpo(policy, reference, &options)?.losses.sum_all()?;
                normalised(&sum, 5.0)
            },
            &|x| {
                let of = |i: usize| {
                    let margin = (x[0][i] - reference[i]) - (x[1][i] - reference[5 + i]);
                    match loss {
                        DpoLoss::Ipo => (margin - 1.0 / (2.0 * 0.4)).powi(2),
                        DpoLoss::Sigmoid => {
                            (1.0 - smoothing) * softplus(-0.4 * margin)
                                + smoothing * softplus(0.4 * margin)
                        }
                    }
                };
                (0..5).map(of).sum::<f64>() / 5.0
            },
        );
    }
}

const LABELS: [i32; 12] = [-100, 2, 4, -100, -100, 1, 0, 3, -100, -100, -100, 0];

/// The log-probability of each label in logits `[12, 5]`, zero where there is none.
fn log_probs(logits: &[f64]) -> Vec<f64> {
    let rows = logits.chunks(5).zip(&LABELS);
    rows.map(|(row, &label)| match label {
        -100 => 0.0,
        label => row[label as usize] - log_sum_exp(row),
    })
    .collect()
}

#[test]
fn sequences_have_the_log_probability_of_their_labels() {
    for sharding in ["[@dp?, _, @tp?]", "[@dp?, @tp?, _]"] {
        as_the_formula(
            &[Operand::mixed(3, &[4, 3, 5], sharding)],
            &|mesh, x| {
                let labels = integers(mesh, &[4, 3], "[@dp?, _]", &LABELS);
                let found = sequence_log_probs(&x[0], &labels)?;
                assert_eq!(found.dims(), [4]);
                // Each weighs differently, so that none can stand for another.
                let weights = Tensor::from_fn([4], mesh, |at| 1.0 + at[0] as f64)?;
                Ok(found.mul(&weights)?.sum_all()?)
            },
            &|x| {
                let weighed = log_probs(&x[0]).into_iter().enumerate();
                weighed.map(|(i, x)| (1 + i / 3) as f64 * x).sum()
            },
        );
    }
}

#[test]
fn grpo_gives_the_recorded_advantages_for_each_group() -> Result<()> {
    let fact = facts("grpo");
    let group = numbers(&fact["rewards_of_one_group"]);
    let expected = numbers(&fact["advantages"]);
    // The recorded group, one of equal rewards, and the recorded one moved and scaled.
    let mut rewards = group.clone();
    rewards.extend([0.25; 4]);
    rewards.extend(group.iter().map(|r| r + 3.0));
    for mesh in meshes() {
        let rewards = Tensor::from_fn([12], (&mesh, "[@dp?]"), |at| rewards[at[0]])?;
        let found = advantages(&rewards, 4)?.to_vec::<f64>()?;
        near("recorded", &found[..4], &expected, 1e-12);
        assert_eq!(found[4..8], [0.0; 4]);
        near("moved", &found[8..], &expected, 1e-11);
    }
    Ok(())
}

/// One term of the loss by hand, the distance from the reference, and whether it was clipped.
fn token([now, old, reference, advantage]: [f64; 4], options: &Grpo) -> (f64, f64, bool) {
    let ratio = (now - old).exp();
    let held = ratio.clamp(1.0 - options.clip.0, 1.0 + options.clip.1);
    let away = reference - now;
    let distance = away.exp() - away - 1.0;
    let worth = (ratio * advantage).min(held * advantage);
    let clipped = held * advantage < ratio * advantage;
    (options.kl * distance - worth, distance, clipped)
}

#[test]
fn grpo_clips_and_keeps_its_distance_and_ignores_what_is_masked() -> Result<()> {
    let options = Grpo {
        clip: (0.2, 0.3),
        kl: 0.05,
    };
    let given = [0.7, -1.3, 0.1, 0.5];
    let count = LABELS.iter().filter(|l| **l >= 0).count();
    let scaled = |seed, by: f64| -> Vec<f64> {
        let mixed = Operand::mixed(seed, &[60], "[_]").values;
        mixed.into_iter().map(|x| x * by).collect()
    };
    // Near enough to be clipped here and there, on both sides.
    let (old, reference) = (log_probs(&scaled(3, 0.8)), log_probs(&scaled(5, 1.0)));
    let logits = Operand::mixed(3, &[4, 3, 5], "[@dp?, _, @tp?]");
    let mask: Vec<i32> = LABELS.map(|l| i32::from(l >= 0)).to_vec();
    // What is masked may be anything, also what gives no number.
    let mut spoilt = old.clone();
    spoilt[0] = f64::NEG_INFINITY;
    spoilt[3] = f64::NAN;
    let of = |mesh: &Mesh, values: &[f64]| {
        Tensor::from_fn([4, 3], (mesh, "[@dp?, _]"), |at| values[at[0] * 3 + at[1]])
    };
    let loss = |mesh: &Mesh, x: &[Tensor]| -> Result<_> {
        let labels = integers(mesh, &[4, 3], "[@dp?, _]", &LABELS);
        let mask = integers(mesh, &[4, 3], "[@dp?, _]", &mask).cast(DType::Bool)?;
        let rollout = Rollout {
            old: Some(&of(mesh, &spoilt)?),
            reference: Some(&of(mesh, &reference)?),
            advantages: &Tensor::from_fn([4], (mesh, "[@dp?]"), |at| given[at[0]])?,
            mask: &mask,
        };
        grpo(&token_log_probs(&x[0], &labels)?, &rollout, &options)
    };
    let terms = |logits: &[f64]| -> Vec<(f64, f64, bool)> {
        let now = log_probs(logits);
        let counted = (0..12).filter(|i| LABELS[*i] >= 0);
        counted
            .map(|i| token([now[i], old[i], reference[i], given[i / 3]], &options))
            .collect()
    };
    as_the_formula(
        &[logits.clone()],
        &|mesh, x| normalised(&loss(mesh, x)?.sum, count as f64),
        &|x| terms(&x[0]).iter().map(|t| t.0).sum::<f64>() / count as f64,
    );
    let expected = terms(&logits.values);
    let clipped = expected.iter().filter(|t| t.2).count();
    assert!(clipped > 0 && clipped < count, "{clipped} of {count}");
    for mesh in meshes() {
        let x = Tensor::from_fn([4, 3, 5], (&mesh, logits.sharding), |at| {
            logits.values[(at[0] * 3 + at[1]) * 5 + at[2]]
        })?;
        let found = loss(&mesh, &[x])?;
        let distance: f64 = expected.iter().map(|t| t.1).sum();
        near("distance", &found.kl.to_vec()?, &[distance], 1e-12);
        assert_eq!(found.clipped.item()?.to_f64(), clipped as f64);
    }
    Ok(())
}

#[test]
fn the_first_step_of_grpo_needs_no_old_policy() -> Result<()> {
    // Ratios are one and have the slope of the log-probabilities: the plain policy gradient.
    let device = anymesh_backend_cpu::device();
    let now = Tensor::new(&[[-1.0, -2.0], [-0.5, -3.0]], &device)?.require_grad()?;
    let rollout = Rollout {
        old: None,
        reference: None,
        advantages: &Tensor::new(&[2.0, -1.0], &device)?,
        mask: &Tensor::new(&[[true, true], [true, false]], &device)?,
    };
    let found = grpo(&now, &rollout, &Grpo::default())?;
    assert_eq!(found.sum.item()?.to_f64(), -3.0);
    assert_eq!(found.kl.item()?.to_f64(), 0.0);
    let gradient = found.sum.backward()?.of(&now)?;
    assert_eq!(gradient.to_vec::<f64>()?, [-2.0, -2.0, 1.0, 0.0]);
    Ok(())
}
