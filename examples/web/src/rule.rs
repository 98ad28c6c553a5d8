//! What an op does on a mesh, and what a reshard takes: all of it on a device without values.

use crate::{Answer, text};
use anymesh_conformance::registry::{self, Attrs, Entry};
use anymesh_core::{
    Mesh, Place, Result, Tensor, TensorType, meta, ops,
    reshard::{self, Objective},
    spmd::{Ledger, trace},
};
use anymesh_show::Show;
use serde_json::{Value, json};

/// As many ranks pictures and answers have time for.
const MAX_RANKS: usize = 1024;

/// As many choices are listed.
const CHOICES: usize = 8;

fn field<'a>(request: &'a Value, name: &str) -> Answer<&'a str> {
    request[name]
        .as_str()
        .ok_or_else(|| format!("'{name}' is missing"))
}

fn mesh(request: &Value) -> Answer<Mesh> {
    let mesh = Mesh::new(field(request, "mesh")?, &meta()).map_err(text)?;
    match mesh.ranks() {
        0..=MAX_RANKS => Ok(mesh),
        ranks => Err(format!(
            "a mesh of {ranks} ranks: the page takes at most {MAX_RANKS}"
        )),
    }
}

/// Every op with a call of it to begin with.
pub fn ops() -> Value {
    registry::entries().iter().map(example).collect()
}

fn example(entry: &Entry) -> Value {
    // What people try first is worth an example that shows something.
    if entry.name == "matmul" {
        return json!({ "name": "matmul", "attrs": {}, "operands": [
            { "name": "a", "type": "f32[64@dp, 32]" }, { "name": "b", "type": "f32[32, 64@tp]" }
        ] });
    }
    let samples = entry.samples();
    let Some(sample) = samples.first() else {
        return json!({ "name": entry.name, "operands": [], "attrs": {} });
    };
    let operands = sample.inputs.iter().enumerate().map(|(n, input)| {
        let ty = input.as_ref().map_or(String::new(), |input| {
            let cut = |(d, size): (usize, &usize)| match n + d {
                0 => format!("{size}@dp"),
                _ => size.to_string(),
            };
            let sizes: Vec<String> = input.shape.iter().enumerate().map(cut).collect();
            format!("{}[{}]", input.dtype, sizes.join(", "))
        });
        json!({ "name": format!("operand {}", n + 1), "type": ty })
    });
    json!({ "name": entry.name, "operands": operands.collect::<Vec<_>>(), "attrs": sample.attrs })
}

/// What an op does with given operands: `{mesh, op, inputs, attrs}`.
pub fn rule(request: &Value) -> Answer<Value> {
    let mesh = mesh(request)?;
    let entry = registry::find(field(request, "op")?).map_err(text)?;
    let attrs: Value = serde_json::from_str(field(request, "attrs")?)
        .map_err(|e| format!("the attributes are not JSON: {e}"))?;
    let attrs = Attrs::new(entry, &attrs).map_err(text)?;
    let operand = |input: &Value| {
        let make = |ty: &str| {
            let ty = TensorType::parse(ty, &mesh)?;
            Tensor::zeros(&ty.shape, ty.dtype, (&mesh, &ty.sharding))
        };
        input.as_str().map(make).transpose()
    };
    let inputs = request["inputs"].as_array().map_or(&[][..], Vec::as_slice);
    let inputs = inputs
        .iter()
        .map(operand)
        .collect::<Result<Vec<_>>>()
        .map_err(text)?;
    let ((outputs, ledger), decisions) =
        trace(|| Ledger::record(|| entry.call(&inputs, &attrs, &Place::from(&mesh))));
    let outputs = outputs.map_err(text)?;
    let mut explained = vec![];
    for decision in &decisions {
        let title = match decision.step == decision.op {
            true => decision.op.to_string(),
            false => format!("{} ({})", decision.op, decision.step),
        };
        let choices: Vec<Value> = decision
            .alternatives()
            .map_err(text)?
            .iter()
            .take(CHOICES)
            .map(|solution| {
                let (axes, inputs) = decision.describe(solution);
                json!({ "bytes": solution.bytes, "owed": solution.owed, "axes": axes, "inputs": inputs })
            })
            .collect();
        explained
            .push(json!({ "title": title, "rule": decision.rule.to_string(), "choices": choices }));
    }
    let info = ops::catalog().into_iter().find(|o| o.name == entry.name);
    let drawn = |x: &Tensor| x.svg();
    Ok(json!({
        "rule": info.map_or(String::new(), |info| info.to_string()),
        "decisions": explained,
        "outputs": outputs.iter().map(Tensor::type_string).collect::<Vec<_>>(),
        "bytes": ledger.bytes(),
        "ledger": if ledger.entries.is_empty() { None } else { ledger.svg() },
        "pictures": inputs.iter().flatten().chain(&outputs).filter_map(drawn).collect::<Vec<_>>(),
    }))
}

/// The steps of a reshard: `{mesh, from, to, objective}`.
pub fn plan(request: &Value) -> Answer<Value> {
    let mesh = mesh(request)?;
    let ty = |name: &str| TensorType::parse(field(request, name)?, &mesh).map_err(text);
    let (from, to) = (ty("from")?, ty("to")?);
    if (from.dtype, &from.shape) != (to.dtype, &to.shape) {
        return Err("both types must have the same dtype and sizes: a reshard moves data and changes nothing".into());
    }
    let objective = match field(request, "objective")? {
        "bytes" => Objective::Bytes,
        _ => Objective::Time,
    };
    let (shape, dtype) = (&from.shape, from.dtype);
    let plan = reshard::plan(&mesh, shape, dtype, &from.sharding, &to.sharding, objective)
        .map_err(text)?;
    let name = |s: &anymesh_core::Sharding| s.type_string(dtype, shape, &mesh);
    let state = |title: String, sharding: &anymesh_core::Sharding| -> Answer<Value> {
        let x = Tensor::zeros(shape, dtype, (&mesh, sharding)).map_err(text)?;
        Ok(json!({ "title": title, "picture": x.svg() }))
    };
    let mut states = vec![state(format!("before: {}", name(&plan.from)), &plan.from)?];
    let mut steps = vec![];
    for (n, step) in plan.steps.iter().enumerate() {
        let axes: Vec<&str> = step
            .axes
            .iter()
            .map(|a| mesh.axes()[*a].0.as_str())
            .collect();
        let kind = step.kind.to_string();
        states.push(state(
            format!(
                "{}. {kind} over {}: {}",
                n + 1,
                axes.join(", "),
                name(&step.to)
            ),
            &step.to,
        )?);
        steps.push(json!({ "kind": kind, "axes": axes.join(", "), "to": name(&step.to), "bytes": step.recv_bytes }));
    }
    Ok(
        json!({ "bytes": plan.recv_bytes, "bound": plan.lower_bound, "steps": steps, "states": states }),
    )
}
