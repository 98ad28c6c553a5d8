//! An op of a comparison called alone, by its name.

use crate::registry::{self, Attrs, Entry};
use anymesh_core::{
    Error, Mesh, Result, Tensor,
    compare::{Difference, Given, Reproduction},
    grad::{GradOptions, grad},
};
use serde_json::{Map, Value};

/// Calls the op of a reproduction on a mesh, with its operands as they lay there, and tells how the
/// value that differed differs from what it should be; nothing where it does not.
///
/// What a call was told beside its tensors is known for most ops. Whether this is the same call is
/// found by [`check`], which makes it on a device that is trusted.
///
/// ```
/// # use anymesh_conformance::replay;
/// # use anymesh_core::{DType, Mesh, Result, Tensor, compare::Compare};
/// # let cpu = anymesh_backend_cpu::device();
/// let broken = cpu.decorated(|cpu, kernel| match kernel.op() {
///     "softmax" => Ok([cpu.upload(&[0; 24])?].into_iter().collect()),
///     _ => cpu.launch(kernel),
/// });
/// let program = |mesh: &Mesh| Tensor::ones([2, 3], DType::F32, mesh)?.softmax(0);
/// let compare = Compare { reproduce: true, ..Compare::default() };
/// let found = compare.run(program, &Mesh::single(&cpu), &Mesh::single(&broken))?;
/// let softmax = found.reproduction.expect("softmax differs");
/// replay::check(&softmax, &cpu)?;
/// assert!(replay::replay(&softmax, &Mesh::single(&broken))?.is_some());
/// assert!(replay::replay(&softmax, &Mesh::new("x=2", &cpu)?)?.is_none());
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn replay(of: &Reproduction, mesh: &Mesh) -> Result<Option<Difference>> {
    of.judge(&call(of, mesh)?)
}

/// Whether the call is the one that was written down: on a device that computes right it gives what
/// the first run had. An error says why not.
pub fn check(of: &Reproduction, trusted: &anymesh_core::Device) -> Result<()> {
    match replay(of, &Mesh::single(trusted))? {
        None => Ok(()),
        Some(difference) => Err(Error::argument(
            "replay",
            "attributes",
            format!(
                "`{}` with {} gives {} at {:?} on {trusted}, and the first run had {}: the call was told something that is not known by name, or {trusted} does not compute as {} did",
                of.op, of.attributes, difference.b, difference.index, difference.a, of.a
            ),
        )),
    }
}

/// The value that differed, once more.
fn call(of: &Reproduction, mesh: &Mesh) -> Result<Tensor> {
    let gradient = match of.given {
        Given::Gradient(i) => Some(i),
        _ => None,
    };
    let place = |i: usize| -> Result<Tensor> {
        let operand = of.operands[i].place(mesh)?;
        match gradient.is_some() && operand.dtype().is_float() {
            true => operand.require_grad(),
            false => Ok(operand),
        }
    };
    let operands = (0..of.operands.len())
        .map(place)
        .collect::<Result<Vec<_>>>()?;
    if let Some(to) = of.attributes.get("to").and_then(Value::as_str) {
        return moved(&operands, to);
    }
    let results = by_name(of, &operands, mesh)?;
    let number = match of.given {
        Given::Result(i) => i,
        _ => 0,
    };
    let Some(i) = gradient else {
        return results.get(number).cloned().ok_or_else(|| {
            Error::argument("replay", "given", format!("there is no result {number}"))
        });
    };
    let Some(of_operand) = operands.get(i) else {
        return Err(Error::argument(
            "replay",
            "given",
            format!("there is no operand {i}"),
        ));
    };
    let seeds = of.gradients.iter().map(|g| g.place(mesh));
    let seeds = seeds.collect::<Result<Vec<_>>>()?;
    let tracked = results.iter().filter(|t| t.requires_grad());
    let outputs: Vec<&Tensor> = tracked.take(seeds.len()).collect();
    let options = GradOptions {
        seeds: Some(seeds),
        ..GradOptions::default()
    };
    Ok(grad(&outputs, &[of_operand], &options)?.remove(0))
}

/// What only moves, once more. On a single device there is nothing to move.
fn moved(operands: &[Tensor], to: &str) -> Result<Tensor> {
    let [x] = operands else {
        let detail = format!("{} operands of a move, which has one", operands.len());
        return Err(Error::argument("replay", "operands", detail));
    };
    match x.is_plain() {
        true => Ok(x.clone()),
        false => x.reshard(to),
    }
}

/// Calls the op by its name, or by that of the op that it is a case of.
fn by_name(of: &Reproduction, operands: &[Tensor], mesh: &Mesh) -> Result<Vec<Tensor>> {
    let told = of.attributes.as_object().cloned().unwrap_or_default();
    let name = told.get("as").and_then(Value::as_str).unwrap_or(&of.op);
    let entry = registry::find(name).map_err(|_| {
        let detail = format!(
            "`{}` is no op that can be called by its name (an expression of the program's own, or one made of several): its operands and both results are in the file",
            of.op
        );
        Error::argument("replay", "op", detail)
    })?;
    let attributes = attributes(entry, &told, of);
    let inputs = inputs(entry, &attributes, operands);
    let attrs = Attrs::new(entry, &Value::Object(attributes))?;
    entry.call(&inputs, &attrs, mesh)
}

/// What the call was told, under the names of the entry, and what follows from its result.
fn attributes(entry: &Entry, told: &Map<String, Value>, of: &Reproduction) -> Map<String, Value> {
    let mut out = Map::new();
    for attr in entry.attrs {
        let value = match (told.get(attr.name), attr.name) {
            (Some(value), _) => Some(value.clone()),
            (None, "axis") => match told.get("axes").and_then(Value::as_array) {
                Some(axes) if axes.len() == 1 => Some(axes[0].clone()),
                _ => None,
            },
            (None, "dtype") if attr.default.is_none() => Some(of.expected.dtype.name().into()),
            _ => None,
        };
        if let Some(value) = value {
            out.insert(attr.name.into(), value);
        }
    }
    out
}

/// The operands in the places of the entry: one whose name is an attribute was a number.
fn inputs(entry: &Entry, attributes: &Map<String, Value>, given: &[Tensor]) -> Vec<Option<Tensor>> {
    let mut left = given.iter().cloned();
    let mut out = Vec::new();
    for name in entry.operands.split(',') {
        let name = name.trim();
        if name.ends_with("...") {
            break;
        }
        match attributes.contains_key(name.trim_end_matches('?')) {
            true => out.push(None),
            false => match left.next() {
                Some(operand) => out.push(Some(operand)),
                None => break,
            },
        }
    }
    out.extend(left.map(Some));
    out
}
