//! Parameters in a training loop: how their gradients are asked for, kept, added and hooked, and
//! that an update leaves a parameter.

use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    grad::{Gradients, no_grad},
    spmd::Ledger,
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

fn leaf(values: &[f64]) -> Result<Tensor> {
    Tensor::from_slice(values, [values.len()], &anymesh_backend_cpu::device())?.require_grad()
}

fn square(x: &Tensor) -> Result<Tensor> {
    x.square()?.sum(&[], false)
}

/// What an error says.
fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.expect_err("refused");
    assert!(matches!(error, Error::Gradient { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_gradient_that_is_missing_is_an_error_that_says_why() -> Result<()> {
    let (w, other) = (leaf(&[1.0, 2.0])?, leaf(&[3.0])?);
    let hidden = w.exp()?;
    let mut grads = square(&hidden)?.backward()?;
    assert!(text(grads.of(&w.detach())).contains("require_grad"));
    assert!(text(grads.get(&w.detach())).contains("require_grad"));
    assert!(text(grads.partial(&w.detach())).contains("require_grad"));
    let unused = text(grads.of(&other));
    assert!(unused.contains("parameters.rs") && unused.contains("does not depend"));
    assert!(grads.get(&other)?.is_none());
    let between = text(grads.of(&hidden));
    assert!(between.contains("`exp`") && between.contains("retain_grad"));
    assert!(text(grads.get(&hidden)).contains("retain_grad"));
    let expected = grads.of(&w)?.to_vec::<f64>()?;
    assert_eq!(grads.take(&w)?.to_vec::<f64>()?, expected);
    for again in [grads.of(&w), grads.take(&w), grads.partial(&w)] {
        assert!(text(again).contains("taken already"));
    }
    assert!(text(grads.get(&w)).contains("taken already"));
    Ok(())
}

/// It used to be `None`, which a loop with `if let Some` takes for "nothing to update".
#[test]
fn a_parameter_that_an_update_lost_is_found_out() -> Result<()> {
    let w = leaf(&[1.0])?;
    let grads = square(&w)?.backward()?;
    let lost = no_grad(|| w.sub(&grads.of(&w)?))?;
    let next = square(&lost.mul(&leaf(&[1.0])?)?)?.backward()?;
    assert!(text(next.get(&lost)).contains("`update`"));
    Ok(())
}

#[test]
fn what_is_reached_through_flat_functions_alone_has_a_gradient_of_zero() -> Result<()> {
    let (w, v) = (leaf(&[1.2, -2.7])?, leaf(&[1.0, 1.0])?);
    let below = w.exp()?;
    below.retain_grad()?;
    let grads = square(&below.floor()?.add(&v)?)?.backward()?;
    assert_eq!(grads.of(&w)?.to_vec::<f64>()?, [0.0, 0.0]);
    assert_eq!(grads.of(&below)?.to_vec::<f64>()?, [0.0, 0.0]);
    assert_eq!(grads.of(&v)?.to_vec::<f64>()?, [8.0, 2.0]);
    // Another way to it counts.
    let mut sum = grads;
    sum.add(square(&w.floor()?.add(&w)?)?.backward()?)?;
    assert_eq!(sum.of(&w)?.to_vec::<f64>()?, [2.0 * 2.2, 2.0 * -5.7]);
    Ok(())
}

#[test]
fn an_updated_parameter_is_a_parameter() -> Result<()> {
    let mut w = leaf(&[4.0, -4.0])?;
    let mut last = f64::INFINITY;
    for _ in 0..30 {
        let loss = square(&w)?;
        let now = loss.item()?.to_f64();
        assert!(now < last, "it keeps learning");
        last = now;
        let grads = loss.backward()?;
        w.update(|w| w.sub(&grads.of(w)?.mul(0.1)?))?;
        assert!(w.is_leaf());
        assert!(text(grads.of(&w)).contains("after the loss"), "not its own");
    }
    assert!(last < 1e-3);
    Ok(())
}

#[test]
fn new_values_take_the_dtype_and_the_sharding_of_the_old_and_leave_their_past() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let w = Tensor::ones([4, 2], DType::BF16, &device)?
        .to_mesh(&mesh, "[@dp, @tp]")?
        .require_grad()?;
    let values = Tensor::ones([4, 2], DType::F32, &device)?
        .to_mesh(&mesh, "[_, @dp]")?
        .require_grad()?;
    let ((next, line), ledger) =
        Ledger::record(|| (w.with_values(&values.mul(1.01).unwrap()), line!()));
    let next = next?;
    assert_eq!(next.type_string(), w.type_string());
    assert!(next.is_leaf());
    assert!(!ledger.entries.is_empty());
    for entry in &ledger.entries {
        assert!(
            entry.caller.contains(&format!("parameters.rs:{line}")),
            "{ledger}"
        );
    }
    let grads = next.cast(DType::F32)?.sum(&[], false)?.backward()?;
    assert_eq!(grads.of(&next)?.type_string(), w.type_string());
    assert!(
        grads.get(&values)?.is_none(),
        "the values were computed apart"
    );

    // What is not tracked is replaced all the same, as the state of an optimizer.
    let frozen = w.detach().with_values(&values.detach())?;
    assert!(!frozen.requires_grad());
    Ok(())
}

#[test]
fn values_that_do_not_fit_are_refused_and_leave_the_variable() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mut w = leaf(&[1.0, 2.0])?;
    let is = w.clone();
    assert!(matches!(
        w.update(|w| w.sum(&[], false)),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(w.update(|w| w.gt(0.0)), Err(Error::DType { .. })));
    let mesh = Mesh::new("dp=2", &device)?;
    assert!(matches!(
        w.update(|w| w.detach().to_mesh(&mesh, "[@dp]")),
        Err(Error::MeshMismatch { .. })
    ));
    assert!(w.is(&is));
    let mut result = w.exp()?;
    let refused = text(result.update(|x| x.mul(2.0)));
    assert!(refused.contains("`exp`") && refused.contains("detach"));
    let counts = Tensor::from_slice(&[1i32], [1], &device)?;
    assert_eq!(counts.with_values(&counts.add(1)?)?.to_vec::<i32>()?, [2]);
    Ok(())
}

#[test]
fn hooks_stay_with_a_parameter_until_they_are_removed() -> Result<()> {
    let mut w = leaf(&[1.0])?;
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    let hook = w.on_gradient(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    })?;
    w.on_gradient(|g| g.mul(2.0).map(Some))?;
    for steps in 1..4 {
        let grads = square(&w)?.backward()?;
        assert_eq!(grads.of(&w)?.item()?.to_f64(), 4.0);
        w.update(|w| w.mul(1.0))?;
        assert_eq!(seen.load(Ordering::Relaxed), steps);
    }
    hook.remove();
    let grads = square(&w)?.backward()?;
    assert_eq!(grads.of(&w)?.item()?.to_f64(), 4.0, "the other one is left");
    assert_eq!(seen.load(Ordering::Relaxed), 3);
    Ok(())
}

#[test]
fn the_gradient_of_a_result_is_kept_where_it_was_asked_for() -> Result<()> {
    let x = leaf(&[1.0, 2.0, 3.0, 4.0])?;
    let parts = x.square()?.split(&[2, 2], 0)?;
    parts[1].retain_grad()?;
    parts[1].on_gradient(|g| g.mul(10.0).map(Some))?;
    let loss = parts[0].sum(&[], false)?.add(&square(&parts[1])?)?;
    let grads = loss.backward_retain()?;
    assert_eq!(
        grads.of(&parts[1])?.to_vec::<f64>()?,
        [180.0, 320.0],
        "as hooks left it"
    );
    assert!(text(grads.of(&parts[0])).contains("retain_grad"));
    assert!(text(x.detach().retain_grad()).contains("not tracked"));
    Ok(())
}

#[test]
fn passes_are_added_to_one_and_cleared_for_the_next_step() -> Result<()> {
    let (a, b) = (leaf(&[1.0])?, leaf(&[2.0])?);
    let mut grads = Gradients::default();
    for _ in 0..3 {
        grads.add(square(&a)?.backward()?)?;
    }
    grads.add(square(&b)?.backward()?)?;
    assert_eq!(grads.of(&a)?.to_vec::<f64>()?, [6.0]);
    assert_eq!(grads.of(&b)?.to_vec::<f64>()?, [4.0]);
    grads.take(&a)?;
    grads.add(square(&a)?.backward()?)?;
    assert_eq!(grads.of(&a)?.to_vec::<f64>()?, [2.0], "begun anew");
    grads.clear();
    assert!(grads.get(&a)?.is_none());
    Ok(())
}
