//! Gradients of micro-batches: added up by passes themselves, or after them.

use super::{close, device, floats};
use anymesh_core::{DType, Mesh, Tensor, ops::Rng};
use anymesh_train::{
    Build, Init, Module, Policy, Result,
    nn::{Activation, Linear, Mlp},
    optim::Accumulator,
};

fn model(b: &Build) -> Result<Mlp> {
    Mlp::new(
        b,
        [6, 10],
        true,
        Activation::Gelu,
        Init::Normal(0.5),
        Init::Normal(0.5),
    )
}

fn batch(i: u64, place: impl Into<anymesh_core::Place>, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::normal(
        [2, 4, 6],
        0.0,
        1.0,
        dtype,
        place,
        Rng::new(7 + i),
    )?)
}

/// The sums of three micro-batches, by passes that add and by adding what passes found.
fn both(b: &Build) -> Result<[Vec<(String, Tensor)>; 2]> {
    let model = model(b)?;
    let mut sums = [Accumulator::default(), Accumulator::default()];
    for i in 0..3 {
        let x = batch(i, b.mesh(), b.policy().compute)?;
        let loss = || -> Result<Tensor> { Ok(model.forward(&x)?.square()?.sum_all()?) };
        sums[0].backward(&model, &loss()?)?;
        sums[1].add(&model, &loss()?.backward()?)?;
    }
    assert_eq!(sums[0].passes(), 3);
    let [a, b] = &mut sums;
    Ok([a.finish(&model)?, b.finish(&model)?].map(|s| s.gradients.into_iter().collect()))
}

#[test]
fn sums_of_f32_are_the_same_to_the_bit_either_way() -> Result<()> {
    let mesh = Mesh::new("dp=2", &device())?;
    for b in [
        Build::new(&device(), Policy::f32(), 3),
        Build::new(&mesh, Policy::f32(), 3),
    ] {
        let [added, apart] = both(&b)?;
        assert_eq!(added.len(), apart.len());
        for ((name, a), (_, b)) in added.iter().zip(&apart) {
            assert_eq!(floats(a), floats(b), "{name}");
        }
    }
    Ok(())
}

#[test]
fn what_is_added_by_the_pass_is_not_rounded_to_16_bits_before() -> Result<()> {
    let b = Build::new(&device(), Policy::bf16(), 3);
    let [added, apart] = both(&b)?;
    for ((name, a), (_, b)) in added.iter().zip(&apart) {
        assert_eq!(a.dtype(), DType::F32, "{name}");
        close(name, &floats(a), &floats(b), 0.02);
    }
    // 256 and 1 in one pass each: the second is added to a sum that has room for it.
    let layer = Linear::new(&b, [1, 1], "[_, _]", Init::Ones)?;
    let mut sums = Accumulator::default();
    for value in [256.0, 1.0, 0.00390625] {
        let x = Tensor::full([1, 1], value, DType::BF16, &device())?;
        sums.backward(&layer, &layer.forward(&x)?.sum_all()?)?;
    }
    let sums = sums.finish(&layer)?;
    assert_eq!(floats(&sums.gradients["weight"]), [257.00390625]);
    Ok(())
}

#[test]
fn a_weight_that_is_used_twice_is_added_once() -> Result<()> {
    let b = Build::new(&device(), Policy::f32(), 3);
    let layer = Linear::new(&b, [2, 2], "[_, _]", Init::Ones)?;
    let mut sums = Accumulator::default();
    for _ in 0..2 {
        let x = Tensor::ones([1, 2], DType::F32, &device())?;
        let loss = layer.forward(&layer.forward(&x)?)?.sum_all()?;
        sums.backward(&layer, &loss)?;
    }
    // Once with inputs of 2, once with outputs that count twice.
    assert_eq!(floats(&sums.finish(&layer)?.gradients["weight"]), [8.0; 4]);
    Ok(())
}

#[test]
fn passes_on_which_a_parameter_does_not_depend_leave_its_sum() -> Result<()> {
    let b = Build::new(&device(), Policy::f32(), 3);
    let pair = vec![
        Linear::new(&b.at("0"), [1, 1], "[_, _]", Init::Ones)?,
        Linear::new(&b.at("1"), [1, 1], "[_, _]", Init::Ones)?,
    ];
    let mut sums = Accumulator::default();
    let x = Tensor::full([1, 1], 3.0, DType::F32, &device())?;
    for used in [0, 1, 0] {
        sums.backward(&pair, &pair[used].forward(&x)?.sum_all()?)?;
    }
    let sums = sums.finish(&pair)?;
    let mut names = vec![];
    pair.visit("", &mut |name, _| names.push(name.to_string()));
    let found: Vec<f64> = (names.iter())
        .flat_map(|name| floats(&sums.gradients[name]))
        .collect();
    assert_eq!(found, [6.0, 3.0]);
    Ok(())
}
