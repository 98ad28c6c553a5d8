//! Meshes, types and requests as users and JSON write them.

use anymesh::{
    DType, Device, Error, MAX_RANK, Mesh, Reduction, Result, Shape, Sharding, TensorType,
};
use serde_json::{Map, Value, json};

/// The most ranks of the mesh of a request.
pub(crate) const MAX_RANKS: usize = 4096;

/// A request that is not what was expected.
pub(crate) fn bad(detail: impl Into<String>) -> Error {
    Error::argument("request", "request", detail.into())
}

/// JSON as an error quotes it: not all of a long text.
pub(crate) fn quoted(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 80 {
        return text;
    }
    text.chars().take(77).chain("...".chars()).collect()
}

/// The fields of an object; `what` it is. A field that is none of `accepted` is an error: nothing
/// that was asked for is ignored.
pub(crate) fn object<'a>(
    value: &'a Value,
    what: &str,
    accepted: &[&str],
) -> Result<&'a Map<String, Value>> {
    let fields = value.as_object().ok_or_else(|| {
        bad(format!(
            "{what} must be an object with the fields {}, got {}",
            accepted.join(", "),
            quoted(value)
        ))
    })?;
    match fields.keys().find(|key| !accepted.contains(&key.as_str())) {
        Some(key) => Err(bad(format!(
            "{what} has no field {}: it has {}",
            quoted(&json!(key)),
            accepted.join(", ")
        ))),
        None => Ok(fields),
    }
}

/// A field that must be there.
pub(crate) fn field<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a Value> {
    fields
        .get(name)
        .ok_or_else(|| bad(format!("field '{name}' is missing")))
}

/// A list of numbers.
fn sizes(value: &Value, what: &str) -> Result<Vec<usize>> {
    let wrong = || {
        bad(format!(
            "'{what}' must be a list of numbers, got {}",
            quoted(value)
        ))
    };
    let size = |n: &Value| n.as_u64().and_then(|n| usize::try_from(n).ok());
    value
        .as_array()
        .and_then(|list| list.iter().map(size).collect())
        .ok_or_else(wrong)
}

/// `"mesh": [2, 4]` (axes are called a, b, c ...) or `"mesh": "dp=2, tp=4"`.
pub(crate) fn mesh(value: &Value, device: &Device) -> Result<Mesh> {
    let mesh = match value.as_str() {
        Some(text) => Mesh::new(text, device)?,
        None => {
            let sizes = sizes(value, "mesh")?;
            if sizes.is_empty() || sizes.len() > 16 {
                return Err(bad(format!(
                    "'mesh' must have 1 to 16 axes, got {}",
                    sizes.len()
                )));
            }
            let axes: Vec<String> = sizes
                .iter()
                .zip('a'..)
                .map(|(size, name)| format!("{name}={size}"))
                .collect();
            Mesh::new(&axes.join(", "), device)?
        }
    };
    check_ranks(&mesh)?;
    Ok(mesh)
}

/// Refuses meshes of more ranks than an answer has time for.
pub(crate) fn check_ranks(mesh: &Mesh) -> Result<()> {
    if mesh.ranks() > MAX_RANKS {
        return Err(bad(format!(
            "a mesh of {} ranks: at most {MAX_RANKS}",
            mesh.ranks()
        )));
    }
    Ok(())
}

/// The fields of a sharding.
pub(crate) const SHARDING: [&str; 2] = ["dims", "partial"];

/// The fields of a type.
pub(crate) const TYPE: [&str; 4] = ["shape", "dtype", "dims", "partial"];

/// `{"dims": [[0], []], "partial": [[1, "sum"]]}`.
pub(crate) fn sharding(fields: &Map<String, Value>, mesh: &Mesh, rank: usize) -> Result<Sharding> {
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
    if let Some(dims) = fields.get("dims").filter(|v| !v.is_null()) {
        let dims = dims.as_array().filter(|d| d.len() == rank).ok_or_else(|| {
            bad(format!(
                "'dims' must be a list with an entry for each of {rank} dimensions, got {}",
                quoted(dims)
            ))
        })?;
        for (d, axes) in dims.iter().enumerate() {
            for n in sizes(axes, "dims")? {
                sharding = sharding.cut(d, axis(n)?);
            }
        }
    }
    if let Some(partial) = fields.get("partial").filter(|v| !v.is_null()) {
        let wrong = || {
            bad(format!(
                "'partial' must be a list of [axis, reduction], such as [[1, \"sum\"]], got {}",
                quoted(partial)
            ))
        };
        for entry in partial.as_array().ok_or_else(wrong)? {
            let Some([n, reduction]) = entry.as_array().map(Vec::as_slice) else {
                return Err(wrong());
            };
            let n = n.as_u64().and_then(|n| usize::try_from(n).ok());
            let (Some(n), Some(reduction)) = (n, reduction.as_str()) else {
                return Err(wrong());
            };
            sharding = sharding.partial_over(axis(n)?, reduction.parse::<Reduction>()?);
        }
    }
    sharding.check(mesh, rank)?;
    Ok(sharding)
}

/// `{"shape": [64, 32], "dtype": "f32"}` with the fields of a sharding.
pub(crate) fn tensor_type(value: &Value, mesh: &Mesh) -> Result<TensorType> {
    let fields = object(value, "an input", &TYPE)?;
    let (dtype, shape) = dtype_and_shape(fields)?;
    Ok(TensorType {
        dtype,
        sharding: sharding(fields, mesh, shape.rank())?,
        shape,
    })
}

pub(crate) fn dtype_and_shape(fields: &Map<String, Value>) -> Result<(DType, Shape)> {
    let shape = Shape::from(sizes(field(fields, "shape")?, "shape")?);
    if shape.rank() > MAX_RANK {
        return Err(bad(format!(
            "'shape' has {} dimensions: at most {MAX_RANK}",
            shape.rank()
        )));
    }
    shape.checked_numel("request")?;
    let dtype = fields
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
