//! Where nothing is wrong, nothing is found.

use super::step::{MESHES, Program, train};
use anymesh_core::{
    DType, Mesh, Result, Tensor,
    compare::{Compare, Tolerance, compare},
    transport::{Background, InProcess},
};
use std::sync::Arc;

#[test]
fn a_step_of_training_agrees_on_every_mesh() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    for axes in MESHES {
        for recompute in [false, true] {
            let program = Program {
                recompute,
                ..Program::default()
            };
            let mesh = Mesh::new(axes, &cpu)?;
            let found = compare(|m: &Mesh| train(&program, m), &Mesh::single(&cpu), &mesh)?;
            assert!(found.is_same(), "{axes}, recompute {recompute}:\n{found}");
            assert!(found.values > 300, "only {} values", found.values);
        }
    }
    Ok(())
}

#[test]
fn meshes_agree_with_each_other_and_small_floats_too() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    for (a, b) in [("dp=2", "tp=2"), ("tp=3", "dp=4, tp=2")] {
        let program = Program::default();
        let (a, b) = (Mesh::new(a, &cpu)?, Mesh::new(b, &cpu)?);
        let found = compare(|m: &Mesh| train(&program, m), &a, &b)?;
        assert!(found.is_same(), "{found}");
    }
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let program = Program {
            dtype,
            ..Program::default()
        };
        for axes in ["dp=2, tp=2", "tp=3"] {
            let mesh = Mesh::new(axes, &cpu)?;
            let found = compare(|m: &Mesh| train(&program, m), &Mesh::single(&cpu), &mesh)?;
            assert!(found.is_same(), "{dtype} on {axes}:\n{found}");
        }
    }
    Ok(())
}

#[test]
fn reductions_beside_the_program_are_seen_too() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let beside = Background::new(Arc::new(InProcess));
    let mesh = Mesh::new("dp=2, tp=2", &cpu)?.with_transport(beside);
    let program = Program::default();
    let found = compare(|m: &Mesh| train(&program, m), &Mesh::single(&cpu), &mesh)?;
    assert!(found.is_same(), "{found}");
    Ok(())
}

#[test]
fn out_of_step_the_runs_are_their_own() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let program = Program::default();
    let (a, b) = (Mesh::single(&cpu), Mesh::new("dp=2, tp=2", &cpu)?);
    let plain: Vec<Vec<f32>> = values(&train(&program, &b)?)?;
    let loose = Compare {
        in_step: false,
        tolerance: Some(Tolerance {
            relative: 1e-3,
            absolute: 1e-6,
        }),
        ..Compare::default()
    };
    let mut seen = vec![];
    let found = loose.run(
        |m: &Mesh| {
            seen.push(values(&train(&program, m)?)?);
            Ok::<_, anymesh_core::Error>(())
        },
        &a,
        &b,
    )?;
    assert!(found.is_same(), "{found}");
    assert_eq!(seen[1], plain, "to be seen changes nothing");
    // In step the second run ends with the values of the first.
    let mut seen = vec![];
    Compare::default().run(
        |m: &Mesh| {
            seen.push(values(&train(&program, m)?)?);
            Ok::<_, anymesh_core::Error>(())
        },
        &a,
        &b,
    )?;
    assert_eq!(seen[0], seen[1]);
    assert_ne!(seen[0], plain, "rounding differs, else this shows nothing");
    Ok(())
}

fn values(tensors: &[Tensor]) -> Result<Vec<Vec<f32>>> {
    tensors.iter().map(|t| t.to_vec::<f32>()).collect()
}

#[test]
fn a_run_has_the_bits_of_itself() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let bits = Compare {
        tolerance: Some(Tolerance::BITS),
        ..Compare::default()
    };
    for axes in MESHES {
        for recompute in [false, true] {
            let program = Program {
                recompute,
                ..Program::default()
            };
            let mesh = Mesh::new(axes, &cpu)?;
            let found = bits.run(|m: &Mesh| train(&program, m), &mesh, &mesh)?;
            assert!(found.is_same(), "{axes}: {found}");
        }
    }
    Ok(())
}
