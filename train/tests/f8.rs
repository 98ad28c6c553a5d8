//! Linear layers that multiply 8-bit floats: how far they are from exact ones, on every mesh alike, and
//! whether models learn with them.

use anymesh_core::{DType, Device, Mesh, Tensor, ops::Rng};
use anymesh_train::{
    Build, Init, Module, Policy, Result, Zero,
    nn::{Activation, Linear, Mlp, linear_f8},
    optim::{Accumulator, AdamW, Groups, Optimizer, Rule},
};

fn device() -> Device {
    anymesh_backend_cpu::device()
}

fn normal(shape: &[usize], stream: u64) -> Result<Tensor> {
    Ok(Tensor::normal(
        shape,
        0.0,
        1.0,
        DType::F32,
        &device(),
        Rng::new(stream),
    )?)
}

fn floats(t: &Tensor) -> Result<Vec<f64>> {
    Ok(t.full_tensor()?.cast(DType::F64)?.to_vec()?)
}

/// The root of the mean square of a difference, in parts of that of the values.
fn off(found: &Tensor, exact: &Tensor) -> Result<f64> {
    let (found, exact) = (floats(found)?, floats(exact)?);
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let apart = squares(&mut found.iter().zip(&exact).map(|(a, b)| a - b));
    Ok((apart / squares(&mut exact.iter().copied())).sqrt())
}

/// Codes of 4 significant bits are off by up to 1/32, on average over a range 1/60 or so; those of
/// gradients, of 3 bits, twice that. Errors of two factors add up as those of independent ones do.
#[test]
fn results_and_gradients_are_as_near_as_the_codes_are() -> Result<()> {
    let (x, w, bias) = (
        normal(&[3, 16, 64], 1)?,
        normal(&[32, 64], 2)?,
        normal(&[32], 3)?,
    );
    let seed = normal(&[3, 16, 32], 4)?;
    let run = |f8: bool| -> Result<[Tensor; 4]> {
        let [x, w, bias] = [x.require_grad()?, w.require_grad()?, bias.require_grad()?];
        let y = match f8 {
            true => linear_f8(&x, &[(&w, Some(&bias))])?.remove(0),
            false => x.linear(&w, Some(&bias))?,
        };
        let grads = y.backward_with(&seed)?;
        Ok([y.detach(), grads.of(&x)?, grads.of(&w)?, grads.of(&bias)?])
    };
    let (found, exact) = (run(true)?, run(false)?);
    for (i, most) in [0.04, 0.08, 0.08, 1e-6].into_iter().enumerate() {
        let off = off(&found[i], &exact[i])?;
        assert!(off < most, "{i}: {off}");
        assert!(i == 3 || off > 1e-3, "{i}: nothing was rounded");
    }
    Ok(())
}

#[test]
fn every_layout_rounds_alike() -> Result<()> {
    let run = |b: &Build| -> Result<Vec<Vec<f64>>> {
        let mlp = Mlp::new(
            b,
            [8, 16],
            true,
            Activation::Gelu,
            Init::Normal(0.5),
            Init::Normal(0.5),
        )?;
        let x = normal(&[4, 6, 8], 5)?.to_mesh(b.mesh(), "[@dp?, _, _]")?;
        let y = mlp.forward(&x)?;
        let grads = y.square()?.sum_all()?.backward()?;
        let mut all = vec![floats(&y)?];
        mlp.visit("", &mut |_, p| {
            let gradient = p.partial_gradient(&grads).and_then(|g| match g {
                Some(g) => floats(&p.place_gradient(&g)?),
                None => Ok(vec![]),
            });
            all.push(gradient.expect("a gradient"));
        });
        Ok(all)
    };
    let policy = Policy {
        f8_products: true,
        ..Policy::f32()
    };
    let plain = run(&Build::new(&Mesh::single(&device()), policy, 1))?;
    for (axes, zero) in [
        ("dp=2", Zero::Off),
        ("tp=2", Zero::Off),
        ("dp=2, tp=2", Zero::Three),
    ] {
        let mesh = Mesh::new(axes, &device())?;
        let found = run(&Build::new(&mesh, policy, 1).zero(zero, &["dp"]))?;
        for (found, expected) in found.iter().zip(&plain) {
            let top = expected.iter().fold(0f64, |top, v| top.max(v.abs()));
            for (found, expected) in found.iter().zip(expected) {
                // Sums in another order may round to the neighbouring code behind the first layer.
                assert!(
                    (found - expected).abs() <= 0.02 * top,
                    "{axes}: {found} for {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_model_learns_with_them_as_it_does_without() -> Result<()> {
    let teacher = normal(&[4, 16], 9)?;
    let run = |policy: Policy| -> Result<Vec<f64>> {
        let b = Build::new(&device(), policy, 2);
        let mut mlp = Mlp::new(
            &b,
            [16, 64],
            true,
            Activation::Gelu,
            Init::Normal(0.2),
            Init::Normal(0.2),
        )?;
        let head = Linear::new(&b.at("head"), [16, 4], "[_, _]", Init::Normal(0.2))?;
        let adamw = AdamW {
            lr: 3e-3,
            ..AdamW::default()
        };
        let mut optimizer = Optimizer::new(&mlp, &Groups::all(Rule::AdamW(adamw)))?;
        let mut losses = vec![];
        for step in 0..60 {
            let x = normal(&[32, 16], 100 + step)?;
            let wanted = x.linear(&teacher, None)?;
            let y = head.forward(&mlp.forward(&x.cast(policy.compute)?)?)?;
            let loss = y
                .cast(DType::F32)?
                .sub(&wanted)?
                .square()?
                .mean(&[], false)?;
            losses.push(loss.item()?.to_f64());
            let mut sums = Accumulator::default();
            sums.backward(&mlp, &loss)?;
            let sums = sums.finish(&mlp)?;
            optimizer.step(&mut mlp, sums, 1.0)?;
        }
        mlp.visit("", &mut |_, p| assert_eq!(p.value().dtype(), DType::F32));
        Ok(losses)
    };
    let (f8, bf16) = (run(Policy::f8())?, run(Policy::bf16())?);
    let end = |losses: &[f64]| losses[50..].iter().sum::<f64>() / 10.0;
    assert!(end(&f8) < 0.5 * f8[0], "{f8:?}");
    assert!(
        end(&f8) < 1.2 * end(&bf16) + 0.02 * bf16[0],
        "{} {}",
        end(&f8),
        end(&bf16)
    );
    assert_ne!(f8, bf16);
    Ok(())
}
