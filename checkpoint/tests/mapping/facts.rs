//! Every recorded row of Paddle's language: macro expansions, slice queries, errors.
//!
//! Expansions and statements are compared as our language prints them, so that blanks and quotes do
//! not count.

use crate::array::region;
use anymesh_checkpoint::map::{
    Macro, Mapping, Names, PieceOp, Program, Recipe, Statement, dtype_by_name,
};
use anymesh_checkpoint::{Error, TensorInfo};
use anymesh_core::{DType, Region};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

fn rows() -> Vec<Value> {
    serde_json::from_str(include_str!("../facts/paddle_aoa.json")).expect("recorded rows")
}

fn row(test: &str) -> Value {
    rows()
        .into_iter()
        .find(|row| row["test"].as_str().is_some_and(|name| name.contains(test)))
        .expect("a recorded row")
}

/// A string or a list of strings.
fn lines(value: &Value) -> Vec<String> {
    match value {
        Value::String(one) => vec![one.clone()],
        many => many
            .as_array()
            .expect("strings")
            .iter()
            .map(|s| s.as_str().expect("a string").to_string())
            .collect(),
    }
}

fn printed(statements: &[Arc<Statement>]) -> Vec<String> {
    statements
        .iter()
        .map(|statement| statement.to_string())
        .collect()
}

fn parsed(value: &Value) -> Vec<Arc<Statement>> {
    Mapping::from_lines(lines(value))
        .expect("statements")
        .statements
}

fn degrees(value: &Value) -> BTreeMap<String, usize> {
    value
        .as_object()
        .expect("names")
        .iter()
        .map(|(name, n)| (name.clone(), n.as_u64().expect("a degree") as usize))
        .collect()
}

/// A reversed mapping is expanded as it is written: the source's names are on the right.
fn names(row: &Value) -> Names {
    let (source, destination) = (degrees(&row["src_shards"]), degrees(&row["dst_shards"]));
    if row["reverse"] == json!(true) {
        Names {
            left: destination,
            right: source,
        }
    } else {
        Names {
            left: source,
            right: destination,
        }
    }
}

#[test]
fn the_recorded_rows_are_the_twenty_that_are_tested_here() {
    let kinds: Vec<_> = rows()
        .iter()
        .map(|row| row["kind"].as_str().expect("a kind").to_string())
        .collect();
    assert_eq!(kinds.iter().filter(|kind| *kind == "macro").count(), 13);
    assert_eq!(kinds.iter().filter(|kind| *kind == "engine").count(), 7);
    assert_eq!(
        rows().iter().filter(|row| !row["error"].is_null()).count(),
        2,
        "the two that the last test here names"
    );
    assert!(rows().iter().all(|row| row["status"] == "PASS"));
}

#[test]
fn macros_expand_to_what_was_recorded() {
    for row in rows().iter().filter(|row| row["kind"] == "macro") {
        let statements = parsed(&row["input"]);
        let made = match row["macro"].as_str().expect("a macro") {
            "id_macro" | "layer_id_offset_macro" => {
                Macro::Ids.apply(&statements, &names(row)).expect("expands")
            }
            "transpose_macro" => Macro::Transpose
                .apply(&statements, &names(row))
                .expect("expands"),
            "fused_ffn_macro" | "fused_qkv_macro" | "fused_qkv_old_macro" => Macro::Fused
                .apply(&statements, &names(row))
                .expect("expands"),
            // Paddle's pass only takes note of which temporary name feeds which and yields what it
            // was given. Ours looks that up when a fused macro asks (the next test), so there is
            // nothing to run.
            "get_var_mapping_chain_macro" => statements,
            other => panic!("{other} has no counterpart"),
        };
        assert_eq!(
            printed(&made),
            printed(&parsed(&row["expect"])),
            "{}",
            row["test"]
        );
    }
}

#[test]
fn the_degree_of_a_temporary_name_is_that_of_the_tensor_it_becomes() {
    let row = row("TestFusedFfnMacro5");
    let made = Macro::Fused
        .apply(&parsed(&row["input"]), &names(&row))
        .expect("expands");
    let order = |statement: &str| {
        statement
            .split([',', '>'])
            .filter_map(|name| name.split("tmp.").nth(1))
            .map(|n| n.trim().to_string())
            .collect::<Vec<_>>()
    };
    let (cut, join) = (made[0].to_string(), made[1].to_string().replace(" ->", ","));
    assert_eq!(
        order(&cut),
        [
            "GATE_0", "GATE_1", "UP_0", "UP_1", "GATE_2", "GATE_3", "UP_2", "UP_3"
        ],
        "a degree of 2 where it comes from"
    );
    assert_eq!(
        order(&join),
        [
            "GATE_0", "UP_0", "GATE_1", "UP_1", "GATE_2", "UP_2", "GATE_3", "UP_3"
        ],
        "a degree of 4 where it goes to"
    );
}

/// The sources of an engine row with their optimizer states. Tensors whose type was not recorded
/// are bf16, so that a cast to float32 is one.
fn sources(row: &Value) -> (BTreeMap<String, TensorInfo>, Names) {
    sources_as(row, DType::BF16)
}

fn sources_as(row: &Value, not_recorded: DType) -> (BTreeMap<String, TensorInfo>, Names) {
    let side = |key: &str| {
        row[key]
            .as_object()
            .expect("tensors")
            .iter()
            .map(|(name, shards)| (name.clone(), shards.as_array().expect("shards").len()))
            .collect()
    };
    let mut out = BTreeMap::new();
    for (name, shards) in row["source"].as_object().expect("tensors") {
        let dtype = shards[0]["dtype"]
            .as_str()
            .map_or(not_recorded, |name| dtype_by_name(name).expect("a type"));
        let shape = sizes(&shards[0]["global_shape"]);
        for state in ["", ".w_0", ".moment1_0"] {
            out.insert(
                format!("{name}{state}"),
                TensorInfo {
                    dtype,
                    shape: shape.clone(),
                },
            );
        }
    }
    (
        out,
        Names {
            left: side("source"),
            right: side("destination"),
        },
    )
}

fn sizes(value: &Value) -> Vec<usize> {
    value
        .as_array()
        .expect("sizes")
        .iter()
        .map(|n| n.as_u64().expect("a size") as usize)
        .collect()
}

fn recorded_region(slice: &Value) -> Region {
    region(
        &sizes(&slice["global_offset"]),
        &sizes(&slice["local_shape"]),
    )
}

fn program(row: &Value, names: &Names) -> Result<Program, Error> {
    Mapping::from_lines(lines(&row["aoa_config"]["aoa_statements"]))?.expand(names)
}

/// The operations as Paddle lists them.
fn postprocess(ops: &[PieceOp]) -> Value {
    let one = |op: &PieceOp| match op {
        PieceOp::Permute(order) => json!(format!("{order:?}")),
        PieceOp::Cast(DType::F32) => json!("float32"),
        other => panic!("{other:?} was not recorded"),
    };
    if ops.is_empty() {
        Value::Null
    } else {
        ops.iter().map(one).collect()
    }
}

#[test]
fn slices_come_from_where_it_was_recorded() {
    let mut queries = 0;
    for row in rows()
        .iter()
        .filter(|row| row["kind"] == "engine" && row["error"].is_null())
    {
        let test = &row["test"];
        let (sources, names) = sources(row);
        let program = program(row, &names).expect("expands");
        let statements: Vec<_> = program
            .steps
            .iter()
            .map(|step| step.statement.clone())
            .collect();
        assert_eq!(
            printed(&statements),
            printed(&parsed(&row["expanded_statements"])),
            "{test}"
        );
        let recipe = Recipe::new(
            &program,
            &sources,
            Some(&names.right.keys().cloned().collect()),
            false,
        )
        .expect("evaluates");

        for query in row["queries"].as_array().expect("queries") {
            let key = query["target"]["key"].as_str().expect("a name");
            let wanted: Vec<Value> = query["mapping"].as_array().expect("slices").clone();
            if recipe.added().contains(key) {
                // Paddle answers with no slices; with us a tensor that is only added is no tensor
                // of the result, and asking for it says so.
                assert!(
                    wanted.is_empty()
                        && recipe
                            .pieces(key, &recorded_region(&query["target"]))
                            .is_err(),
                    "{test}"
                );
                queries += 1;
                continue;
            }
            let found = recipe
                .pieces(key, &recorded_region(&query["target"]))
                .expect("a region of it");
            assert_eq!(found.len(), wanted.len(), "{test} {key}");
            for (piece, slice) in found.iter().zip(&wanted) {
                assert_eq!(
                    piece.target,
                    recorded_region(&slice["target_slice"]),
                    "{test} {key}"
                );
                assert_eq!(
                    piece.source,
                    slice["source_slice"]["key"].as_str().expect("a name"),
                    "{test} {key}"
                );
                assert_eq!(
                    piece.region,
                    recorded_region(&slice["source_slice"]),
                    "{test} {key}"
                );
                assert_eq!(
                    postprocess(&piece.ops),
                    slice["postprocess"],
                    "{test} {key}"
                );
            }
            queries += 1;
        }

        let ranges = |of: &Region| {
            of.start
                .iter()
                .zip(&of.shape)
                .map(|(s, n)| json!([s, s + n]))
                .collect::<Value>()
        };
        for (name, recorded) in row["output_vars"].as_object().expect("variables") {
            if recorded.is_null() {
                assert!(recipe.added().contains(name), "{test}");
                continue;
            }
            let info = &recipe.tensors()[name];
            assert_eq!(json!(info.shape), recorded["shape"], "{test} {name}");
            // Ours reads neighbouring slices that lie side by side in the source as one, so each
            // recorded slice is asked for on its own.
            let recorded = recorded["slices"].as_array().expect("slices");
            assert!(
                recipe.pieces(name, &info.whole()).expect("all of it").len() <= recorded.len(),
                "{test} {name}"
            );
            for slice in recorded {
                let target = slice[2].as_array().expect("ranges").iter().map(sizes);
                let (start, shape): (Vec<_>, Vec<_>) =
                    target.map(|range| (range[0], range[1] - range[0])).unzip();
                let found = recipe
                    .pieces(name, &region(&start, &shape))
                    .expect("a part of it");
                let found: Vec<Value> = found
                    .iter()
                    .map(|p| {
                        json!([
                            p.source,
                            ranges(&p.region),
                            ranges(&p.target),
                            postprocess(&p.ops)
                        ])
                    })
                    .collect();
                assert_eq!(found, std::slice::from_ref(slice), "{test} {name}");
            }
        }
    }
    assert_eq!(queries, 12);
}

/// Paddle casts whatever a tensor holds: the recorded statement is carried out the same from whole
/// numbers, of which the optimizer's states keep their type as ever.
#[test]
fn the_recorded_cast_is_one_from_integers_too() {
    let row = row("TestAOAEngineTransposeCast.test_transpose");
    for from in [DType::I32, DType::I64, DType::U8, DType::Bool] {
        let (sources, names) = sources_as(&row, from);
        let program = program(&row, &names).expect("expands");
        let recipe = Recipe::new(&program, &sources, None, false).expect("evaluates");
        assert_eq!(recipe.tensors()["d0"].dtype, DType::F32);
        assert_eq!(recipe.tensors()["d0.w_0"].dtype, from);
        let whole = recipe.tensors()["d0"].whole();
        let pieces = recipe.pieces("d0", &whole).expect("all of it");
        for (piece, recorded) in pieces.iter().zip(
            row["output_vars"]["d0"]["slices"]
                .as_array()
                .expect("slices"),
        ) {
            assert_eq!(piece.dtype, from);
            assert_eq!(postprocess(&piece.ops), recorded[3]);
        }
    }
}

#[test]
fn what_was_refused_is_refused_and_the_error_leads_to_the_line() {
    // Paddle: "The different attributes must split by a comma, but now the token is fused_qkv_old."
    let missing_comma = row("test_macro_error_chain");
    assert_eq!(missing_comma["error"], "AssertionError");
    let error =
        program(&missing_comma, &sources(&missing_comma).1).expect_err("a comma is missing");
    assert!(
        error
            .to_string()
            .contains("separated by a comma, which is missing before 'fused_qkv_old'"),
        "{error}"
    );
    assert!(matches!(error, Error::Mapping { line: 1, .. }));

    // Paddle: "When split/concat, only support one attr named `axis`, but got [axis=0, axis=1]."
    let two_axes = row("test_shape_propagation_error_chain");
    assert_eq!(two_axes["error"], "ValueError");
    let error = program(&two_axes, &sources(&two_axes).1).expect_err("two axes");
    assert!(
        error.to_string().contains("axis= may be given once"),
        "{error}"
    );
}
