//! What a backward pass holds at its peak, by a counting allocator: alone in its program, since
//! every allocation counts.

use anymesh_core::{DType, Result, Tensor, grad::checkpoint, ops::Rng};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const LAYERS: usize = 12;
/// Activations are large, so that the products' work space is small beside them, and weights too.
const BATCH: usize = 100_000;
const WIDTH: usize = 64;
const TENSOR: usize = BATCH * WIDTH * 4;

fn layers() -> Result<Vec<Tensor>> {
    let device = anymesh_backend_cpu::device();
    let make = |i| {
        Tensor::normal(
            [WIDTH, WIDTH],
            0.0,
            (2.0 / WIDTH as f64).sqrt(),
            DType::F32,
            &device,
            Rng::new(i),
        )?
        .require_grad()
    };
    (0..LAYERS as u64).map(make).collect()
}

/// Bytes above `before` at the peak of `f`.
fn peak_of<T>(before: usize, f: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    ALLOCATOR.reset_peak_usage();
    let result = f()?;
    Ok((result, ALLOCATOR.peak_usage() - before))
}

#[test]
fn a_backward_pass_holds_what_a_hand_count_of_live_tensors_gives() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let x = Tensor::normal([BATCH, WIDTH], 0.0, 1.0, DType::F32, &device, Rng::new(99))?;
    let weights = layers()?;
    let before = ALLOCATOR.current_usage();
    let check = |what: &str, measured: usize, tensors: usize| {
        let ratio = measured as f64 / (tensors * TENSOR) as f64;
        println!("{what}: {ratio:.3} of {tensors} activations");
        assert!(
            ratio < 1.1,
            "{what}: {measured} bytes are {ratio} times the {tensors} activations of a hand count"
        );
    };
    // The host keeps freed memory for reuse, which counts as used. So the smaller run comes first:
    // what it leaves is used by the larger one. With every three layers recomputed, the inputs of
    // the second to fourth group are kept; on the way there are a result, the next product and its
    // result.
    let groups: Vec<Vec<Tensor>> = weights.chunks(3).map(<[Tensor]>::to_vec).collect();
    let forward = || {
        let run = |h: Tensor, group: &Vec<Tensor>| {
            let group = group.clone();
            let f = move |h: &[Tensor]| {
                Ok(vec![group.iter().try_fold(h[0].clone(), |h, w| {
                    h.linear(w, None)?.relu()
                })?])
            };
            Ok(checkpoint(f, &[&h])?.remove(0))
        };
        groups.iter().try_fold(x.clone(), run)?.sum(&[], false)
    };
    let (loss, forward_peak) = peak_of(before, forward)?;
    check("forward peak with checkpoints", forward_peak, 3 + 3);
    let (grads, peak) = peak_of(before, || loss.backward())?;
    // Three inputs, the results of the last group, and two gradients in flight.
    check("backward peak with checkpoints", peak, 3 + 3 + 2);
    drop((loss, grads));

    let forward = || {
        weights
            .iter()
            .try_fold(x.clone(), |h, w| h.linear(w, None)?.relu())?
            .sum(&[], false)
    };
    let (loss, forward_peak) = peak_of(before, forward)?;
    let kept = ALLOCATOR.current_usage() - before;
    let (grads, peak) = peak_of(before, || loss.backward())?;
    assert!(weights.iter().all(|w| grads.partial(w).is_ok()));

    // Forward keeps the result of each layer, which is the next one's input and all that the slope
    // of relu needs; on the way there is one product more.
    check("kept for the backward pass", kept, LAYERS);
    check("forward peak", forward_peak, LAYERS + 1);
    // The gradient of the loss is one number that is repeated without memory. Then, layer by layer:
    // the results below, the gradient that came and the one that goes on; each layer gives back its
    // result before the next gradient is made.
    check("backward peak", peak, LAYERS + 1);
    Ok(())
}
