//! Language modelling, classification, regression, and what sums are divided by.

use crate::support::{
    Operand, as_the_formula, facts, integers, log_sum_exp, meshes, near, numbers, on_every_mesh,
};
use anymesh_core::{DType, Mesh, Tensor, bf16, meta, ops::Rng, spmd::Ledger};
use anymesh_train::{
    Result,
    objective::{
        Classification, Language, classification, label_weight, language, language_in_chunks,
        normalised, regression, valid_labels,
    },
};

const LABELS: [i32; 12] = [2, -100, 0, 4, 1, 1, -100, 3, 0, 2, 4, -100];

fn labels(mesh: &Mesh) -> Tensor {
    integers(mesh, &[4, 3], "[@dp?, _]", &LABELS)
}

/// The sum that [`language`] is to give for logits `[12, 5]`.
fn sum_of(logits: &[f64], weight: &[f64], smoothing: f64, z: f64) -> f64 {
    let classes = weight.len();
    let mut sum = 0.0;
    for (row, &label) in logits.chunks(classes).zip(&LABELS) {
        if label < 0 {
            continue;
        }
        let lse = log_sum_exp(row);
        let label = label as usize;
        let spread: f64 = row.iter().zip(weight).map(|(x, w)| w * (lse - x)).sum();
        sum += (1.0 - smoothing) * weight[label] * (lse - row[label])
            + smoothing / classes as f64 * spread
            + z * lse * lse;
    }
    sum
}

#[test]
fn the_sum_over_labels_is_the_formula_with_and_without_smoothing_and_z_loss() {
    for sharding in ["[@dp?, _, @tp?]", "[@dp?, @tp?, _]", "[@tp?, _, _]"] {
        for (smoothing, z_loss) in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.01)] {
            let options = Language {
                smoothing,
                z_loss,
                output: DType::F64,
            };
            as_the_formula(
                &[Operand::mixed(1, &[4, 3, 5], sharding)],
                &|mesh, x| language(&x[0], &labels(mesh), &options),
                &|x| sum_of(&x[0], &[1.0; 5], smoothing, z_loss),
            );
        }
    }
}

#[test]
fn however_positions_are_cut_logits_stay_where_they_are() -> Result<()> {
    let mesh = Mesh::new("dp=2, cp=2", &anymesh_backend_cpu::device())?;
    for (batch, sharding) in [(4, "[@dp, _, _]"), (4, "[@dp, @cp, _]"), (3, "[@dp, _, _]")] {
        let positions = sharding.replace(", _]", "]");
        let logits = Tensor::zeros([batch, 6, 8], DType::F32, (&mesh, sharding))?;
        let labels = Tensor::zeros([batch, 6], DType::I32, (&mesh, positions.as_str()))?;
        let logits = logits.require_grad()?;
        let (outcome, ledger) = Ledger::record(|| -> Result<_> {
            Ok(language(&logits, &labels, &Language::default())?.backward()?)
        });
        assert_eq!(outcome?.partial(&logits)?.sharding(), logits.sharding());
        assert_eq!(ledger.bytes(), 0, "{batch}, {sharding}: {ledger}");
    }
    Ok(())
}

#[test]
fn chunks_give_the_same_sum_and_gradients_however_they_divide() {
    let hidden = Operand::mixed(2, &[4, 3, 6], "[@dp?, @tp?, _]");
    let head = Operand::mixed(3, &[5, 6], "[@tp?, _]");
    let options = Language {
        smoothing: 0.1,
        z_loss: 0.01,
        output: DType::F64,
    };
    let operands = [hidden, head];
    let whole = on_every_mesh(&operands, &|mesh, x| {
        language(&x[0].linear(&x[1], None)?, &labels(mesh), &options)
    });
    for chunk in [1, 2, 3, 100] {
        let found = on_every_mesh(&operands, &|mesh, x| {
            let weight = x[1].clone();
            let head = move |h: &Tensor| Ok(h.linear(&weight, None)?);
            language_in_chunks(&x[0], &labels(mesh), head, chunk, &options)
        });
        near("loss", &[found.0], &[whole.0], 1e-12);
        for (found, whole) in found.1.iter().zip(&whole.1) {
            near(&format!("chunks of {chunk}"), found, whole, 1e-12);
        }
    }
}

#[test]
fn chunks_of_a_cut_sequence_move_nothing() -> Result<()> {
    let mesh = Mesh::new("dp=2, cp=4", &anymesh_backend_cpu::device())?;
    let place = (&mesh, "[@dp, @cp, _]");
    let hidden = Tensor::normal([2, 32, 8], 0.0, 1.0, DType::F32, place, Rng::new(1))?;
    let weight = Tensor::normal([64, 8], 0.0, 1.0, DType::F32, &mesh, Rng::new(2))?;
    let labels = Tensor::from_fn([2, 32], (&mesh, "[@dp, @cp]"), |at| at[1] as i32)?;
    let (hidden, weight) = (hidden.require_grad()?, weight.require_grad()?);
    let (outcome, ledger) = Ledger::record(|| -> Result<_> {
        let weight = weight.clone();
        let head = move |h: &Tensor| Ok(h.linear(&weight, None)?);
        let sum = language_in_chunks(&hidden, &labels, head, 8, &Language::default())?;
        Ok(sum.backward()?)
    });
    outcome?;
    assert_eq!(ledger.bytes(), 0, "{ledger}");
    Ok(())
}

#[test]
fn chunks_hold_the_logits_of_one_chunk() -> Result<()> {
    let device = meta().decorated(|backend, kernel| backend.launch(kernel));
    let (batch, sequence, width, tokens) = (4, 512, 64, 32_000);
    let peak = |chunk: Option<usize>| -> Result<u64> {
        let hidden =
            Tensor::zeros([batch, sequence, width], DType::F32, &device)?.require_grad()?;
        let weight = Tensor::zeros([tokens, width], DType::F32, &device)?.require_grad()?;
        let labels = Tensor::zeros([batch, sequence], DType::I32, &device)?;
        let before = device.memory().in_use;
        device.reset_peak();
        let options = Language::default();
        let sum = match chunk {
            None => language(&hidden.linear(&weight, None)?, &labels, &options)?,
            Some(chunk) => {
                let weight = weight.clone();
                let head = move |h: &Tensor| Ok(h.linear(&weight, None)?);
                language_in_chunks(&hidden, &labels, head, chunk, &options)?
            }
        };
        let _gradients = sum.backward()?;
        Ok(device.memory().peak - before)
    };
    let logits = |positions: usize| (batch * positions * tokens * 4) as u64;
    let (whole, chunked) = (peak(None)?, peak(Some(16))?);
    // Logits and their gradient, and the gradients of both operands.
    let others = 4 * (2 * tokens * width + 4 * batch * sequence * width) as u64;
    println!("whole {whole}, in chunks {chunked}, of which {others} are not logits");
    assert!(whole >= 2 * logits(sequence));
    assert!(chunked <= 2 * logits(16) + others, "{chunked}");
    assert!(chunked * 10 < whole);
    Ok(())
}

#[test]
fn losses_of_small_floats_are_f32_and_are_widened_on_demand() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let logits = Tensor::from_fn([2, 3], &device, |at| bf16::from_f32(at[1] as f32))?;
    let labels = Tensor::new(&[0, 2], &device)?;
    let mut options = Language::default();
    let sum = language(&logits.require_grad()?, &labels, &options)?;
    assert_eq!(sum.dtype(), DType::F32);
    options.output = DType::F64;
    let wide = language(&logits, &labels, &options)?;
    let lse = log_sum_exp(&[0.0, 1.0, 2.0]);
    near("sum", &wide.to_vec::<f64>()?, &[2.0 * lse - 2.0], 1e-12);
    Ok(())
}

#[test]
fn classes_have_weights_and_tokens_are_classified_as_sequences_are() -> Result<()> {
    let weight = [0.5, 2.0, 1.0, 0.25, 3.0];
    for (shape, cut) in [
        (&[12, 5][..], "[@dp?, @tp?]"),
        (&[4, 3, 5], "[@dp?, _, @tp?]"),
    ] {
        for smoothing in [0.0, 0.2] {
            let options = |mesh: &Mesh| Classification {
                weight: Some(Tensor::from_fn([5], mesh, |at| weight[at[0]]).expect("weights")),
                smoothing,
            };
            let of = |mesh: &Mesh| match shape.len() {
                2 => integers(mesh, &[12], "[@dp?]", &LABELS),
                _ => labels(mesh),
            };
            as_the_formula(
                &[Operand::mixed(4, shape, cut)],
                &|mesh, x| classification(&x[0], &of(mesh), &options(mesh)),
                &|x| sum_of(&x[0], &weight, smoothing, 0.0),
            );
            let counted = LABELS.iter().filter(|l| **l >= 0);
            let total: f64 = counted.map(|l| weight[*l as usize]).sum();
            for mesh in meshes() {
                assert_eq!(label_weight(&of(&mesh), &options(&mesh))?, total);
                let plain = Classification::default();
                assert_eq!(label_weight(&of(&mesh), &plain)?, 9.0);
                assert_eq!(valid_labels(&of(&mesh))?, 9);
            }
        }
    }
    Ok(())
}

#[test]
fn regression_is_the_sum_of_squares() {
    as_the_formula(
        &[
            Operand::mixed(5, &[4, 3], "[@dp?, @tp?]"),
            Operand::mixed(6, &[4, 3], "[@tp?, _]"),
        ],
        &|_, x| regression(&x[0], &x[1]),
        &|x| x[0].iter().zip(&x[1]).map(|(a, b)| (a - b) * (a - b)).sum(),
    );
}

#[test]
fn micro_batches_are_divided_by_the_count_of_the_global_batch() -> Result<()> {
    let fact = facts("accumulation");
    let device = anymesh_backend_cpu::device();
    let micro = fact["token_losses_of_two_micro_batches"].as_array();
    let micro: Vec<Vec<f64>> = micro.expect("two").iter().map(numbers).collect();
    let count: usize = micro.iter().map(Vec::len).sum();
    // Of two tokens, the logit of the other that gives this loss.
    let logit = |loss: f64| loss.exp_m1().ln();
    let mut found = 0.0;
    for losses in &micro {
        let values: Vec<f64> = losses.iter().flat_map(|loss| [0.0, logit(*loss)]).collect();
        let logits = Tensor::from_slice(&values, [losses.len(), 2], &device)?;
        let labels = Tensor::zeros([losses.len()], DType::I32, &device)?;
        let sum = language(&logits, &labels, &Language::default())?;
        found += normalised(&sum, count as f64)?.item()?.to_f64();
    }
    let expected = fact["mean_over_all_tokens"].as_f64().expect("a mean");
    near("the mean", &[found], &[expected], 1e-12);
    Ok(())
}
