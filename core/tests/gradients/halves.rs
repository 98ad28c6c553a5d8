//! A backward pass in two halves gives what one gives, and computes nothing twice.

use anymesh_core::{
    DType, Device, Mesh, Result, Tensor,
    backend::{Backend, Buffers, Kernel},
    grad::{Gradients, Root, backward_inputs, checkpoint},
    ops::{AttentionOptions, NormOptions, Rng},
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

const WIDTH: usize = 8;

/// Parameters of a block, one of them frozen.
fn weights(mesh: &Mesh) -> Result<Vec<Tensor>> {
    let shapes: [(&[usize], &str); 7] = [
        (&[WIDTH], "[_]"),
        (&[WIDTH, WIDTH], "[@tp?, _]"),
        (&[WIDTH, WIDTH], "[@tp?, _]"),
        (&[WIDTH, WIDTH], "[@tp?, _]"),
        (&[WIDTH, WIDTH], "[_, @tp?]"),
        (&[2 * WIDTH, WIDTH], "[@tp?, _]"),
        (&[WIDTH, 2 * WIDTH], "[_, @tp?]"),
    ];
    let mut rng = Rng::new(5);
    let draw = |(i, (shape, text)): (usize, &(&[usize], &str))| {
        let w = Tensor::normal(*shape, 0.0, 0.5, DType::F64, (mesh, *text), rng.split())?;
        if i == 2 { Ok(w) } else { w.require_grad() }
    };
    shapes.iter().enumerate().map(draw).collect()
}

/// A block as a stage of a pipeline would have it: what it is given, and what it gives.
fn block(x: &Tensor, w: &[Tensor], recompute: bool) -> Result<Tensor> {
    let mlp =
        |h: &Tensor, up: &Tensor, down: &Tensor| h.linear(up, None)?.gelu()?.linear(down, None);
    let h = x.rms_norm(&NormOptions::new().weight(&w[0]))?;
    let heads = |w: &Tensor| h.linear(w, None)?.reshape([2, 6, 2, 4])?.transpose(1, 2);
    let seen =
        heads(&w[1])?.attention(&heads(&w[2])?, &heads(&w[3])?, &AttentionOptions::causal())?;
    let seen = seen.out.transpose(1, 2)?.reshape([2, 6, WIDTH])?;
    let x = x.add(&seen.linear(&w[4], None)?)?;
    let out = if recompute {
        let (up, down) = (w[5].clone(), w[6].clone());
        checkpoint(move |x| Ok(vec![mlp(&x[0], &up, &down)?]), &[&x])?.remove(0)
    } else {
        mlp(&x, &w[5], &w[6])?
    };
    // The parameter of the norm is used a second time, where no input leads.
    out.add(&x)?.mul(&w[0].square()?.sum(&[], false)?)
}

fn input(mesh: &Mesh, seed: u64) -> Result<Tensor> {
    let rng = Rng::new(seed);
    Tensor::normal(
        [2, 6, WIDTH],
        0.0,
        1.0,
        DType::F64,
        (mesh, "[@dp?, _, _]"),
        rng,
    )
}

fn of_all(w: &[Tensor], grads: &Gradients) -> Result<Vec<Vec<f64>>> {
    let tracked = w.iter().filter(|w| w.requires_grad());
    tracked.map(|w| grads.of(w)?.to_vec()).collect()
}

/// The same bits on one device. On a mesh an op may go another way for one gradient than for all of
/// them together, so that sums are added in another order.
fn assert_same(axes: &str, a: &[f64], b: &[f64]) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-13 * a.abs().max(1.0);
    let same = match axes {
        "" => a == b,
        _ => a.len() == b.len() && a.iter().zip(b).all(near),
    };
    assert!(same, "{axes}: {a:?} {b:?}");
}

#[test]
fn two_halves_give_what_the_whole_gives() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    for axes in ["", "dp=2", "tp=2", "dp=2, tp=2", "tp=3"] {
        let mesh = match axes {
            "" => Mesh::single(&cpu),
            axes => Mesh::new(axes, &cpu)?,
        };
        for recompute in [false, true] {
            let (w, seed) = (weights(&mesh)?, input(&mesh, 8)?);
            let x = input(&mesh, 7)?.require_grad()?;
            let grads = block(&x, &w, recompute)?.backward_with(&seed)?;
            let root = Root::of(&block(&x, &w, recompute)?)?;
            let (found, rest) = backward_inputs(&[root], Some(&[seed]), &[&x])?;
            let of_x = found[0].as_ref().expect("it depends on x").to_vec()?;
            assert_same(axes, &of_x, &grads.of(&x)?.to_vec()?);
            let later = rest.backward()?;
            for (a, b) in of_all(&w, &later)?.iter().zip(&of_all(&w, &grads)?) {
                assert_same(axes, a, b);
            }
            assert!(later.get(&x)?.is_none(), "that was the first half");
        }
    }
    Ok(())
}

/// A device that counts what it launches, by family.
fn counting() -> (Device, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let launch = move |backend: &dyn Backend, kernel: Kernel| -> Result<Buffers> {
        if kernel.family() == "matmul" {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        backend.launch(kernel)
    };
    (anymesh_backend_cpu::device().decorated(launch), count)
}

#[test]
fn no_product_is_computed_twice() -> Result<()> {
    let (device, count) = counting();
    let mesh = Mesh::single(&device);
    let (w, seed) = (weights(&mesh)?, input(&mesh, 8)?);
    let x = input(&mesh, 7)?.require_grad()?;
    for recompute in [false, true] {
        let y = block(&x, &w, recompute)?;
        count.store(0, Ordering::Relaxed);
        y.backward_with(&seed)?;
        let whole = count.swap(0, Ordering::Relaxed);
        let (_, rest) = backward_inputs(
            &[Root::of(&block(&x, &w, recompute)?)?],
            Some(&[seed.clone()]),
            &[&x],
        )?;
        // Six in the forward pass.
        let first = count.swap(0, Ordering::Relaxed) - 6;
        rest.backward()?;
        let second = count.swap(0, Ordering::Relaxed);
        assert_eq!(first + second, whole, "{recompute}");
        assert!(first > 0 && second > 0, "{first} {second}");
    }
    Ok(())
}

#[test]
fn ways_that_lead_to_no_input_wait_for_the_second_half() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let leaf = |x: f64| Tensor::new(x, &cpu)?.require_grad();
    let (x, unused, w, v) = (leaf(2.0)?, leaf(1.0)?, leaf(3.0)?, leaf(5.0)?);
    // Two outputs, of which one does not depend on the input; a parameter that is an output.
    let (a, b) = (x.mul(&w)?, w.mul(&v)?);
    let seeds = [1.0, 10.0, 100.0].map(|s| Tensor::new(s, &cpu));
    let seeds = seeds.into_iter().collect::<Result<Vec<_>>>()?;
    let (found, rest) = backward_inputs(
        &[Root::of(&a)?, Root::of(&b)?, Root::of(&v)?],
        Some(&seeds),
        &[&x, &unused],
    )?;
    let value = |t: &Tensor| t.item().map(|v| v.to_f64());
    assert_eq!(found[0].as_ref().map(value).transpose()?, Some(3.0));
    assert!(found[1].is_none());
    let later = rest.backward()?;
    assert_eq!(value(&later.of(&w)?)?, 2.0 + 10.0 * 5.0);
    assert_eq!(value(&later.of(&v)?)?, 10.0 * 3.0 + 100.0);
    // What is flat is zero, in whichever half it is met.
    let y = x.mul(&w)?.floor()?;
    let (found, rest) = backward_inputs(&[Root::of(&y)?], None, &[&x])?;
    assert_eq!(found[0].as_ref().map(value).transpose()?, Some(0.0));
    assert_eq!(value(&rest.backward()?.of(&w)?)?, 0.0);
    Ok(())
}

#[test]
fn what_is_not_tracked_is_refused() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let x = Tensor::new(2f64, &cpu)?;
    let w = Tensor::new(2f64, &cpu)?.require_grad()?;
    let y = x.mul(&w)?;
    let error = backward_inputs(&[Root::of(&y)?], None, &[&x]).expect_err("x is not tracked");
    assert!(error.to_string().contains("require_grad"), "{error}");
    let error = backward_inputs(&[Root::of(&y)?], Some(&[]), &[&w]).expect_err("a seed for each");
    assert!(error.to_string().contains("seeds"), "{error}");
    Ok(())
}
