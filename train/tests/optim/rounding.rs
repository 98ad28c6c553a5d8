//! Rounding to bf16 by chance: to a neighbour, as often as it should, on every mesh alike.

use super::{MESHES, device};
use anymesh_core::{DType, Mesh, Tensor, bf16, ops::Rng};
use anymesh_train::{Result, optim::round_by_chance};

/// The two bf16 numbers around a finite f32 of normal size.
fn neighbours(x: f32) -> (f32, f32) {
    let low = f32::from_bits(x.to_bits() & 0xffff_0000);
    let high = f32::from_bits((x.to_bits() & 0xffff_0000).wrapping_add(0x1_0000));
    (low, high)
}

#[test]
fn every_number_goes_to_one_of_its_neighbours() -> Result<()> {
    // All exponents and signs, with mantissas around every border of bf16.
    let mut inputs = vec![];
    for exponent in 1..=254u32 {
        for head in [0u32, 1, 2, 63, 64, 126, 127] {
            for tail in [0u32, 1, 0x3fff, 0x7fff, 0x8000, 0x8001, 0xc000, 0xffff] {
                let bits = exponent << 23 | head << 16 | tail;
                inputs.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
    }
    let (mut up, mut between) = (0, 0);
    for seed in 0..4 {
        let x = Tensor::from_slice(&inputs, [inputs.len()], &device())?;
        let rounded = round_by_chance(&x, Rng::new(seed))?.to_vec::<bf16>()?;
        for (x, y) in inputs.iter().zip(rounded) {
            let ((low, high), y) = (neighbours(*x), y.to_f32());
            match low == *x {
                true => assert_eq!(y, *x, "what bf16 holds stays"),
                false => {
                    assert!(
                        y == low || y == high,
                        "{x:e}: {y:e} is not {low:e} or {high:e}"
                    );
                    between += 1;
                    up += usize::from(y == high);
                }
            }
        }
    }
    // The tails are even around the middle.
    let share = up as f64 / between as f64;
    assert!(
        (0.49..0.51).contains(&share),
        "{share} of {between} went up"
    );
    Ok(())
}

#[test]
fn neighbours_come_as_often_as_they_are_near() -> Result<()> {
    const COUNT: usize = 1 << 16;
    // Inside of a binade, at both ends of one, and below zero.
    for base in [1.0f32, 1.5, 1.992_187_5, -1.0, -3.984_375, 2.5e-30, 7e20] {
        let (low, _) = neighbours(base);
        for tail in [1u32, 0x0800, 0x4000, 0x7fff, 0x8000, 0xb333, 0xfff0] {
            let x = f32::from_bits(low.to_bits() | tail);
            let (_, high) = neighbours(x);
            let values = Tensor::full([COUNT], f64::from(x), DType::F32, &device())?;
            let rounded = round_by_chance(&values, Rng::new(u64::from(tail)))?.to_vec::<bf16>()?;
            let up = rounded.iter().filter(|y| y.to_f32() == high).count() as f64;
            let p = f64::from(tail) / 65536.0;
            let deviation = (p * (1.0 - p) * COUNT as f64).sqrt();
            let off = (up - p * COUNT as f64).abs();
            assert!(off <= 4.5 * deviation, "{x:e}: {up} of {COUNT} at {p}");
        }
    }
    Ok(())
}

#[test]
fn what_is_not_a_normal_number_is_rounded_as_usual() -> Result<()> {
    let inputs = [
        0.0f32,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        f32::NAN,
    ];
    let x = Tensor::from_slice(&inputs, [inputs.len()], &device())?;
    let rounded = round_by_chance(&x, Rng::new(1))?.to_vec::<bf16>()?;
    for (x, y) in inputs.iter().zip(rounded) {
        let nearest = bf16::from_f32(*x);
        assert!(y == nearest || y.is_nan() && nearest.is_nan(), "{x}: {y}");
    }
    // Below the normal numbers nothing is further than the nearest.
    let small: Vec<f32> = (0..2000u32).map(|i| f32::from_bits(i * 4001)).collect();
    let x = Tensor::from_slice(&small, [small.len()], &device())?;
    let rounded = round_by_chance(&x, Rng::new(1))?.to_vec::<bf16>()?;
    for (x, y) in small.iter().zip(rounded) {
        let apart = (f64::from(y.to_f32()) - f64::from(*x)).abs();
        assert!(apart <= 2f64.powi(-133), "{x:e}: {y}");
    }
    Ok(())
}

#[test]
fn choices_are_the_same_on_every_mesh() -> Result<()> {
    let at = |at: &[usize]| super::number(5, at) as f32;
    let rng = Rng { seed: 9, stream: 3 };
    let plain = Tensor::from_fn([7, 10], &device(), at)?;
    let plain = round_by_chance(&plain, rng)?.to_vec::<bf16>()?;
    for (axes, shardings, _) in MESHES {
        let mesh = Mesh::new(axes, &device())?;
        for sharding in shardings {
            let x = Tensor::from_fn([7, 10], (&mesh, *sharding), at)?;
            let rounded = round_by_chance(&x, rng)?;
            assert_eq!(rounded.sharding(), x.sharding());
            assert_eq!(rounded.to_vec::<bf16>()?, plain, "{axes} {sharding}");
        }
    }
    Ok(())
}
