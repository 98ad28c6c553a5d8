//! NumPy's answers, as `record.py` wrote them down, from the tensor and from the model that random
//! expressions are held against.

use anymesh_conformance::indexing::model::{Array, Entry, select};
use anymesh_core::{DType, Index, Tensor};
use serde_json::Value;
use std::ops::Bound;

fn numbers(list: &Value) -> Vec<i64> {
    list.as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_i64().unwrap())
        .collect()
}

fn array(pair: &Value) -> Array<i64> {
    Array {
        shape: numbers(&pair[0]).iter().map(|n| *n as usize).collect(),
        data: numbers(&pair[1]),
    }
}

fn entry(value: &Value) -> Entry {
    match value {
        Value::Null => Entry::NewAxis,
        Value::Bool(flag) => Entry::Flag(*flag),
        Value::Number(n) => Entry::At(n.as_i64().unwrap()),
        Value::String(_) => Entry::Ellipsis,
        _ if value.get("slice").is_some() => {
            let bound = |i: usize| value["slice"][i].as_i64();
            Entry::Slice(bound(0), bound(1), bound(2).unwrap_or(1))
        }
        _ if value.get("mask").is_some() => {
            let Array { shape, data } = array(&value["mask"]);
            Entry::Mask(Array {
                shape,
                data: data.iter().map(|n| *n != 0).collect(),
            })
        }
        _ => Entry::Places(array(&value["places"])),
    }
}

fn index(entry: &Entry) -> Index {
    match entry {
        Entry::At(at) => Index::At(*at),
        Entry::Slice(start, stop, step) => Index::Slice {
            start: *start,
            end: stop.map_or(Bound::Unbounded, Bound::Excluded),
            step: *step,
        },
        Entry::Ellipsis => Index::Ellipsis,
        Entry::NewAxis => Index::NewAxis,
        Entry::Flag(flag) => Index::Flag(*flag),
        Entry::Mask(mask) => super::tensor(&mask.data, mask.shape.as_slice()).into(),
        Entry::Places(places) => super::tensor(&places.data, places.shape.as_slice()).into(),
    }
}

#[test]
fn the_answers_that_numpy_gave_are_given() {
    let recorded: Value = serde_json::from_str(include_str!("answers.json")).unwrap();
    let answers = recorded["answers"].as_array().unwrap();
    assert!(answers.len() >= 300);
    for (i, answer) in answers.iter().enumerate() {
        let shape: Vec<usize> = numbers(&answer["shape"])
            .iter()
            .map(|n| *n as usize)
            .collect();
        let entries: Vec<Entry> = answer["index"]
            .as_array()
            .unwrap()
            .iter()
            .map(entry)
            .collect();
        let what = format!("answer {i}: {shape:?} {}", answer["index"]);
        let x = Tensor::arange(
            0,
            shape.iter().product::<usize>() as i64,
            1,
            DType::I64,
            &super::cpu(),
        )
        .unwrap()
        .reshape(shape.as_slice())
        .unwrap();
        let expression: Vec<Index> = entries.iter().map(index).collect();
        let (got, model) = (x.get(&expression), select(&shape, &entries));
        if answer["error"] == true {
            assert!(
                got.and_then(|t| t.to_bytes()).is_err() && model.is_err(),
                "{what}"
            );
            continue;
        }
        let (got, model, expected) = (
            got.unwrap_or_else(|e| panic!("{what}: {e}")),
            model.unwrap_or_else(|e| panic!("{what}: {e:?}")),
            array(&answer["get"]),
        );
        assert_eq!(
            (got.dims(), got.to_vec::<i64>().unwrap()),
            (expected.shape.as_slice(), expected.data.clone()),
            "{what}"
        );
        assert_eq!(
            (
                model.shape,
                model.places.iter().map(|p| *p as i64).collect::<Vec<_>>()
            ),
            (expected.shape, expected.data),
            "{what}, the model"
        );
        if let Some(value) = answer.get("value").map(array) {
            let value = super::tensor(&value.data, value.shape.as_slice());
            assert_eq!(
                x.set(&expression, &value).unwrap().to_vec::<i64>().unwrap(),
                numbers(&answer["set"]),
                "{what} set"
            );
            assert_eq!(
                x.add_at(&expression, &value)
                    .unwrap()
                    .to_vec::<i64>()
                    .unwrap(),
                numbers(&answer["add"]),
                "{what} add"
            );
        }
    }
}
