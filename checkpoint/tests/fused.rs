//! Fused optimizer buffers and master weights: stored under their names in their shapes, loaded
//! into any other layout.

mod common;

use anymesh_checkpoint::{
    Checkpoint, Contents, Error, Fused, FusedPart, Load, MASTER, Source, Weights, save,
};
use anymesh_core::{DType, Mesh, Sharding, Tensor};
use common::{Random, Temporary};
use std::collections::BTreeMap;

/// A buffer of random bytes, with tensors of random shapes in it.
fn fused(
    dice: &mut Random,
    mesh: &Mesh,
    dtype: DType,
    shapes: &[(String, Vec<usize>)],
) -> Result<(Fused, Vec<u8>), Error> {
    let (parts, length) = Fused::places(
        shapes.iter().map(|(n, s)| (n.as_str(), s.as_slice())),
        1 + dice.below(9),
    );
    let bytes: Vec<u8> = (0..length * dtype.size())
        .map(|_| dice.next() as u8)
        .collect();
    let buffer = Tensor::from_bytes(&bytes, dtype, [length], mesh.device(0))?;
    let axes = mesh.axes().len();
    // Cut over some of the axes, whole along the others.
    let sharding = (0..axes)
        .filter(|_| dice.below(3) > 0)
        .fold(Sharding::replicated(), |s, axis| s.cut(0, axis));
    Ok((
        Fused {
            buffer: buffer.to_mesh(mesh, sharding)?,
            parts,
        },
        bytes,
    ))
}

#[test]
fn slices_of_a_fused_buffer_are_tensors_to_every_other_layout() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mut dice = Random(5);
    for round in 0..40 {
        let root = Temporary::here();
        let from = Mesh::new(["x=3", "dp=2, tp=4", "x=1", "x=7"][round % 4], &device)?;
        let shape = |dice: &mut Random| {
            (0..dice.below(4))
                .map(|_| dice.below(7))
                .collect::<Vec<_>>()
        };
        let shapes: Vec<(String, Vec<usize>)> = (0..5)
            .map(|i| (format!("m.{i}"), shape(&mut dice)))
            .collect();
        let dtype = [DType::F32, DType::BF16, DType::F64, DType::F8E4M3][round / 4 % 4];
        let (saved, bytes) = fused(&mut dice, &from, dtype, &shapes)?;
        let checkpoint = Checkpoint::open(save(
            &root,
            "one",
            &Contents {
                fused: vec![saved.clone()],
                ..Contents::default()
            },
        )?)?;
        assert_eq!(checkpoint.verify(), []);
        for FusedPart {
            name,
            shape,
            offset,
        } in &saved.parts
        {
            let n = shape.iter().product::<usize>();
            assert_eq!(checkpoint.info(name)?.shape, *shape);
            assert_eq!(
                checkpoint.read_all(name)?,
                bytes[offset * dtype.size()..(offset + n) * dtype.size()],
                "{name} of round {round}"
            );
        }
        // Into another buffer, in another order, cut otherwise.
        let to = Mesh::new(["x=5", "x=2", "a=2, b=2, c=2"][round % 3], &device)?;
        let turned: Vec<(String, Vec<usize>)> = shapes.iter().rev().cloned().collect();
        let (there, old) = fused(&mut dice, &to, dtype, &turned)?;
        let loaded = Load::default().replace(
            &checkpoint,
            &Contents {
                fused: vec![there.clone()],
                ..Contents::default()
            },
        )?;
        let mut expected = old;
        for part in &there.parts {
            let right = checkpoint.read_all(&part.name)?;
            expected[part.offset * dtype.size()..][..right.len()].copy_from_slice(&right);
        }
        for (rank, part) in loaded.fused[0].buffer.shards() {
            let region =
                loaded.fused[0]
                    .buffer
                    .sharding()
                    .region(&to, rank, loaded.fused[0].buffer.shape());
            let right =
                &expected[region.start[0] * dtype.size()..][..region.shape[0] * dtype.size()];
            assert_eq!(
                part.to_bytes()?,
                right,
                "rank {rank} of round {round}: padding stays, the rest is loaded"
            );
        }
    }
    Ok(())
}

#[test]
fn buffers_that_cannot_be_are_refused() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let part = |name: &str, shape: &[usize], offset| FusedPart {
        name: name.into(),
        shape: shape.to_vec(),
        offset,
    };
    let flat = Tensor::zeros([10], DType::F32, &device)?;
    let contents = |buffer: &Tensor, parts: Vec<FusedPart>| Contents {
        fused: vec![Fused {
            buffer: buffer.clone(),
            parts,
        }],
        ..Contents::default()
    };
    let mesh = Mesh::new("x=2", &device)?;
    for (contents, words) in [
        (
            contents(&flat, vec![part("a", &[3, 4], 0)]),
            "does not lie inside",
        ),
        (
            contents(&flat, vec![part("a", &[5], 0), part("b", &[5], 4)]),
            "begins before",
        ),
        (
            contents(&flat, vec![part("a", &[5], 0), part("a", &[5], 5)]),
            "two tensors 'a'",
        ),
        (
            contents(&flat, vec![part("a", &[usize::MAX, 2], 0)]),
            "does not lie inside",
        ),
        (
            contents(&flat.reshape([2, 5])?, vec![part("a", &[5], 0)]),
            "one dimension",
        ),
        (
            contents(
                &flat.to_mesh(&mesh, "[_]{sum:x}")?,
                vec![part("a", &[5], 0)],
            ),
            "partial",
        ),
    ] {
        let error = save(&root, "one", &contents).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    Ok(())
}

/// bf16 weights, their masters in a fused buffer, and a float32 weight without one.
fn model(mesh: &Mesh, value: f64, weights: Weights) -> Result<Contents, Error> {
    let device = mesh.device(0);
    let master = Tensor::full([6, 4], value, DType::F32, device)?;
    let (parts, length) = Fused::places([("master.w", &[6usize, 4][..])], 32);
    let padding = Tensor::zeros([length - 24], DType::F32, device)?;
    let buffer = Tensor::concat(&[&master.reshape([24])?, &padding], 0)?.to_mesh(mesh, "[@x]")?;
    let tensors = BTreeMap::from([
        (
            "w".to_string(),
            master.cast(DType::BF16)?.to_mesh(mesh, "[_, @x]")?,
        ),
        (
            "gate".to_string(),
            Tensor::full([3], value, DType::F32, device)?,
        ),
    ]);
    Ok(Contents {
        tensors,
        fused: vec![Fused { buffer, parts }],
        weights,
        ..Contents::default()
    })
}

#[test]
fn master_weights_are_stored_dropped_or_stored_alone_and_made_again() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=2", &device)?;
    // Not a number that bf16 has.
    let value = 1.0 + 1.0 / 1024.0;
    for (weights, stored, rebuilt, master) in [
        (Weights::Both, vec!["gate", "master.w", "w"], vec![], value),
        (Weights::Model, vec!["gate", "w"], vec!["master.w"], 1.0),
        (Weights::Masters, vec!["gate", "master.w"], vec!["w"], value),
    ] {
        let root = Temporary::here();
        let checkpoint = Checkpoint::open(save(&root, "one", &model(&mesh, value, weights)?)?)?;
        assert_eq!(checkpoint.tensors().keys().collect::<Vec<_>>(), stored);
        let there = model(&Mesh::new("x=3", &device)?, 0.0, weights)?;
        let plain = Load::default().replace(&checkpoint, &there);
        assert_eq!(
            plain.is_ok(),
            weights == Weights::Both,
            "nothing is made of something else unless that was asked for"
        );
        let loaded = Load {
            rebuild: true,
            ..Load::default()
        }
        .replace(&checkpoint, &there)?;
        assert_eq!(loaded.rebuilt, rebuilt);
        assert_eq!(loaded.tensors["w"].type_string(), "bf16[6, 4@x]");
        assert_eq!(
            loaded.tensors["w"].cast(DType::F64)?.to_vec::<f64>()?,
            [1.0; 24]
        );
        assert_eq!(loaded.tensors["gate"].to_vec::<f32>()?, [value as f32; 3]);
        assert_eq!(
            loaded.fused[0].buffer.to_vec::<f32>()?[..24],
            [master as f32; 24]
        );
        // Inference wants only the weights, whatever was stored.
        let inference = Contents::new(0, there.tensors.clone());
        let lenient = Load {
            rebuild: true,
            allow_unexpected: weights == Weights::Both,
            ..Load::default()
        };
        assert_eq!(
            lenient.replace(&checkpoint, &inference)?.tensors["w"]
                .cast(DType::F64)?
                .to_vec::<f64>()?,
            [1.0; 24]
        );
    }
    assert_eq!(MASTER, "master.");
    Ok(())
}
