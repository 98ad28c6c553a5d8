//! Deferred execution against eager one, on the device itself.

use crate::Suite;
use anymesh::{
    DType, Device, Mesh, Result, Tensor,
    grad::{GradOptions, grad},
    ops::{CrossEntropyOptions, Expr, NormOptions, Rng},
};

#[path = "../../engine/tests/random/hold.rs"]
mod hold;
#[path = "../../cluster/tests/cluster/model.rs"]
#[allow(dead_code, reason = "shared with the tests of clusters")]
mod model;

pub(crate) const SUITE: Suite = &[
    (
        "random_programs_give_the_same_bits_deferred_and_not",
        random_programs_give_the_same_bits_deferred_and_not,
    ),
    (
        "a_model_is_trained_to_the_same_bits_deferred_and_not",
        a_model_is_trained_to_the_same_bits_deferred_and_not,
    ),
    (
        "conversions_around_other_kernels_give_the_same_bits_deferred_and_not",
        conversions_around_other_kernels_give_the_same_bits_deferred_and_not,
    ),
    (
        "what_is_composed_along_rows_gives_the_same_bits_deferred_and_not",
        what_is_composed_along_rows_gives_the_same_bits_deferred_and_not,
    ),
    (
        "a_value_minus_itself_is_nan_where_it_is_infinite",
        a_value_minus_itself_is_nan_where_it_is_infinite,
    ),
];

/// CubeCL makes a zero of `x - x`, whatever `x` is. Drivers of wgpu may: WGSL lets them assume that
/// there are no infinities.
fn a_value_minus_itself_is_nan_where_it_is_infinite(device: &Device) {
    let may_assume = device.name().starts_with("wgpu");
    let run = |device: &Device, values: &Tensor| -> Result<()> {
        let x = values.to_device(device)?;
        let twice = x.mul(2.0)?;
        let in_one = Expr::new("none", &[&twice]).map(x.dtype(), |a| a.x[0] - a.x[0])?;
        for none in [twice.sub(&twice)?, in_one] {
            let none = none.cast(DType::F32)?.to_vec::<f32>()?;
            assert_eq!(none[..2], [0.0, 0.0], "{} on {device}", x.dtype());
            let right = |x: &f32| x.is_nan() || may_assume && *x == 0.0;
            assert!(none[2..].iter().all(right), "{none:?} on {device}");
        }
        Ok(())
    };
    let eager = device.innermost();
    let host = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    let values = [1.0f32, -3.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let values = Tensor::new(&values, &host).and_then(|x| x.cast(dtype));
        let values = values.expect("the host has all dtypes");
        for device in [eager, &anymesh_engine::deferred(eager)] {
            if device.supports(dtype) {
                run(device, &values).expect("runs");
            }
        }
    }
}

/// Programs in which small floats are widened before, and rounded after what is computed in `f32`:
/// results, in `f32`.
fn converted(device: &Device, dtype: DType, n: usize) -> Result<Vec<Tensor>> {
    let draw = |seed: u64, shape: &[usize]| {
        Tensor::normal(shape, 0.0, 1.5, DType::F32, device, Rng::new(seed))
    };
    let x = draw(1, &[4, 33, n])?.cast(dtype)?.require_grad()?;
    let weight = draw(2, &[n])?.require_grad()?;
    let bias = draw(3, &[n])?.cast(dtype)?;
    let seed = draw(4, &[4, 33, n])?.cast(dtype)?;
    let wide = |x: &Tensor| x.cast(DType::F32);
    let targets = Tensor::from_fn([4 * 33], device, |at| (at[0] * 7 % n) as i32)?;
    let norm = NormOptions::new().weight(&weight);
    let centered = wide(&bias)?;
    let centered = NormOptions::new().weight(&weight).bias(&centered);
    let rows = [
        wide(&x)?.rms_norm(&norm)?.cast(dtype)?,
        wide(&x)?.layer_norm(&centered)?.cast(dtype)?,
        wide(&x)?.softmax(-1)?.cast(dtype)?,
        // Not for rows: longer functions that a device may shorten where little of them is left.
        ((wide(&x)? / 3.0)?.tanh()? / 7.0)?.cast(dtype)?,
        wide(&x)?.erf()?.cast(dtype)?,
        wide(&x)?.exp()?.cast(dtype)?,
    ];
    let logits = wide(&x)?.reshape([4 * 33, n])?;
    let loss = logits.cross_entropy(&targets, &CrossEntropyOptions::default())?;
    let mut all = rows.iter().map(wide).collect::<Result<Vec<_>>>()?;
    for output in rows {
        let options = GradOptions {
            seeds: Some(vec![seed.clone()]),
            allow_unused: true,
            ..GradOptions::default()
        };
        for gradient in grad(&[&output], &[&x, &weight], &options)? {
            all.push(wide(&gradient)?);
        }
    }
    all.push(wide(&loss.backward()?.of(&x)?)?);
    all.push(loss);
    Ok(all)
}

/// Attention, norms and a loss of sums, products and exponentials, and their gradients, in `f32`.
fn composed(device: &Device, dtype: DType, n: usize) -> Result<Vec<Tensor>> {
    let draw = |seed: u64, shape: &[usize]| {
        Tensor::normal(shape, 0.0, 1.5, DType::F32, device, Rng::new(seed))
    };
    let wide = |x: &Tensor| x.cast(DType::F32);
    let x = draw(1, &[2, 3, 20, n])?.cast(dtype)?.require_grad()?;
    let weight = draw(2, &[n])?.require_grad()?;
    let mask = Tensor::tril_mask(20, n, 4, device)?;
    let seed = draw(4, &[2, 3, 20, n])?.cast(dtype)?;

    let scores = mask.where_(&(wide(&x)? * 0.125)?, f32::NEG_INFINITY)?;
    let e = (&scores - scores.amax(&[-1], true)?)?.exp()?;
    let softmax = (&e / e.sum(&[-1], true)?)?.cast(dtype)?;

    let beside = (wide(&x)? + wide(&softmax)?)?;
    let off = (&beside - beside.mean(&[-1], true)?)?;
    let deviation = (off.square()?.mean(&[-1], true)? + 1e-5)?.sqrt()?;
    let norm = (off / deviation * &weight)?.cast(dtype)?;

    let logits = (wide(&norm)? * 3.0)?;
    let loss = (logits.logsumexp(&[-1], true)? - logits.amin(&[-1], true)?)?.mean_all()?;
    let turned = softmax.transpose(-1, -2)?.contiguous()?;
    // Products with several uses, of what another map made.
    let gelu = (wide(&x)? + wide(&seed)?)?.gelu_tanh()?;
    let mut all = vec![wide(&softmax)?, wide(&norm)?, wide(&turned)?, gelu];
    for output in [&softmax, &norm, &turned] {
        let seed = match output.dims() == seed.dims() {
            true => seed.clone(),
            false => seed.transpose(-1, -2)?,
        };
        let options = GradOptions {
            seeds: Some(vec![seed]),
            allow_unused: true,
            retain_graph: true,
            ..GradOptions::default()
        };
        for gradient in grad(&[output], &[&x, &weight], &options)? {
            all.push(wide(&gradient)?);
        }
    }
    all.push(wide(&loss.backward()?.of(&x)?)?);
    all.push(loss);
    Ok(all)
}

/// The results of a program on a device, and on a deferred one around it.
fn hold_bits(
    device: &Device,
    program: fn(&Device, DType, usize) -> Result<Vec<Tensor>>,
    dtypes: &[DType],
    sizes: &[usize],
) {
    let eager = device.innermost();
    let bits = |results: Result<Vec<Tensor>>| -> Vec<Vec<u32>> {
        let values = |x: &Tensor| x.to_vec::<f32>().expect("it is there");
        let bits = |x: &Tensor| values(x).into_iter().map(f32::to_bits).collect();
        results.expect("runs").iter().map(bits).collect()
    };
    for &dtype in dtypes.iter().filter(|dtype| device.supports(**dtype)) {
        for &n in sizes {
            let expected = bits(program(eager, dtype, n));
            // With all that is only held stored, and left to be made where it is read.
            for recipes in [u64::MAX, 0] {
                let mut options = anymesh_engine::Options::of(eager);
                options.first = true;
                options.recipes = recipes;
                let deferred = anymesh_engine::deferred_with(eager, options);
                let got = bits(program(&deferred, dtype, n));
                assert_eq!(expected.len(), got.len());
                for (k, (expected, got)) in expected.iter().zip(&got).enumerate() {
                    let wrong = expected.iter().zip(got).filter(|(a, b)| a != b).count();
                    let all = got.len();
                    assert_eq!(wrong, 0, "of {all} values of result {k}, {dtype} {n}");
                }
            }
        }
    }
}

fn conversions_around_other_kernels_give_the_same_bits_deferred_and_not(device: &Device) {
    hold_bits(device, converted, &[DType::BF16, DType::F16], &[256, 770]);
}

fn what_is_composed_along_rows_gives_the_same_bits_deferred_and_not(device: &Device) {
    hold_bits(device, composed, &[DType::F32, DType::BF16], &[77, 770]);
}

/// What a model and its optimizer hold after so many steps, and all losses, as bits.
fn trained(device: &Device, axes: &str, steps: usize) -> Result<Vec<(String, Vec<u32>)>> {
    let mut training = model::Training::new(&Mesh::new(axes, device)?, "plain")?;
    let mut losses = vec![];
    for _ in 0..steps {
        losses.push((training.step()? as f32).to_bits());
    }
    let mut all = vec![("loss".to_string(), losses)];
    for (name, tensor) in &training.tensors {
        let values = tensor.full_tensor()?.to_vec::<f32>()?;
        all.push((name.clone(), values.into_iter().map(f32::to_bits).collect()));
    }
    Ok(all)
}

/// Steps whose lists come again: fused at once, and from the second time on.
fn a_model_is_trained_to_the_same_bits_deferred_and_not(device: &Device) {
    let eager = device.innermost();
    for axes in ["dp=1", "dp=4"] {
        for steps in 1..=TIMES {
            let expected = trained(eager, axes, steps).expect("it trains");
            for first in [true, false] {
                let mut options = anymesh_engine::Options::of(eager);
                options.first = first;
                let deferred = anymesh_engine::deferred_with(eager, options);
                let got = trained(&deferred, axes, steps).expect("it trains");
                for ((name, expected), (_, got)) in expected.iter().zip(&got) {
                    let differs = |(a, b): &(&u32, &u32)| a != b;
                    let wrong = expected.iter().zip(got).filter(differs).count();
                    assert_eq!(
                        wrong, 0,
                        "values of {name} after {steps} steps on {axes}, first {first}"
                    );
                }
            }
        }
    }
}

/// A GPU knows launches from the third time on, and lists of them from the time after that.
const TIMES: usize = 6;

/// `ANYMESH_PROGRAMS` says how many, `ANYMESH_SEED` from which on. Kernels are compiled for each, so
/// that they are few by default.
fn random_programs_give_the_same_bits_deferred_and_not(device: &Device) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("ANYMESH_SEED").unwrap_or(0);
    let count = number("ANYMESH_PROGRAMS").unwrap_or(10);
    let eager = device.innermost();
    // A GPU tells its faults when it is read: `faults.rs` has those.
    let gpu = !matches!(eager.backend().host_memory(0), Ok(Some(_)));
    hold::hold(eager, first..first + count, TIMES, gpu);
}
