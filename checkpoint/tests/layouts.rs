//! Layouts over the tensors of a model as models are: matrices, norms and biases of one dimension,
//! a scalar, experts of three.

use anymesh_checkpoint::{Error, Layouts, Memory, TensorInfo};
use anymesh_core::{DType, Mesh, meta};
use std::collections::BTreeMap;

/// A model of two layers with the names of Hugging Face.
fn model() -> Memory {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![64, 16]),
        ("model.norm.weight".into(), vec![16]),
        ("lm_head.weight".into(), vec![64, 16]),
        ("rotary_scale".into(), vec![]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm.weight", vec![16]),
            ("self_attn.qkv_proj.weight", vec![48, 16]),
            ("self_attn.qkv_proj.bias", vec![48]),
            ("self_attn.o_proj.weight", vec![16, 16]),
            ("mlp.experts.up.weight", vec![4, 32, 16]),
            ("mlp.experts.down.weight", vec![4, 16, 32]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}"), shape));
        }
    }
    let mut model = Memory::default();
    for (name, shape) in tensors {
        let info = TensorInfo {
            dtype: DType::BF16,
            shape,
        };
        let bytes = vec![0; info.bytes()];
        model.insert(name, info, bytes).expect("as many bytes");
    }
    model
}

fn place(layouts: &[&str]) -> Result<BTreeMap<String, String>, Error> {
    let mesh = Mesh::new("dp=2, tp=4", &meta())?;
    let placed = Layouts::new(&mesh, layouts)?.place(&model())?;
    Ok(placed
        .into_iter()
        .map(|(name, placed)| (name, placed.layout()))
        .collect())
}

#[test]
fn a_layout_is_for_the_tensors_of_its_rank() {
    let placed = place(&["*.weight=[@tp, @dp]"]).expect("norms are of another rank");
    for (name, expected) in [
        ("model.embed_tokens.weight", "bf16[64@tp, 16@dp]"),
        (
            "model.layers.1.self_attn.o_proj.weight",
            "bf16[16@tp, 16@dp]",
        ),
        ("model.norm.weight", "bf16[16]"),
        ("model.layers.0.self_attn.qkv_proj.bias", "bf16[48]"),
        ("model.layers.0.mlp.experts.up.weight", "bf16[4, 32, 16]"),
        ("rotary_scale", "bf16[]"),
    ] {
        assert_eq!(placed[name], expected, "{name}");
    }
}

#[test]
fn three_dots_stand_for_any_number_of_uncut_dimensions() {
    let placed = place(&[
        "*.qkv_proj.*=[@tp, ...]",
        "*.o_proj.weight=[..., @tp]",
        "*.experts.up.*=[@dp, ..., @tp]",
        "*.experts.*=[..., @tp, _]",
        "*norm.weight=[...]",
        "*=[@tp, ...]",
    ])
    .expect("all are used");
    for (name, expected) in [
        (
            "model.layers.0.self_attn.qkv_proj.weight",
            "bf16[48@tp, 16]",
        ),
        ("model.layers.0.self_attn.qkv_proj.bias", "bf16[48@tp]"),
        ("model.layers.0.self_attn.o_proj.weight", "bf16[16, 16@tp]"),
        (
            "model.layers.0.mlp.experts.up.weight",
            "bf16[4@dp, 32, 16@tp]",
        ),
        (
            "model.layers.0.mlp.experts.down.weight",
            "bf16[4, 16@tp, 32]",
        ),
        ("model.norm.weight", "bf16[16]"),
        ("lm_head.weight", "bf16[64@tp, 16]"),
        ("rotary_scale", "bf16[]"),
    ] {
        assert_eq!(placed[name], expected, "{name}");
    }
}

#[test]
fn a_layout_that_is_for_no_tensor_says_why() {
    for (layouts, parts) in [
        (
            &["*.wieght=[@tp, _]"][..],
            &[
                "\"*.wieght=[@tp, _]\" matches no tensor",
                "such as 'lm_head.weight'",
            ][..],
        ),
        (
            &["*norm.weight=[@tp, _]"],
            &[
                "is for tensors of 2 dimensions",
                "none of the 3 whose names match is one",
                "'model.layers.0.input_layernorm.weight' has 1",
                "`...` stands for",
            ],
        ),
        (
            &["rotary_*=[@tp, ...]"],
            &["of at least 1 dimension,", "'rotary_scale' has 0"],
        ),
        (
            &["*=[...]", "*.weight=[@tp, ...]"],
            &["\"*.weight=[@tp, ...]\"", "a layout before it matches"],
        ),
        (
            &["*.weight=[@tp, @sp]"],
            &["cannot be read", "sp", "the axes are @dp, @tp"],
        ),
        (&["*.weight=[@tp, @tp]"], &["used twice"]),
        (&["*=[..., @tp, ...]"], &["cannot be read"]),
        (&["*=[@tp, ...]{sum:dp}"], &["partial values"]),
        (&["*.weight"], &["is no layout", "NAMES=SHARDING"]),
        (&["*.weight=@tp"], &["no sharding in brackets"]),
    ] {
        let error = place(layouts).expect_err("not a layout for this model");
        assert!(
            matches!(error, Error::Layout { .. }),
            "{layouts:?}: {error}"
        );
        let error = error.to_string();
        for part in parts {
            assert!(error.contains(part), "{layouts:?}: '{part}' in '{error}'");
        }
    }
}
