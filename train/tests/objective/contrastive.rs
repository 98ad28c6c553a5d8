//! InfoNCE and Matryoshka.

use crate::support::{Operand, as_the_formula, facts, log_sum_exp, near, numbers, on_every_mesh};
use anymesh_train::objective::{Contrastive, Prefix, Temperature, contrastive, matryoshka};
use serde_json::Value;

/// The queries and passages of the facts, in a layout each.
fn operands(fact: &Value, layouts: [&'static str; 2]) -> [Operand; 2] {
    let of = |key: &str, sharding| Operand::new(numbers(&fact[key]), &[4, 3], sharding);
    [of("queries", layouts[0]), of("passages", layouts[1])]
}

const LAYOUTS: [[&str; 2]; 3] = [
    ["[@dp?, _]", "[@dp?, _]"],
    ["[@dp?, @tp?]", "[@dp?, @tp?]"],
    ["[@dp?, _]", "[@tp?, _]"],
];

fn options(fact: &Value) -> Contrastive {
    Contrastive {
        temperature: Temperature::Constant(fact["temperature"].as_f64().expect("a number")),
        ..Default::default()
    }
}

#[test]
fn the_recorded_loss_and_gradients_on_every_mesh_and_layout() {
    let fact = facts("contrastive");
    for layouts in LAYOUTS {
        for chunk in [None, Some(1), Some(3)] {
            let options = Contrastive {
                chunk,
                ..options(&fact)
            };
            let (loss, gradients) = on_every_mesh(&operands(&fact, layouts), &|_, x| {
                contrastive(&x[0], &x[1], &options)
            });
            near("loss", &[loss], &numbers(&fact["loss"]), 1e-12);
            near(
                "queries",
                &gradients[0],
                &numbers(&fact["grad_queries"]),
                1e-12,
            );
            near(
                "passages",
                &gradients[1],
                &numbers(&fact["grad_passages"]),
                1e-12,
            );
            // What training without gradients of remote passages would give is far off.
            let wrong = &fact["two_ranks_detached_negatives_wrong"];
            let apart = numbers(&wrong["grad_passages"]).into_iter();
            let apart = apart.zip(&gradients[1]).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f64::max) > 0.08);
        }
    }
}

#[test]
fn the_halves_of_the_batch_have_the_recorded_losses_against_all_passages() {
    // Rows do not influence each other's loss: the mean of the halves' is the whole.
    let fact = facts("contrastive");
    let local = numbers(&fact["two_ranks_gather_with_gradient"]["local_losses"]);
    near(
        "mean",
        &[(local[0] + local[1]) / 2.0],
        &numbers(&fact["loss"]),
        1e-12,
    );
}

#[test]
fn prefixes_have_the_recorded_loss_and_gradients() {
    let fact = facts("contrastive");
    let expected = &fact["matryoshka_dims_1_2_3"];
    for layouts in LAYOUTS {
        let (loss, gradients) = on_every_mesh(&operands(&fact, layouts), &|_, x| {
            matryoshka(&x[0], &x[1], &Prefix::all(&[1, 2, 3]), &options(&fact))
        });
        near("loss", &[loss], &numbers(&expected["loss"]), 1e-12);
        near(
            "queries",
            &gradients[0],
            &numbers(&expected["grad_queries"]),
            1e-12,
        );
    }
}

/// Vectors of `width` values.
fn rows(values: &[f64], width: usize) -> Vec<&[f64]> {
    values.chunks(width).collect()
}

/// InfoNCE by loops, on the first `prefix` of `width` values.
fn info_nce(
    [queries, passages]: [&[f64]; 2],
    [width, prefix, group]: [usize; 3],
    temperature: f64,
    symmetric: bool,
) -> f64 {
    let unit = |row: &[f64]| -> Vec<f64> {
        let norm = row[..prefix].iter().map(|x| x * x).sum::<f64>().sqrt();
        row[..prefix].iter().map(|x| x / norm).collect()
    };
    let units = |x| rows(x, width).into_iter().map(unit).collect::<Vec<_>>();
    let (q, p) = (units(queries), units(passages));
    let score =
        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / temperature;
    let (mut forth, mut back) = (0.0, 0.0);
    for i in 0..q.len() {
        let scores: Vec<f64> = p.iter().map(|p| score(&q[i], p)).collect();
        forth += log_sum_exp(&scores) - scores[i * group];
        let scores: Vec<f64> = q.iter().map(|q| score(q, &p[i * group])).collect();
        back += log_sum_exp(&scores) - scores[i];
    }
    let mean = match symmetric {
        true => (forth + back) / 2.0,
        false => forth,
    };
    mean / q.len() as f64
}

#[test]
fn groups_both_directions_weights_and_a_learned_temperature_are_the_formula() {
    for (group, symmetric, chunk) in [(3, false, None), (1, true, None), (2, true, Some(2))] {
        let operands = [
            Operand::mixed(1, &[5, 4], "[@dp?, _]"),
            Operand::mixed(2, &[5 * group, 4], "[@dp?, @tp?]"),
            Operand::new(vec![-0.7], &[], "[]"),
        ];
        let prefixes = [(2, 0.5), (4, 1.0)].map(|(width, weight)| Prefix { width, weight });
        as_the_formula(
            &operands,
            &|_, x| {
                let options = Contrastive {
                    temperature: Temperature::Learned(x[2].clone()),
                    group,
                    symmetric,
                    chunk,
                };
                matryoshka(&x[0], &x[1], &prefixes, &options)
            },
            &|x| {
                let of = |Prefix { width, weight }: Prefix| {
                    let sizes = [4, width, group];
                    weight * info_nce([&x[0], &x[1]], sizes, x[2][0].exp(), symmetric)
                };
                prefixes.map(of).iter().sum()
            },
        );
    }
}
