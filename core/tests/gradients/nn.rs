//! Gradients of the neural-network ops in the ways that the samples of the registry do not go:
//! weights and tables that are not learned, results of which one is not used, values at which a
//! formula could break.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    grad::{GradOptions, grad},
    ops::{
        AttentionOptions, CrossEntropyOptions, LossReduction, NormOptions, Rng, RopeOptions,
        RopeStyle, attention,
    },
    spmd::Ledger,
};

fn waves(shape: &[usize], k: f64) -> Result<Tensor> {
    Tensor::from_fn(shape, &anymesh_backend_cpu::device(), |at| {
        (at.iter().fold(1, |h, i| h * 5 + i) as f64 * k).sin()
    })
}

fn classes(shape: &[usize], n: i64) -> Result<Tensor> {
    let labels = Tensor::from_fn(shape, &anymesh_backend_cpu::device(), |at| {
        at.iter().fold(3, |h, i| h * 7 + *i as i64 * 3) % n
    })?;
    labels.cast(DType::I64)
}

fn close(a: &Tensor, b: &Tensor, what: &str) -> Result<()> {
    let (a, b) = (
        a.cast(DType::F64)?.to_vec::<f64>()?,
        b.cast(DType::F64)?.to_vec::<f64>()?,
    );
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(&b) {
        assert!(
            (a - b).abs() <= 1e-12 * a.abs().max(1.0),
            "{what}: {a} and {b}"
        );
    }
    Ok(())
}

fn again() -> GradOptions {
    GradOptions {
        create_graph: true,
        ..Default::default()
    }
}

/// The sum of all values, each with a factor of its own.
fn weighed(t: &Tensor) -> Result<Tensor> {
    let weights = waves(t.dims(), 0.37)?.cast(t.dtype())?;
    let weights = if t.is_plain() {
        weights
    } else {
        weights.to_mesh(t.mesh(), anymesh_core::Sharding::replicated())?
    };
    t.mul(&weights)?.sum(&[], false)
}

/// The gradient of a weighed sum, of which no other is taken.
fn once(y: &Tensor, x: &Tensor) -> Result<Tensor> {
    Ok(grad(&[&weighed(y)?], &[x], &GradOptions::default())?.remove(0))
}

/// The gradient of a weighed sum, and that of its own weighed sum.
fn twice(y: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    let first = grad(&[&weighed(y)?], &[x], &again())?.remove(0);
    let second = grad(
        &[&weighed(&first)?],
        &[x],
        &GradOptions {
            allow_unused: true,
            ..Default::default()
        },
    )?
    .remove(0);
    Ok([first, second])
}

/// Learned weights take the gradient of the steps; others the formula. The samples hold the first
/// against differences, this the second against the first.
#[test]
fn logits_have_the_same_gradient_whether_or_not_the_weights_are_learned() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    for reduction in [LossReduction::None, LossReduction::Mean, LossReduction::Sum] {
        for (smoothing, ignored, soft) in [
            (0.0, None, false),
            (0.0, Some(2), false),
            (0.2, Some(1), false),
            (0.3, None, false),
            (0.0, None, true),
            (0.2, None, true),
        ] {
            for weighted in [false, true] {
                for shape in [vec![4, 6], vec![3, 5, 2], vec![4, 199]] {
                    let what = format!(
                        "{reduction:?} {smoothing} {ignored:?} soft {soft} weighted {weighted} {shape:?}"
                    );
                    let n = shape[1];
                    let positions: Vec<usize> = shape
                        .iter()
                        .enumerate()
                        .filter(|(d, _)| *d != 1)
                        .map(|(_, s)| *s)
                        .collect();
                    let x = waves(&shape, 0.7)?.mul(3.0)?;
                    let target = if soft {
                        waves(&shape, 0.3)?.abs()?
                    } else {
                        classes(&positions, n as i64)?
                    };
                    let weight = if weighted {
                        waves(&[n], 0.9)?.abs()?.add(0.1)?
                    } else {
                        Tensor::ones([n], DType::F64, x.device())?
                    };
                    let loss = |x: &Tensor, target: &Tensor, weight: Option<&Tensor>| {
                        let options = CrossEntropyOptions {
                            weight: weight.cloned(),
                            ignore_index: ignored,
                            label_smoothing: smoothing,
                            reduction,
                        };
                        x.cross_entropy(target, &options)
                    };
                    let x = x.require_grad()?;
                    let steps = twice(&loss(&x, &target, Some(&weight.require_grad()?))?, &x)?;
                    let formula = twice(&loss(&x, &target, weighted.then_some(&weight))?, &x)?;
                    close(&formula[0], &steps[0], &what)?;
                    close(&formula[1], &steps[1], &format!("second {what}"))?;

                    let cut = if shape.len() == 2 {
                        "[@dp, @tp]"
                    } else {
                        "[@dp, @tp, _]"
                    };
                    let there = x.detach().to_mesh(&mesh, cut)?.require_grad()?;
                    let place = |t: &Tensor| t.to_mesh(&mesh, anymesh_core::Sharding::replicated());
                    let weight = if weighted {
                        Some(place(&weight)?)
                    } else {
                        None
                    };
                    let there_too = |x| loss(x, &place(&target)?, weight.as_ref());
                    let formula = twice(&there_too(&there)?, &there)?;
                    close(
                        &formula[0].full_tensor()?,
                        &steps[0],
                        &format!("on a mesh {what}"),
                    )?;
                    close(
                        &once(&there_too(&there)?, &there)?.full_tensor()?,
                        &steps[0],
                        &format!("once on a mesh {what}"),
                    )?;
                    close(
                        &formula[1].full_tensor()?,
                        &steps[1],
                        &format!("second on a mesh {what}"),
                    )?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn log_probabilities_have_the_same_gradient_whether_or_not_the_weights_are_learned() -> Result<()> {
    for reduction in [LossReduction::None, LossReduction::Mean, LossReduction::Sum] {
        for ignored in [None, Some(1)] {
            let (x, target, weight) = (
                waves(&[3, 5, 2], 0.7)?.require_grad()?,
                classes(&[3, 2], 5)?,
                waves(&[5], 0.9)?.abs()?,
            );
            let pull = |weight: &Tensor| -> Result<Tensor> {
                let loss = x.nll_loss(&target, Some(weight), ignored, reduction)?;
                Ok(grad(
                    &[&loss],
                    &[&x],
                    &GradOptions {
                        seeds: Some(vec![waves(loss.dims(), 0.2)?]),
                        ..Default::default()
                    },
                )?
                .remove(0))
            };
            close(
                &pull(&weight)?,
                &pull(&weight.require_grad()?)?,
                &format!("{reduction:?} {ignored:?}"),
            )?;
        }
    }
    Ok(())
}

/// Where classes are cut, log-sum-exps and picked logits cross, forward; nothing but the scalar,
/// back.
#[test]
fn logits_that_are_cut_by_classes_are_not_gathered_for_their_gradient() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    let x = waves(&[8, 64], 0.7)?
        .to_mesh(&mesh, "[@dp, @tp]")?
        .require_grad()?;
    let target = classes(&[8], 64)?.to_mesh(&mesh, "[@dp]")?;
    let (grads, ledger) = Ledger::record(|| {
        x.cross_entropy(&target, &CrossEntropyOptions::default())?
            .backward()
    });
    let g = grads?.partial(&x)?;
    assert_eq!(g.type_string(), "f64[8@dp, 64@tp]");
    assert!(ledger.bytes() < 8 * 8 * 4, "{ledger}");
    Ok(())
}

#[test]
fn positions_that_are_ignored_have_no_gradient_whatever_their_logits() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let x = Tensor::from_slice(&[f64::INFINITY, f64::NAN, 1.0, 3.0], [2, 2], &device)?
        .require_grad()?;
    let target = Tensor::from_slice(&[-100i64, 0], [2], &device)?;
    let g = x
        .cross_entropy(&target, &CrossEntropyOptions::default())?
        .backward()?
        .of(&x)?
        .to_vec::<f64>()?;
    let p = 1.0 / (1.0 + 2f64.exp());
    assert_eq!(g[..2], [0.0, 0.0]);
    assert!(
        (g[2] - (p - 1.0)).abs() < 1e-15 && (g[3] - (1.0 - p)).abs() < 1e-15,
        "{g:?}"
    );
    Ok(())
}

/// The samples use both results of attention, which takes its gradient step by step; here only the
/// output is used, and the kernel's gradient.
#[test]
fn attention_has_the_gradient_of_its_steps_of_both_orders() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    let (q, k, v) = (
        waves(&[2, 4, 3, 2], 0.7)?,
        waves(&[2, 2, 5, 2], 0.5)?,
        waves(&[2, 2, 5, 3], 0.3)?,
    );
    let see = waves(&[3, 5], 1.1)?.gt(-0.5)?;
    let device = anymesh_backend_cpu::device();
    let within = [
        Tensor::from_slice(&[1, 0, 1, 2, 2, 3], [2, 3], &device)?,
        Tensor::from_slice(&[1, 0, 0, 1, 1, 2, 2, 1, 3, 3], [2, 5], &device)?,
    ];
    // One query of each text has no key.
    let without = [
        Tensor::from_slice(&[1, 4, 1, 2, 2, 4], [2, 3], &device)?,
        within[1].clone(),
    ];
    for (causal, mask, documents) in [
        (false, None, None),
        (true, None, None),
        (false, Some(waves(&[4, 1, 5], 0.9)?), None),
        (true, Some(see), None),
        (true, None, Some(within.clone())),
        (false, Some(waves(&[4, 1, 5], 0.9)?), Some(within)),
        (true, None, Some(without.clone())),
        (false, Some(waves(&[4, 1, 5], 0.9)?), Some(without)),
    ] {
        let options = AttentionOptions {
            scale: Some(0.8),
            causal,
            mask,
            documents,
        };
        let what = format!(
            "causal {causal}, mask {:?}, documents {}",
            options.mask.as_ref().map(Tensor::type_string),
            options.documents.is_some()
        );
        for which in 0..3 {
            let with =
                |x: &Tensor, at: usize, t: &Tensor| if at == which { x.clone() } else { t.clone() };
            let run = |x: &Tensor,
                       t: [&Tensor; 3],
                       options: &AttentionOptions,
                       stepwise: bool|
             -> Result<[Tensor; 2]> {
                let [q, k, v] = [with(x, 0, t[0]), with(x, 1, t[1]), with(x, 2, t[2])];
                let f = if stepwise {
                    attention::decomposed
                } else {
                    Tensor::attention
                };
                twice(&f(&q, &k, &v, options)?.out, x)
            };
            let leaf = [&q, &k, &v][which].require_grad()?;
            let expected = run(&leaf, [&q, &k, &v], &options, true)?;
            let found = run(&leaf, [&q, &k, &v], &options, false)?;
            close(&found[0], &expected[0], &what)?;
            close(&found[1], &expected[1], &format!("second, {what}"))?;

            let place = |t: &Tensor| t.to_mesh(&mesh, "[@dp, @tp, _, _]");
            let there = [place(&q)?, place(&k)?, place(&v)?];
            let leaf = there[which].require_grad()?;
            let mask = options
                .mask
                .as_ref()
                .map(|m| m.to_mesh(&mesh, anymesh_core::Sharding::replicated()))
                .transpose()?;
            let documents = match &options.documents {
                Some([queries, keys]) => Some([
                    queries.to_mesh(&mesh, "[@dp, _]")?,
                    keys.to_mesh(&mesh, "[_, _]")?,
                ]),
                None => None,
            };
            let found = run(
                &leaf,
                [&there[0], &there[1], &there[2]],
                &AttentionOptions {
                    mask,
                    documents,
                    ..options
                },
                false,
            )?;
            close(
                &found[0].full_tensor()?,
                &expected[0],
                &format!("on a mesh, {what}"),
            )?;
            close(
                &found[1].full_tensor()?,
                &expected[1],
                &format!("second on a mesh, {what}"),
            )?;
        }
    }
    Ok(())
}

#[test]
fn a_query_that_sees_no_key_has_a_gradient_of_zero() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let (q, k, v) = (
        waves(&[1, 1, 3, 2], 0.7)?.require_grad()?,
        waves(&[1, 1, 2, 2], 0.5)?.require_grad()?,
        waves(&[1, 1, 2, 2], 0.3)?,
    );
    let bias = Tensor::zeros([3, 2], DType::F64, &device)?.require_grad()?;
    for mask in [None, Some(bias)] {
        // The first of three queries comes before both keys.
        let options = AttentionOptions {
            causal: true,
            mask: mask.clone(),
            ..Default::default()
        };
        let grads = q
            .attention(&k, &v, &options)?
            .out
            .sum(&[], false)?
            .backward()?;
        let g = grads.of(&q)?.to_vec::<f64>()?;
        assert_eq!(g[..2], [0.0, 0.0]);
        assert!(grads.of(&k)?.to_vec::<f64>()?.iter().all(|v| v.is_finite()));
        if let Some(mask) = mask {
            assert_eq!(grads.of(&mask)?.to_vec::<f64>()?[..2], [0.0, 0.0]);
        }
    }
    Ok(())
}

#[test]
fn an_einsum_of_a_scalar_on_a_mesh_is_that_scalar() -> Result<()> {
    let mesh = Mesh::new("tp=2", &anymesh_backend_cpu::device())?;
    let x = Tensor::new(3f64, &anymesh_backend_cpu::device())?
        .to_mesh(&mesh, anymesh_core::Sharding::replicated())?
        .require_grad()?;
    let y = Tensor::einsum("->", &[&x])?;
    assert_eq!(y.to_vec::<f64>()?, [3.0]);
    assert_eq!(y.backward()?.of(&x)?.to_vec::<f64>()?, [1.0]);
    Ok(())
}

#[test]
fn small_floats_get_gradients_of_their_dtype_and_parameters_of_theirs() -> Result<()> {
    let x = waves(&[64, 16], 0.7)?.cast(DType::BF16)?.require_grad()?;
    let (weight, bias) = (
        waves(&[16], 0.3)?.cast(DType::F32)?.require_grad()?,
        Tensor::zeros([16], DType::F32, x.device())?.require_grad()?,
    );
    let y = x.layer_norm(&NormOptions::new().weight(&weight).bias(&bias))?;
    let grads = y.backward_with(&y.ones_like()?)?;
    assert_eq!(grads.of(&x)?.dtype(), DType::BF16);
    assert_eq!(grads.of(&weight)?.dtype(), DType::F32);
    // A sum of 64 ones, not one that was rounded to 8 bits on the way.
    assert_eq!(grads.of(&bias)?.to_vec::<f32>()?, [64.0; 16]);
    Ok(())
}

#[test]
fn running_statistics_are_not_tracked() -> Result<()> {
    let x = waves(&[4, 3, 2], 0.7)?.require_grad()?;
    let norm = x.batch_norm_train(&NormOptions::new())?;
    assert!(norm.out.requires_grad() && norm.mean.requires_grad() && norm.var.requires_grad());
    let (mean, var) = (waves(&[3], 0.1)?, waves(&[3], 0.2)?.abs()?);
    let (mean, var) = norm.update_running(&mean, &var, 0.1)?;
    assert!(!mean.requires_grad() && !var.requires_grad());
    // Each result alone has the gradient of its definition.
    let g = grad(
        &[&norm.var.sum(&[], false)?],
        &[&x],
        &GradOptions {
            retain_graph: true,
            ..Default::default()
        },
    )?
    .remove(0);
    close(
        &g,
        &grad(
            &[&x.var(&[0, 2], false, 0)?.sum(&[], false)?],
            &[&x],
            &GradOptions::default(),
        )?[0],
        "variance",
    )?;
    let g = grad(
        &[&norm.mean.sum(&[], false)?],
        &[&x],
        &GradOptions::default(),
    )?
    .remove(0);
    close(
        &g,
        &Tensor::full([4, 3, 2], 1.0 / 8.0, DType::F64, x.device())?,
        "mean",
    )?;
    Ok(())
}

#[test]
fn vectors_of_zeros_and_rows_with_minus_infinity_have_finite_gradients() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    for p in [1.0, 1.5, 2.0, 3.0, f64::INFINITY] {
        let x = Tensor::zeros([2, 3], DType::F64, &device)?.require_grad()?;
        let g = x
            .normalize(p, -1, 1e-3)?
            .sum(&[], false)?
            .backward()?
            .of(&x)?;
        assert!(
            g.to_vec::<f64>()?.iter().all(|v| (v - 1e3).abs() < 1e-9),
            "p = {p}: {:?}",
            g.to_vec::<f64>()?
        );
    }
    for p in [0.5, 1.0, 1.5, 2.0, 3.0] {
        let x = Tensor::zeros([4], DType::F64, &device)?.require_grad()?;
        assert_eq!(
            x.norm(p, &[], false)?.backward()?.of(&x)?.to_vec::<f64>()?,
            [0.0; 4],
            "p = {p}"
        );
    }
    let x = Tensor::ones([4], DType::F64, &device)?.require_grad()?;
    assert_eq!(
        x.std(&[], false, 1)?.backward()?.of(&x)?.to_vec::<f64>()?,
        [0.0; 4]
    );
    let x = Tensor::from_slice(&[1.0, f64::NEG_INFINITY, 2.0], [1, 3], &device)?.require_grad()?;
    let g = twice(&x.softmax(-1)?, &x)?;
    assert!(g.iter().all(|g| {
        g.to_vec::<f64>()
            .is_ok_and(|g| g.iter().all(|v| v.is_finite()) && g[1] == 0.0)
    }));
    let picked = x.log_softmax(-1)?.narrow(1, 2, 1)?.sum(&[], false)?;
    assert!(
        grad(&[&picked], &[&x], &GradOptions::default())?[0]
            .to_vec::<f64>()?
            .iter()
            .all(|v| v.is_finite())
    );
    Ok(())
}

#[test]
fn dropout_drops_the_same_elements_of_the_gradient() -> Result<()> {
    let mesh = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    let (x, r) = (
        Tensor::ones([4, 6], DType::F64, &anymesh_backend_cpu::device())?.require_grad()?,
        waves(&[4, 6], 0.2)?.require_grad()?,
    );
    let kept = x.dropout(0.5, Rng::new(3))?.to_vec::<f64>()?;
    let grads = x
        .dropout_add(&r, 0.5, Rng::new(3))?
        .sum(&[], false)?
        .backward()?;
    assert_eq!(grads.of(&x)?.to_vec::<f64>()?, kept);
    assert_eq!(grads.of(&r)?.to_vec::<f64>()?, [1.0; 24]);
    let there = x.detach().to_mesh(&mesh, "[@tp, @dp]")?.require_grad()?;
    let g = there
        .dropout(0.5, Rng::new(3))?
        .sum(&[], false)?
        .backward()?
        .of(&there)?;
    assert_eq!(g.to_vec::<f64>()?, kept);
    Ok(())
}

#[test]
fn rotating_back_is_the_gradient_of_a_rotation() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let (cos, sin) = Tensor::rope_tables(
        5,
        4,
        &RopeOptions {
            base: 100.0,
            offset: 2,
        },
        &device,
    )?;
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        let x = waves(&[2, 5, 4], 0.6)?.cast(DType::F32)?.require_grad()?;
        let y = x.rope(&cos, &sin, style)?;
        // Half the squared length is kept by a rotation, so its gradient is the input.
        let g = y.square()?.mul(0.5)?.sum(&[], false)?.backward()?.of(&x)?;
        for (g, x) in g.to_vec::<f32>()?.iter().zip(x.to_vec::<f32>()?) {
            assert!((g - x).abs() < 1e-6, "{style:?}: {g} and {x}");
        }
    }
    Ok(())
}

#[test]
fn smooth_functions_have_second_derivatives_at_zero_too() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let second = |f: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<f64> {
        let x = Tensor::new(0f64, &device)?.require_grad()?;
        let first = grad(&[&f(&x)?], &[&x], &again())?.remove(0);
        Ok(grad(&[&first], &[&x], &GradOptions::default())?[0]
            .item()?
            .to_f64())
    };
    let zero = Tensor::new(0f64, &device)?;
    type Case<'a> = (&'a str, Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>, f64);
    let cases: [Case<'_>; 8] = [
        ("softplus", Box::new(|x| x.softplus(1.0, 20.0)), 0.25),
        ("logsigmoid", Box::new(|x| x.logsigmoid()), -0.25),
        ("silu", Box::new(|x| x.silu()), 0.5),
        (
            "gelu",
            Box::new(|x| x.gelu()),
            (2.0 / std::f64::consts::PI).sqrt(),
        ),
        (
            "gelu_tanh",
            Box::new(|x| x.gelu_tanh()),
            (2.0 / std::f64::consts::PI).sqrt(),
        ),
        ("mish", Box::new(|x| x.mish()), 0.64),
        (
            "bce_with_logits_loss",
            Box::new(|x| x.bce_with_logits_loss(&zero, None, LossReduction::Sum)),
            0.25,
        ),
        (
            "huber_loss",
            Box::new(|x| x.huber_loss(&zero, 1.0, LossReduction::Sum)),
            1.0,
        ),
    ];
    for (name, f, expected) in &cases {
        let found = second(f)?;
        assert!(
            (found - expected).abs() < 1e-14,
            "{name}: {found}, expected {expected}"
        );
    }
    Ok(())
}

#[test]
fn linear_maps_of_many_rows_together_have_the_gradients_of_each() -> Result<()> {
    let leaf = |shape: &[usize], k: f64| waves(shape, k)?.require_grad();
    let x = leaf(&[2, 600, 12], 0.11)?;
    let mut maps = vec![];
    for (i, rows) in [12, 9, 5].into_iter().enumerate() {
        let k = 0.2 + 0.1 * i as f64;
        maps.push((leaf(&[rows, 12], k)?, leaf(&[rows], k + 0.05)?));
    }
    for biased in [true, false] {
        let pairs: Vec<(&Tensor, Option<&Tensor>)> = (maps.iter())
            .map(|(w, b)| (w, biased.then_some(b)))
            .collect();
        let together = x.linear_each(&pairs)?;
        let each = (pairs.iter().map(|(w, b)| x.linear(w, *b))).collect::<Result<Vec<_>>>()?;
        // Parts of one tensor: one product.
        assert!(together[0].shares_memory(&together[2]));
        let mut gradients = vec![];
        for out in [&together, &each] {
            // The second result is not used.
            let loss = out[0].square()?.sum_all()?.add(&out[2].sum_all()?)?;
            gradients.push(loss.backward()?);
        }
        for (a, b) in together.iter().zip(&each) {
            close(a, b, "result")?;
        }
        let weights = [0, 2].map(|i| [&maps[i].0, &maps[i].1]);
        for leaf in std::iter::once(&x).chain(weights.iter().flatten().copied()) {
            let [a, b] = [0, 1].map(|i| gradients[i].get(leaf));
            match (a?, b?) {
                (Some(a), Some(b)) => close(&a, &b, "gradient")?,
                (a, b) => assert_eq!(a.is_some(), b.is_some()),
            }
        }
    }
    Ok(())
}
