//! LoRA adapters merged into base weights.

mod common;

use anymesh_checkpoint::lora::{self, Config, Merged};
use anymesh_checkpoint::{Error, Memory, TensorInfo, safetensors};
use anymesh_core::{DType, bf16, f16};
use common::{Random, Temporary, assert_same};
use std::collections::BTreeMap;

fn config(r: usize, alpha: f64) -> Config {
    Config {
        r,
        alpha,
        use_rslora: false,
        fan_in_fan_out: false,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
    }
}

fn values(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| (random.below(2001) as f32 - 1000.0) / 256.0)
        .collect()
}

fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => values
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
        DType::BF16 => values
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        DType::F64 => values
            .iter()
            .flat_map(|&x| f64::from(x).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

fn insert(memory: &mut Memory, name: &str, dtype: DType, shape: &[usize], values: &[f32]) {
    memory
        .insert(
            name,
            TensorInfo {
                dtype,
                shape: shape.to_vec(),
            },
            bytes(dtype, values),
        )
        .expect("fits");
}

/// `W + scale * B A` for W of [outputs, inputs], summed over the rank in order.
fn reference(
    w: &[f32],
    a: &[f32],
    b: &[f32],
    [outputs, inputs, rank]: [usize; 3],
    scale: f32,
) -> Vec<f32> {
    let at = |i: usize, j: usize| {
        w[i * inputs + j]
            + scale * (0..rank).fold(0f32, |sum, k| sum + b[i * rank + k] * a[k * inputs + j])
    };
    (0..outputs)
        .flat_map(|i| (0..inputs).map(move |j| at(i, j)))
        .collect()
}

fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|j| (0..rows).map(move |i| values[i * columns + j]))
        .collect()
}

#[test]
fn every_float_type_and_every_region_is_rounded_once() {
    let mut random = Random(5);
    let [outputs, inputs, rank] = [11, 7, 4];
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        // Base values that the narrow types hold, so that only the sum is rounded.
        let w: Vec<f32> = values(&mut random, outputs * inputs)
            .into_iter()
            .map(|x| (x * 4.0).round() / 4.0)
            .collect();
        let (a, b) = (
            values(&mut random, rank * inputs),
            values(&mut random, outputs * rank),
        );
        let (mut base, mut adapter, mut expected) =
            (Memory::default(), Memory::default(), Memory::default());
        insert(&mut base, "m.q.weight", dtype, &[outputs, inputs], &w);
        insert(&mut base, "m.norm.weight", dtype, &[inputs], &w[..inputs]);
        insert(
            &mut adapter,
            "base_model.model.m.q.lora_A.weight",
            DType::F32,
            &[rank, inputs],
            &a,
        );
        insert(
            &mut adapter,
            "base_model.model.m.q.lora_B.weight",
            DType::F32,
            &[outputs, rank],
            &b,
        );
        let merged = Merged::new(&base, &adapter, &config(rank, 6.0)).expect("they fit");
        assert_eq!(merged.changed().collect::<Vec<_>>(), ["m.q.weight"]);
        insert(
            &mut expected,
            "m.norm.weight",
            dtype,
            &[inputs],
            &w[..inputs],
        );
        let sums = reference(&vec![0.0; w.len()], &a, &b, [outputs, inputs, rank], 1.5);
        let want: Vec<u8> = if dtype == DType::F64 {
            w.iter()
                .zip(&sums)
                .flat_map(|(&w, &s)| (f64::from(w) + f64::from(s)).to_le_bytes())
                .collect()
        } else {
            bytes(dtype, &reference(&w, &a, &b, [outputs, inputs, rank], 1.5))
        };
        expected
            .insert(
                "m.q.weight",
                TensorInfo {
                    dtype,
                    shape: vec![outputs, inputs],
                },
                want,
            )
            .expect("fits");
        assert_same(&merged, &expected);
    }
}

#[test]
fn weights_of_inputs_by_outputs_and_embeddings_are_transposed() {
    let mut random = Random(6);
    let [outputs, inputs, rank] = [5, 6, 3];
    let (w, a, b) = (
        values(&mut random, 30),
        values(&mut random, 18),
        values(&mut random, 15),
    );
    let want = transposed(
        &reference(&w, &a, &b, [outputs, inputs, rank], 2.0),
        outputs,
        inputs,
    );
    let mut base = Memory::default();
    insert(
        &mut base,
        "c.weight",
        DType::F32,
        &[inputs, outputs],
        &transposed(&w, outputs, inputs),
    );
    let mut expected = Memory::default();
    insert(
        &mut expected,
        "c.weight",
        DType::F32,
        &[inputs, outputs],
        &want,
    );
    for (names, flag) in [
        (["c.lora_A.default.weight", "c.lora_B.default.weight"], true),
        (["c.lora_embedding_A", "c.lora_embedding_B"], false),
    ] {
        let mut adapter = Memory::default();
        insert(&mut adapter, names[0], DType::F32, &[rank, inputs], &a);
        insert(&mut adapter, names[1], DType::F32, &[outputs, rank], &b);
        let config = Config {
            fan_in_fan_out: flag,
            ..config(rank, 6.0)
        };
        assert_same(
            &Merged::new(&base, &adapter, &config).expect("they fit"),
            &expected,
        );
    }
}

#[test]
fn a_folder_of_an_adapter_is_read_with_its_own_scales_and_whole_tensors() {
    let folder = Temporary::new("adapter");
    let (mut base, mut adapter, mut expected) =
        (Memory::default(), Memory::default(), Memory::default());
    for (name, rank, scale) in [("q", 4, 8.0), ("k", 9, 3.0)] {
        insert(
            &mut base,
            &format!("l.{name}.weight"),
            DType::F32,
            &[1, 1],
            &[1.0],
        );
        insert(
            &mut adapter,
            &format!("base_model.model.l.{name}.lora_A.weight"),
            DType::F32,
            &[rank, 1],
            &vec![1.0; rank],
        );
        insert(
            &mut adapter,
            &format!("base_model.model.l.{name}.lora_B.weight"),
            DType::F32,
            &[1, rank],
            &vec![1.0; rank],
        );
        insert(
            &mut expected,
            &format!("l.{name}.weight"),
            DType::F32,
            &[1, 1],
            &[1.0 + scale * rank as f32],
        );
    }
    insert(&mut base, "head.weight", DType::BF16, &[2], &[0.0, 0.0]);
    insert(
        &mut adapter,
        "base_model.model.head.weight",
        DType::F32,
        &[2],
        &[1.0, 3.140625],
    );
    insert(
        &mut expected,
        "head.weight",
        DType::BF16,
        &[2],
        &[1.0, 3.140625],
    );
    safetensors::write_source(
        folder.join("adapter_model.safetensors"),
        &adapter,
        &BTreeMap::new(),
        safetensors::CHUNK,
    )
    .expect("writes");
    // 16 / sqrt(4) = 8 and 9 / sqrt(9) = 3.
    let text = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 16, "use_rslora": true, "rank_pattern": {"l.k": 9}, "alpha_pattern": {"k": 9}}"#;
    std::fs::write(folder.join("adapter_config.json"), text).expect("writes");
    let (file, config) = lora::open(&folder.0).expect("opens");
    assert_same(
        &Merged::new(&base, &file, &config).expect("they fit"),
        &expected,
    );
}

#[test]
fn adapters_that_do_not_belong_to_the_base_are_refused_by_name() {
    let mut base = Memory::default();
    insert(&mut base, "q.weight", DType::F32, &[2, 3], &[0.0; 6]);
    base.insert(
        "i.weight",
        TensorInfo {
            dtype: DType::I32,
            shape: vec![2, 3],
        },
        vec![0; 24],
    )
    .expect("fits");
    for (tensors, named) in [
        (vec![("q.lora_A.weight", [1, 3])], "'q'"),
        (
            vec![("q.lora_A.weight", [2, 3]), ("q.lora_B.weight", [2, 2])],
            "'q'",
        ),
        (
            vec![("q.lora_A.weight", [1, 2]), ("q.lora_B.weight", [3, 1])],
            "'q'",
        ),
        (
            vec![("i.lora_A.weight", [1, 3]), ("i.lora_B.weight", [2, 1])],
            "'i'",
        ),
        (
            vec![("x.lora_A.weight", [1, 3]), ("x.lora_B.weight", [2, 1])],
            "'x.weight'",
        ),
        (
            vec![("q.lora_magnitude_vector", [1, 2])],
            "'q.lora_magnitude_vector'",
        ),
        (vec![("q.weight", [3, 2])], "'q.weight'"),
        (vec![("i.weight", [2, 3])], "'i.weight'"),
    ] {
        let mut adapter = Memory::default();
        for (name, shape) in &tensors {
            insert(
                &mut adapter,
                name,
                DType::F32,
                shape,
                &vec![0.0; shape[0] * shape[1]],
            );
        }
        let error = Merged::new(&base, &adapter, &config(1, 1.0)).expect_err(named);
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn configurations_that_are_wrong_say_why() {
    let folder = Temporary::new("adapter-config");
    let path = folder.join("adapter_config.json");
    for (text, reason) in [
        ("", "not JSON"),
        (r#"{"lora_alpha": 1}"#, "no 'r'"),
        (r#"{"r": 0, "lora_alpha": 1}"#, "not a rank"),
        (r#"{"r": 8}"#, "no 'lora_alpha'"),
        (r#"{"r": 8, "lora_alpha": 1, "use_dora": true}"#, "DoRA"),
        (r#"{"r": 8, "lora_alpha": 1, "peft_type": "IA3"}"#, "IA3"),
        (
            r#"{"r": 8, "lora_alpha": 1, "use_rslora": 1}"#,
            "use_rslora",
        ),
        (
            r#"{"r": 8, "lora_alpha": 1, "rank_pattern": {"l.*q": 4}}"#,
            "regular expression",
        ),
    ] {
        std::fs::write(&path, text).expect("writes");
        let error = Config::open(&path).expect_err(reason);
        assert!(
            matches!(&error, Error::Format { detail, .. } if detail.contains(reason)),
            "{error}"
        );
    }
}
