//! The tape: what it remembers, what it releases, what it refuses. Gradients of ops are in
//! `gradients*.rs`.

use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    backend::Kernel,
    grad::{GradOptions, checkpoint, custom, grad, no_grad},
    ops::Rng,
    spmd::Ledger,
};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

fn vector(values: &[f64]) -> Result<Tensor> {
    Tensor::from_slice(values, [values.len()], &anymesh_backend_cpu::device())
}

fn leaf(values: &[f64]) -> Result<Tensor> {
    vector(values)?.require_grad()
}

fn again() -> GradOptions {
    GradOptions {
        create_graph: true,
        ..Default::default()
    }
}

#[test]
fn gradients_are_found_by_parameter_and_added_over_all_uses() -> Result<()> {
    let (a, b) = (leaf(&[1.0, 2.0])?, leaf(&[3.0, 4.0])?);
    let loss = a.mul(&b)?.add(&a.square()?)?.sum(&[], false)?;
    let grads = loss.backward()?;
    assert_eq!(grads.of(&a)?.to_vec::<f64>()?, [5.0, 8.0]);
    assert_eq!(grads.of(&b)?.to_vec::<f64>()?, [1.0, 2.0]);
    assert!(
        grads.get(&leaf(&[1.0])?)?.is_none(),
        "the loss does not depend on it"
    );
    Ok(())
}

#[test]
fn what_is_not_tracked_stays_so() -> Result<()> {
    let a = leaf(&[1.0, 2.0])?;
    assert!(!no_grad(|| a.exp())?.requires_grad());
    assert!(!a.detach().exp()?.requires_grad());
    assert!(!a.gt(1.0)?.requires_grad());
    assert!(!a.argmax(None, false)?.requires_grad());
    assert!(a.exp()?.requires_grad() && !a.exp()?.is_leaf() && a.is_leaf());
    // The constant factor has no gradient, the other does.
    let grads = a.detach().mul(&a)?.sum(&[], false)?.backward()?;
    assert_eq!(grads.of(&a)?.to_vec::<f64>()?, [1.0, 2.0]);
    Ok(())
}

#[test]
fn a_function_that_is_flat_has_a_gradient_of_zero() -> Result<()> {
    let a = leaf(&[1.2, -2.7])?;
    let g = grad(
        &[&a.floor()?.sum(&[], false)?],
        &[&a],
        &GradOptions::default(),
    )?;
    assert_eq!(g[0].to_vec::<f64>()?, [0.0, 0.0]);
    Ok(())
}

#[test]
fn a_second_pass_needs_the_graph_to_be_kept() -> Result<()> {
    let a = leaf(&[1.0, 2.0])?;
    let loss = a.exp()?.sum(&[], false)?;
    let first = loss.backward_retain()?.of(&a)?.to_vec::<f64>()?;
    assert_eq!(loss.backward()?.of(&a)?.to_vec::<f64>()?, first);
    let error = loss.backward().unwrap_err();
    assert!(
        matches!(error, Error::Gradient { .. }) && error.to_string().contains("retain_graph"),
        "{error}"
    );
    Ok(())
}

#[test]
fn mistakes_get_errors_that_say_what_to_do() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let ints = Tensor::from_slice(&[1i32], [1], &device)?;
    assert!(matches!(ints.require_grad(), Err(Error::DType { .. })));
    let a = leaf(&[1.0, 2.0])?;
    let text = |r: Result<Tensor>| r.unwrap_err().to_string();
    assert!(text(a.exp()?.backward().map(|_| a.clone())).contains("backward_with"));
    assert!(text(vector(&[1.0])?.backward().map(|_| a.clone())).contains("not tracked"));
    let grads =
        |y: &Tensor, x: &Tensor| grad(&[y], &[x], &GradOptions::default()).map(|mut g| g.remove(0));
    assert!(text(grads(&a.sum(&[], false)?, &vector(&[1.0])?)).contains("require_grad"));
    assert!(text(grads(&a.sum(&[], false)?, &leaf(&[1.0])?)).contains("allow_unused"));
    assert!(matches!(
        a.exp()?.backward_with(&vector(&[1.0])?),
        Err(Error::Shape { .. })
    ));
    assert!(vector(&[1.0])?.on_gradient(|_| Ok(None)).is_err());
    let wrong = custom(
        "wrong",
        &[&a],
        |x| Ok(vec![x[0].clone()]),
        |_, _, _| Ok(vec![Some(vector(&[1.0])?)]),
    )?;
    assert!(text(wrong[0].sum(&[], false)?.backward().map(|_| a.clone())).contains("input 0"));
    Ok(())
}

#[test]
fn unused_inputs_give_zeros_where_that_is_allowed() -> Result<()> {
    let (a, b) = (leaf(&[1.0, 2.0])?, leaf(&[5.0])?);
    let options = GradOptions {
        allow_unused: true,
        ..Default::default()
    };
    let g = grad(&[&a.sum(&[], false)?], &[&a, &b], &options)?;
    assert_eq!(
        (g[0].to_vec::<f64>()?, g[1].to_vec::<f64>()?),
        (vec![1.0, 1.0], vec![0.0])
    );
    Ok(())
}

#[test]
fn gradients_of_tensors_in_between_can_be_asked_for() -> Result<()> {
    let a = leaf(&[0.5, 1.0])?;
    let middle = a.exp()?;
    let loss = middle.square()?.sum(&[], false)?;
    let g = grad(&[&loss], &[&middle, &a], &GradOptions::default())?;
    let m = middle.to_vec::<f64>()?;
    assert_eq!(g[0].to_vec::<f64>()?, [2.0 * m[0], 2.0 * m[1]]);
    assert_eq!(
        g[1].to_vec::<f64>()?,
        [2.0 * m[0] * m[0], 2.0 * m[1] * m[1]]
    );
    Ok(())
}

#[test]
fn an_op_with_more_than_256_results_keeps_their_gradients_apart() -> Result<()> {
    let x = leaf(&[1.0; 300])?;
    let parts = x.unbind(0)?;
    let gradient = parts[299]
        .mul(7)?
        .add(&parts[3])?
        .backward()?
        .of(&x)?
        .to_vec::<f64>()?;
    let expected: Vec<f64> = (0..300)
        .map(|i| [0.0, 1.0, 7.0][usize::from(i == 3) + 2 * usize::from(i == 299)])
        .collect();
    assert_eq!(gradient, expected);
    Ok(())
}

#[test]
fn a_hook_may_add_a_hook_to_its_own_tensor() -> Result<()> {
    let (x, added) = (leaf(&[2.0])?, Arc::new(AtomicUsize::new(0)));
    let (again, count) = (x.clone(), added.clone());
    x.on_gradient(move |_| {
        let count = count.clone();
        again.on_gradient(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(None)
        })?;
        Ok(None)
    })?;
    for passes in 0..3 {
        x.square()?.backward()?;
        // Those that were added in earlier passes.
        assert_eq!(added.load(Ordering::Relaxed), [0, 1, 3][passes]);
    }
    Ok(())
}

#[test]
fn hooks_see_complete_gradients_and_may_replace_them() -> Result<()> {
    let a = leaf(&[1.0, 2.0])?;
    let middle = a.mul(3.0)?;
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    middle.on_gradient(move |g| {
        count.fetch_add(1, Ordering::Relaxed);
        g.mul(10.0).map(Some)
    })?;
    // Two uses, one complete gradient.
    let loss = middle.add(&middle)?.sum(&[], false)?;
    assert_eq!(loss.backward()?.of(&a)?.to_vec::<f64>()?, [60.0, 60.0]);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn derivatives_of_any_order_come_from_differentiating_again() -> Result<()> {
    let x = leaf(&[0.3])?;
    let mut y = x.sin()?.sum(&[], false)?;
    let expected = [
        0.3f64.cos(),
        -0.3f64.sin(),
        -0.3f64.cos(),
        0.3f64.sin(),
        0.3f64.cos(),
    ];
    for e in expected {
        y = grad(&[&y], &[&x], &again())?.remove(0);
        assert!((y.to_vec::<f64>()?[0] - e).abs() < 1e-15);
        y = y.sum(&[], false)?;
    }
    Ok(())
}

/// Paddle #72133: the double gradient of a product with broadcast batches was reshaped wrongly.
#[test]
fn the_double_gradient_of_a_product_with_broadcast_batches_has_the_operands_shapes() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let make = |shape: &[usize], k: f64| {
        Tensor::from_fn(shape, &device, |at| {
            (at.iter().fold(1, |h, i| h * 7 + i) as f64 * k).sin()
        })?
        .require_grad()
    };
    for (left, right) in [
        ([2, 1, 3, 4].to_vec(), vec![5, 4, 2]),
        (vec![3, 4], vec![2, 4, 5]),
        (vec![4], vec![3, 4, 2]),
        (vec![2, 3, 4], vec![4]),
    ] {
        let (a, b) = (make(&left, 0.7)?, make(&right, 1.3)?);
        let y = a.matmul(&b)?.square()?.sum(&[], false)?;
        let g = grad(&[&y], &[&a, &b], &again())?;
        assert_eq!((g[0].dims(), g[1].dims()), (&left[..], &right[..]));
        // Along one direction, against differences of the first gradient.
        let weigh = |t: &Tensor, k: f64| {
            Tensor::from_fn(t.shape(), &device, |at| {
                (at.iter().sum::<usize>() as f64 * k + 0.2).cos()
            })
        };
        let (va, vb) = (weigh(&a, 0.9)?, weigh(&b, 0.4)?);
        let along = |g: &[Tensor]| -> Result<Tensor> {
            g[0].mul(&va)?
                .sum(&[], false)?
                .add(&g[1].mul(&vb)?.sum(&[], false)?)
        };
        let h = grad(&[&along(&g)?], &[&a, &b], &GradOptions::default())?;
        let exact = along(&h)?.item()?.to_f64();
        let at = |t: f64| -> Result<f64> {
            let (a, b) = (
                a.detach().add(&va.mul(t)?)?.require_grad()?,
                b.detach().add(&vb.mul(t)?)?.require_grad()?,
            );
            along(&grad(
                &[&a.matmul(&b)?.square()?.sum(&[], false)?],
                &[&a, &b],
                &GradOptions::default(),
            )?)?
            .item()
            .map(|v| v.to_f64())
        };
        let slope = (at(1e-5)? - at(-1e-5)?) / 2e-5;
        assert!(
            (slope - exact).abs() < 1e-6 * exact.abs().max(1.0),
            "{left:?} {right:?}: {exact} and {slope}"
        );
    }
    Ok(())
}

#[test]
fn a_chain_of_a_hundred_thousand_ops_is_differentiated_and_dropped() -> Result<()> {
    let x = leaf(&[1.0])?;
    let mut y = x.clone();
    for _ in 0..100_000 {
        y = y.add(1e-5)?;
    }
    drop(y.exp()?);
    assert_eq!(
        y.sum(&[], false)?.backward()?.of(&x)?.to_vec::<f64>()?,
        [1.0]
    );
    Ok(())
}

#[test]
fn custom_gradients_are_used_and_can_be_differentiated() -> Result<()> {
    let x = leaf(&[2.0, 3.0])?;
    // A cube whose gradient is claimed to be x^4.
    let cube = |x: &Tensor| {
        custom(
            "cube",
            &[x],
            |x| Ok(vec![x[0].pow(3.0)?]),
            |x, _, g| Ok(vec![Some(g[0].mul(&x[0].pow(4.0)?)?)]),
        )
        .map(|mut y| y.remove(0))
    };
    let g = grad(&[&cube(&x)?.sum(&[], false)?], &[&x], &again())?.remove(0);
    assert_eq!(g.to_vec::<f64>()?, [16.0, 81.0]);
    let h = grad(&[&g.sum(&[], false)?], &[&x], &GradOptions::default())?.remove(0);
    assert_eq!(h.to_vec::<f64>()?, [32.0, 108.0]);
    Ok(())
}

#[test]
fn a_checkpoint_gives_the_same_gradients_with_the_same_random_numbers() -> Result<()> {
    let (x, w) = (leaf(&[0.5, -1.0, 2.0, 0.1])?, leaf(&[1.5, 0.2, -0.3, 0.7])?);
    let block = |x: &Tensor, w: &Tensor| x.mul(w)?.tanh()?.dropout(0.5, Rng::new(11))?.exp();
    let plain = block(&block(&x, &w)?, &w)?.sum(&[], false)?;
    let expected = plain.backward()?;
    // The weight is captured, not passed; the second checkpoint is inside of the first.
    let inner = w.clone();
    let outer = move |x: &[Tensor]| {
        let captured = inner.clone();
        let once = checkpoint(move |x| Ok(vec![block(&x[0], &captured)?]), &[&x[0]])?.remove(0);
        Ok(vec![block(&once, &inner)?])
    };
    let y = checkpoint(outer, &[&x])?.remove(0).sum(&[], false)?;
    assert_eq!(y.to_vec::<f64>()?, plain.to_vec::<f64>()?);
    let found = y.backward()?;
    for t in [&x, &w] {
        assert_eq!(
            found.of(t)?.to_vec::<f64>()?,
            expected.of(t)?.to_vec::<f64>()?
        );
    }
    Ok(())
}

#[test]
fn frozen_parameters_stay_frozen_through_a_checkpoint() -> Result<()> {
    let (x, frozen) = (leaf(&[0.5, -1.0])?, vector(&[3.0, 4.0])?);
    let w = frozen.clone();
    let y = checkpoint(move |x| Ok(vec![x[0].mul(&w)?]), &[&x])?.remove(0);
    let grads = y.sum(&[], false)?.backward()?;
    assert_eq!(grads.of(&x)?.to_vec::<f64>()?, [3.0, 4.0]);
    assert!(grads.get(&frozen).is_err() && !frozen.requires_grad());
    // Nothing tracked goes in, nothing tracked comes out.
    let y = checkpoint(|x| Ok(vec![x[0].exp()?]), &[&frozen])?.remove(0);
    assert!(!y.requires_grad());
    Ok(())
}

#[test]
fn second_derivatives_pass_through_a_checkpoint() -> Result<()> {
    let x = leaf(&[0.4, 0.9])?;
    let y = checkpoint(|x| Ok(vec![x[0].sin()?]), &[&x])?
        .remove(0)
        .sum(&[], false)?;
    let g = grad(&[&y], &[&x], &again())?.remove(0);
    let h = grad(&[&g.sum(&[], false)?], &[&x], &GradOptions::default())?.remove(0);
    assert_eq!(h.to_vec::<f64>()?, [-(0.4f64.sin()), -(0.9f64.sin())]);
    Ok(())
}

#[test]
fn an_input_that_depends_on_another_input_of_a_checkpoint_counts_once() -> Result<()> {
    let a = leaf(&[2.0])?;
    let b = a.mul(3.0)?;
    let y = checkpoint(|x| Ok(vec![x[0].mul(&x[1])?]), &[&a, &b])?.remove(0);
    assert_eq!(
        y.sum(&[], false)?.backward()?.of(&a)?.to_vec::<f64>()?,
        [12.0]
    );
    Ok(())
}

#[test]
fn gradients_stay_partial_until_they_are_asked_for_and_are_reduced_once() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let w = Tensor::from_fn([4, 6], &device, |at| (at[0] * 6 + at[1]) as f64)?
        .to_mesh(&mesh, "[@dp, @tp]")?
        .require_grad()?;
    let whole = w.reshard("[_, @tp]")?;
    let batch = |k: f64| {
        Tensor::from_fn([8, 4], &device, |at| (at[0] * 4 + at[1]) as f64 * k)?
            .to_mesh(&mesh, "[@dp, _]")
    };
    let replicated = w
        .full_tensor()?
        .detach()
        .to_mesh(&mesh, "[_, @tp]")?
        .require_grad()?;
    let (grads, ledger) = Ledger::record(|| -> Result<_> {
        let mut sum = batch(1.0)?
            .matmul(&replicated)?
            .sum(&[], false)?
            .backward()?;
        sum.add(
            batch(2.0)?
                .matmul(&replicated)?
                .sum(&[], false)?
                .backward()?,
        )?;
        Ok(sum)
    });
    let grads = grads?;
    assert_eq!(
        grads.partial(&replicated)?.type_string(),
        "f64[4, 6@tp]{sum:dp}"
    );
    assert_eq!(ledger.entries, [], "two micro-batches, nothing sent yet");
    let (g, ledger) = Ledger::record(|| grads.of(&replicated));
    let g = g?;
    assert_eq!(
        (g.type_string().as_str(), ledger.entries.len()),
        ("f64[4, 6@tp]", 1)
    );
    let expected: Vec<f64> = (0..24)
        .map(|i| (0..8).map(|r| (r * 4 + i / 6) as f64 * 3.0).sum())
        .collect();
    assert_eq!(g.to_vec::<f64>()?, expected);

    // A sharded parameter that is gathered for use: the gradient of the gather is a reduce-scatter.
    let (grads, ledger) =
        Ledger::record(|| batch(3.0)?.matmul(&whole)?.sum(&[], false)?.backward());
    let g = grads?.of(&w)?;
    assert_eq!(g.type_string(), "f64[4@dp, 6@tp]");
    assert_eq!(
        ledger.entries.iter().map(|e| e.kind).collect::<Vec<_>>(),
        ["reduce_scatter"]
    );
    assert_eq!(g.to_vec::<f64>()?, expected);
    Ok(())
}

#[test]
fn what_a_gradient_communicates_is_in_the_ledger_under_the_line_that_called_the_op() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("tp=2", &device)?;
    let x = Tensor::ones([4, 4], DType::F64, &device)?
        .to_mesh(&mesh, "[@tp, _]")?
        .require_grad()?;
    let line = line!() + 1;
    let y = x.reshard("[_, @tp]")?;
    let (grads, ledger) = Ledger::record(|| y.exp()?.sum(&[], false)?.backward());
    grads?;
    assert!(
        ledger
            .entries
            .iter()
            .all(|e| e.caller.contains(&format!("autograd.rs:{line}"))),
        "{ledger}"
    );
    assert_eq!(ledger.entries.len(), 1);
    Ok(())
}

/// Paddle's rule does not make the gradient of a replicated source partial where the index is cut.
#[test]
fn the_gradient_of_take_along_axis_counts_every_rank_that_reads_a_replicated_source() -> Result<()>
{
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("tp=2", &device)?;
    let x = Tensor::from_fn([3, 4], &device, |at| (at[0] * 4 + at[1]) as f64)?;
    let index = Tensor::from_slice(&[0i32, 0, 2, 2, 1, 0, 2, 0, 0, 0, 1, 2], [3, 4], &device)?;
    let of = |x: &Tensor, index: &Tensor| -> Result<Tensor> {
        let x = x.require_grad()?;
        Ok(x.take_along_axis(0, index)?
            .square()?
            .sum(&[], false)?
            .backward()?
            .of(&x)?)
    };
    let plain = of(&x, &index)?.to_vec::<f64>()?;
    let sharded = of(
        &x.to_mesh(&mesh, "[_, _]")?,
        &index.to_mesh(&mesh, "[@tp, _]")?,
    )?;
    assert_eq!(
        (sharded.type_string().as_str(), sharded.to_vec::<f64>()?),
        ("f64[3, 4]", plain)
    );
    Ok(())
}

/// The gradient of logits may be written over them by a kernel that is told so: where nobody else has
/// them or their memory, on a mesh as on one device.
#[test]
fn logits_are_given_up_where_nobody_else_has_their_memory() -> Result<()> {
    let told = Arc::new(Mutex::new(vec![]));
    let tell = told.clone();
    let device = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        if let Kernel::RowProgram(call) = &kernel
            && !call.program.dtypes()[0].is_empty()
        {
            tell.lock().expect("nobody panics").push(call.over);
        }
        backend.launch(kernel)
    });
    // The gradient of `x`, and whether each launch for it was told that it is the last.
    type Hold = fn(&Tensor) -> Result<Option<Tensor>>;
    let run = |mesh: &Mesh, sharding: &str, hold: Hold, passes: usize| -> Result<_> {
        let there = |t: Tensor| match mesh.is_single() {
            true => Ok(t),
            false => t.to_mesh(mesh, sharding),
        };
        let x = Tensor::uniform([6, 128], -1.0, 1.0, DType::F32, &device, Rng::new(3))?;
        let target = Tensor::arange(1.0, 121.0, 20.0, DType::I64, &device)?;
        let target = match sharding {
            "[_,@tp]" => target.to_mesh(mesh, "[_]"),
            _ => there(target),
        }?;
        let x = there(x)?.require_grad()?;
        let logits = x.mul(2.0)?;
        let held = hold(&logits)?;
        let loss = logits.cross_entropy(&target, &Default::default())?;
        drop(logits);
        told.lock().expect("nobody panics").clear();
        for _ in 1..passes {
            loss.backward_retain()?;
        }
        let gradient = loss.backward()?.of(&x)?.full_tensor()?.to_vec::<f32>()?;
        drop(held);
        Ok((
            gradient,
            std::mem::take(&mut *told.lock().expect("nobody panics")),
        ))
    };
    let nobody: Hold = |_| Ok(None);
    let another: Hold = |logits| Ok(Some(logits.clone()));
    let view: Hold = |logits| logits.detach().t().map(Some);
    let elsewhere: Hold = |logits| logits.detach().add(1.0).map(Some);
    let one = Mesh::single(&device);
    let (expected, over) = run(&one, "[...]", nobody, 1)?;
    assert_eq!(over, [true]);
    for (axes, sharding, last) in [
        ("dp=1", "[@dp,...]", &[true][..]),
        ("dp=3", "[@dp,...]", &[true; 3]),
        ("dp=4", "[@dp,...]", &[true; 4]),
        ("tp=2", "[_,@tp]", &[true; 2]),
        // One computes for both, from memory that both have.
        ("dp=2", "[...]", &[false]),
    ] {
        let mesh = Mesh::new(axes, &device)?;
        let not = vec![false; last.len()];
        let cases: [(Hold, usize, Vec<bool>); 5] = [
            (nobody, 1, last.to_vec()),
            (nobody, 2, [&not, last].concat()),
            (another, 1, not.clone()),
            (view, 1, not.clone()),
            (elsewhere, 1, last.to_vec()),
        ];
        for (k, (hold, passes, expected_over)) in cases.into_iter().enumerate() {
            let (gradient, over) = run(&mesh, sharding, hold, passes)?;
            assert_eq!(over, expected_over, "case {k} on {axes} {sharding}");
            for (a, b) in gradient.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-6, "case {k} on {axes} {sharding}");
            }
        }
    }
    Ok(())
}
