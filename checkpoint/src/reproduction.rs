//! A [`Reproduction`] as a file: an ordinary safetensors file with the tensors of one op, and what
//! the op is in the metadata, as JSON under `anymesh.reproduction`.
//!
//! ```
//! use anymesh_checkpoint::reproduction;
//! use anymesh_core::{DType, Mesh, Tensor, compare::Compare};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let cpu = anymesh_backend_cpu::device();
//! # let broken = cpu.decorated(|cpu, kernel| match kernel.op() {
//! #     "exp" => Ok([cpu.upload(&[0; 24])?].into_iter().collect()),
//! #     _ => cpu.launch(kernel),
//! # });
//! let program = |mesh: &Mesh| Tensor::ones([2, 3], DType::F32, mesh)?.exp();
//! let compare = Compare { reproduce: true, ..Compare::default() };
//! let found = compare.run(program, &Mesh::single(&cpu), &Mesh::single(&broken))?;
//! let exp = found.reproduction.expect("exponentials are broken there");
//! # let path = std::env::temp_dir().join(format!("anymesh-doc-exp-{}", std::process::id()));
//! reproduction::save(&path, &exp)?;
//! assert_eq!(reproduction::open(&path)?, exp);
//! # std::fs::remove_file(&path)?;
//! # Ok(()) }
//! ```

use crate::{Error, Result, Source, TensorInfo, safetensors};
use anymesh_core::{
    MAX_RANK, Shape,
    compare::{Given, Reproduction, Saved, Tolerance},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path};

/// What the metadata is found under.
const KEY: &str = "anymesh.reproduction";

/// Everything that is not a tensor, in this version of the format.
const VERSION: u64 = 1;

/// The names under which the tensors of a reproduction are stored.
fn tensors(of: &Reproduction) -> Vec<(String, &Saved)> {
    let numbered = |name: &'static str, list: &'_ [Saved]| -> Vec<String> {
        (0..list.len()).map(|i| format!("{name}.{i}")).collect()
    };
    let operands = numbered("operand", &of.operands).into_iter();
    let gradients = numbered("gradient", &of.gradients).into_iter();
    operands
        .zip(&of.operands)
        .chain(gradients.zip(&of.gradients))
        .chain([
            ("expected".to_string(), &of.expected),
            ("found".to_string(), &of.found),
        ])
        .collect()
}

/// Writes the file, whole or not at all; one that was there is replaced.
pub fn save(path: impl AsRef<Path>, of: &Reproduction) -> Result<()> {
    let (given, number) = match of.given {
        Given::Result(i) => ("result", i),
        Given::Gradient(i) => ("gradient", i),
        Given::Sum(i) => ("sum", i),
        Given::Total => ("total", 0),
    };
    let all = tensors(of);
    let shardings: BTreeMap<&str, &str> = (all.iter())
        .map(|(name, saved)| (name.as_str(), saved.sharding.as_str()))
        .collect();
    let head = json!({
        "version": VERSION, "op": of.op, "given": given, "number": number, "caller": of.caller, "attributes": of.attributes, "operands": of.operands.len(), "gradients": of.gradients.len(), "shardings": shardings, "a": of.a, "b": of.b, "mesh": of.mesh, "relative": of.tolerance.relative, "absolute": of.tolerance.absolute,
    });
    let infos: BTreeMap<String, TensorInfo> = (all.iter())
        .map(|(name, saved)| {
            let info = TensorInfo {
                dtype: saved.dtype,
                shape: saved.shape.dims().to_vec(),
            };
            (name.clone(), info)
        })
        .collect();
    let bytes: BTreeMap<&str, &[u8]> = (all.iter())
        .map(|(name, saved)| (name.as_str(), &saved.bytes[..]))
        .collect();
    let metadata = BTreeMap::from([(KEY.to_string(), head.to_string())]);
    safetensors::write(path.as_ref(), &infos, &metadata, |name, out| {
        out.write(bytes.get(name).copied().unwrap_or_default())
    })
}

/// Reads a file that [`save`] wrote.
pub fn open(path: impl AsRef<Path>) -> Result<Reproduction> {
    let path = path.as_ref();
    let file = safetensors::File::open(path)?;
    let wrong = |detail: String| Error::Format {
        path: path.into(),
        what: "reproduction of an op",
        detail,
    };
    let Some(head) = file.metadata().get(KEY) else {
        let detail =
            format!("there is no {KEY} in its metadata: `anymesh diff-run --dump` writes it");
        return Err(wrong(detail));
    };
    let head: Value =
        serde_json::from_str(head).map_err(|e| wrong(format!("{KEY} is no JSON: {e}")))?;
    if head["version"] != VERSION {
        let detail = format!(
            "it is of version {}, and {VERSION} is known",
            head["version"]
        );
        return Err(wrong(detail));
    }
    let text = |name: &str| match head[name].as_str() {
        Some(text) => Ok(text.to_string()),
        None => Err(wrong(format!("'{name}' is no text"))),
    };
    let count = |name: &str| {
        let value = head[name].as_u64().and_then(|n| usize::try_from(n).ok());
        value.ok_or_else(|| wrong(format!("'{name}' is no number of things")))
    };
    let float = |name: &str| match head[name].as_f64() {
        Some(x) if x >= 0.0 => Ok(x),
        _ => Err(wrong(format!("'{name}' is no tolerance"))),
    };
    let saved = |name: String| -> Result<Saved> {
        let info = file.info(&name)?;
        if info.shape.len() > MAX_RANK {
            let detail = format!("{name} has {} dimensions", info.shape.len());
            return Err(wrong(format!("{detail}: at most {MAX_RANK} are possible")));
        }
        Ok(Saved {
            dtype: info.dtype,
            shape: Shape::from(&info.shape[..]),
            sharding: head["shardings"][&name].as_str().unwrap_or("").into(),
            bytes: file.read_all(&name)?,
        })
    };
    let list = |name: &str, count: usize| -> Result<Vec<Saved>> {
        // The file has as many tensors as it says, or this one ends at the first that is not there.
        (0..count).map(|i| saved(format!("{name}.{i}"))).collect()
    };
    let number = count("number")?;
    let given = match text("given")?.as_str() {
        "result" => Given::Result(number),
        "gradient" => Given::Gradient(number),
        "sum" => Given::Sum(number),
        "total" => Given::Total,
        other => return Err(wrong(format!("'{other}' is nothing that an op gives"))),
    };
    Ok(Reproduction {
        op: text("op")?,
        given,
        caller: text("caller")?,
        attributes: head["attributes"].clone(),
        operands: list("operand", count("operands")?)?,
        gradients: list("gradient", count("gradients")?)?,
        expected: saved("expected".into())?,
        found: saved("found".into())?,
        a: text("a")?,
        b: text("b")?,
        mesh: text("mesh")?,
        tolerance: Tolerance {
            relative: float("relative")?,
            absolute: float("absolute")?,
        },
    })
}
