//! Meshes, types and requests as users and JSON write them.

use anymesh::{DType, Device, Error, Mesh, Reduction, Result, Shape, Sharding, TensorType};
use serde_json::{Value, json};
use std::io::{BufRead, Write};

/// A request that is not what was expected.
pub(crate) fn bad(detail: impl Into<String>) -> Error {
    Error::Argument {
        op: "request",
        detail: detail.into(),
    }
}

fn field<'a>(request: &'a Value, name: &str) -> Result<&'a Value> {
    request
        .get(name)
        .ok_or_else(|| bad(format!("field '{name}' is missing")))
}

fn sizes(value: &Value, what: &str) -> Result<Vec<usize>> {
    let list = value
        .as_array()
        .ok_or_else(|| bad(format!("'{what}' must be a list of numbers, got {value}")))?;
    list.iter()
        .map(|n| {
            n.as_u64()
                .map(|n| n as usize)
                .ok_or_else(|| bad(format!("'{what}' must be a list of numbers, got {n}")))
        })
        .collect()
}

/// `"mesh": [2, 4]` (axes are called a, b, c ...) or `"mesh": "dp=2, tp=4"`.
pub(crate) fn mesh(request: &Value, device: &Device) -> Result<Mesh> {
    let value = field(request, "mesh")?;
    if let Some(text) = value.as_str() {
        return Mesh::new(text, device);
    }
    let sizes = sizes(value, "mesh")?;
    if sizes.is_empty() || sizes.len() > 16 {
        return Err(bad("'mesh' must have 1 to 16 axes"));
    }
    let axes: Vec<String> = sizes
        .iter()
        .zip('a'..)
        .map(|(size, name)| format!("{name}={size}"))
        .collect();
    Mesh::new(&axes.join(", "), device)
}

/// `{"dims": [[0], []], "partial": [[1, "sum"]]}`.
pub(crate) fn sharding(value: &Value, mesh: &Mesh, rank: usize) -> Result<Sharding> {
    let mut sharding = Sharding::replicated();
    let axis = |n: usize| {
        if n < mesh.axes().len() {
            Ok(n)
        } else {
            Err(bad(format!(
                "there is no mesh axis {n}, the mesh has {}",
                mesh.axes().len()
            )))
        }
    };
    if let Some(dims) = value.get("dims").filter(|v| !v.is_null()) {
        let dims = dims.as_array().filter(|d| d.len() == rank).ok_or_else(|| {
            bad(format!(
                "'dims' must be a list with an entry for each of {rank} dimensions, got {dims}"
            ))
        })?;
        for (d, axes) in dims.iter().enumerate() {
            for n in sizes(axes, "dims")? {
                sharding = sharding.cut(d, axis(n)?);
            }
        }
    }
    for entry in value
        .get("partial")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let (Some(n), Some(reduction)) = (
            entry.get(0).and_then(Value::as_u64),
            entry.get(1).and_then(Value::as_str),
        ) else {
            return Err(bad(format!(
                "'partial' must be a list of [axis, reduction], got {entry}"
            )));
        };
        sharding = sharding.partial_over(axis(n as usize)?, reduction.parse::<Reduction>()?);
    }
    sharding.check(mesh, rank)?;
    Ok(sharding)
}

/// `{"shape": [64, 32], "dtype": "f32"}` with the fields of a sharding.
pub(crate) fn tensor_type(value: &Value, mesh: &Mesh) -> Result<TensorType> {
    let (dtype, shape) = dtype_and_shape(value)?;
    Ok(TensorType {
        dtype,
        sharding: sharding(value, mesh, shape.rank())?,
        shape,
    })
}

pub(crate) fn dtype_and_shape(value: &Value) -> Result<(DType, Shape)> {
    let shape = Shape::from(&sizes(field(value, "shape")?, "shape")?[..]);
    shape.checked_numel("request")?;
    let dtype = value
        .get("dtype")
        .map_or(Some("f32"), Value::as_str)
        .ok_or_else(|| bad("'dtype' must be a text such as f32"))?;
    Ok((dtype.parse()?, shape))
}

/// A sharding in the form requests have.
pub(crate) fn to_json(sharding: &Sharding, rank: usize) -> Value {
    let dims: Vec<Vec<usize>> = (0..rank).map(|d| sharding.axes_of(d).collect()).collect();
    let partial: Vec<Value> = sharding
        .partial()
        .map(|(axis, r)| json!([axis, r.name()]))
        .collect();
    json!({ "dims": dims, "partial": partial })
}

/// Answers one JSON object a line from stdin until it ends. A bad line is answered with what is
/// wrong and stops nothing.
pub(crate) fn serve(answer: impl Fn(&Value) -> Result<Value>) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = match serde_json::from_str(&line) {
            Ok(request) => reply(answer(&request)),
            Err(error) => json!({ "ok": false, "error": format!("not JSON: {error}") }),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

/// An answer with `ok`, or what is wrong.
pub(crate) fn reply(answer: Result<Value>) -> Value {
    match answer {
        Ok(mut answer) => {
            answer["ok"] = true.into();
            answer
        }
        Err(error) => json!({ "ok": false, "error": error.to_string() }),
    }
}
