//! Optimizers: against what other systems do, on every mesh alike, and as a whole.

mod accumulation;
mod facts;
mod meshes;
mod rounding;
mod small_facts;
mod steps;

use anymesh_core::{DType, Device, IntoSharding, Mesh, Tensor};
use anymesh_train::{
    Module, Param, Policy, Result, Zero,
    optim::{Optimizer, Sums},
};
use std::collections::{BTreeMap, BTreeSet};

fn device() -> Device {
    anymesh_backend_cpu::device()
}

/// A model that only has parameters.
struct Bag(Vec<(String, Param)>);

impl Module for Bag {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        for (name, p) in &self.0 {
            f(&anymesh_train::join(path, name), p);
        }
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        for (name, p) in &mut self.0 {
            f(&anymesh_train::join(path, name), p);
        }
    }
}

impl Bag {
    fn new(values: impl IntoIterator<Item = (String, Tensor)>) -> Result<Self> {
        let params = values.into_iter().map(|(name, value)| {
            let (place, policy) = (value.sharding().clone(), Policy::all(value.dtype()));
            Ok((
                name.clone(),
                Param::new(name, value, place, policy, Zero::Off)?,
            ))
        });
        Ok(Self(params.collect::<Result<_>>()?))
    }

    fn value(&self, name: &str) -> Vec<f64> {
        let (_, p) = self.0.iter().find(|(n, _)| n == name).expect("is there");
        floats(p.value())
    }
}

/// Gradients of a step, as they are.
fn sums(gradients: BTreeMap<String, Tensor>) -> Sums {
    Sums {
        gradients,
        missing: BTreeSet::new(),
    }
}

fn floats(t: &Tensor) -> Vec<f64> {
    t.cast(DType::F64)
        .expect("a number")
        .to_vec()
        .expect("values")
}

/// Whether numbers are equal up to a part of the largest of them.
#[track_caller]
fn close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let off = |(a, e): (&f64, &f64)| (a - e).abs();
    let worst = actual.iter().zip(expected).map(off).fold(0.0, f64::max);
    assert!(
        worst <= tolerance * size && actual.iter().all(|x| x.is_finite()),
        "{what}: {worst:e} apart of {size:e}\n{actual:?}\n{expected:?}"
    );
}

/// The meshes that everything is held on, with how a matrix may lie on each, and a vector.
const MESHES: [(&str, &[&str], &[&str]); 3] = [
    (
        "dp=2",
        &["[_, _]", "[@dp, _]", "[_, @dp]"],
        &["[_]", "[@dp]"],
    ),
    ("dp=3", &["[@dp, _]", "[_, @dp]"], &["[_]", "[@dp]"]),
    (
        "dp=2, tp=2",
        &[
            "[@dp, @tp]",
            "[@tp, @dp]",
            "[@tp@dp, _]",
            "[_, @dp@tp]",
            "[_, @tp]",
        ],
        &["[@tp]", "[@tp@dp]"],
    ),
];

/// Numbers without a pattern, from -1 to 1.
fn number(seed: usize, at: &[usize]) -> f64 {
    let hash = at.iter().fold(seed.wrapping_mul(0x9e37_79b9) + 1, |h, i| {
        (h ^ (i + 1)).wrapping_mul(0x5851_f42d_4c95_7f2d) ^ (h >> 29)
    });
    (hash >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// A tensor of such numbers in f64.
fn numbers(
    seed: usize,
    dims: &[usize],
    mesh: &Mesh,
    sharding: impl IntoSharding,
) -> Result<Tensor> {
    Ok(Tensor::from_fn(dims, (mesh, sharding), |at| {
        number(seed, at)
    })?)
}

/// Every state of an optimizer as numbers.
fn states(optimizer: &Optimizer) -> BTreeMap<String, Vec<f64>> {
    let all = optimizer.state().into_iter();
    all.map(|(name, t)| (name, floats(&t))).collect()
}
