//! `anymesh rule`: what an op does with given shardings, and why.

use crate::request::{self, bad};
use anymesh::conformance::{
    registry::{self, Attrs},
    sweep,
};
use anymesh::{
    Device, Kind, Mesh, Place, Result, Tensor, TensorType, meta, ops,
    spmd::{Decision, Ledger, Solution, rule::Rule, trace},
};
use clap::Args;
use serde_json::{Value, json};

/// Arguments of `anymesh rule`.
#[derive(Args)]
pub(crate) struct RuleCommand {
    /// The op, such as matmul.
    op: Option<String>,
    /// Axes and sizes, such as dp=2,tp=4.
    #[arg(long)]
    mesh: Option<String>,
    /// The type of an operand, such as "f32[64@dp, 32]"; once for each, `_` for one that is left
    /// out.
    #[arg(long = "in", value_name = "TYPE")]
    inputs: Vec<String>,
    /// Attributes as JSON, such as '{"axis": 1}'.
    #[arg(long, default_value = "{}")]
    attrs: String,
    /// Also run it on the CPU with seeded data and compare with the unsharded result.
    #[arg(long)]
    run: bool,
    /// List every op with its operands, attributes and rule, as JSON.
    #[arg(long)]
    list: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Answer requests from stdin, one JSON object a line.
    #[arg(long)]
    jsonl: bool,
}

/// What an op was asked to do.
struct Request {
    entry: &'static registry::Entry,
    attrs: Attrs,
    mesh: Mesh,
    inputs: Vec<Option<TensorType>>,
}

/// What became of it.
struct Outcome {
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
    ledger: Ledger,
    decisions: Vec<Decision>,
}

impl Request {
    fn parse(request: &Value) -> Result<Self> {
        let name = request
            .get("op")
            .and_then(Value::as_str)
            .ok_or_else(|| bad("field 'op' must be the name of an op"))?;
        let entry = registry::find(name)?;
        let mesh = request::mesh(request, &meta())?;
        let list = request
            .get("inputs")
            .and_then(Value::as_array)
            .ok_or_else(|| bad("field 'inputs' must be a list"))?;
        let inputs = list
            .iter()
            .map(|i| {
                if i.is_null() {
                    Ok(None)
                } else {
                    request::tensor_type(i, &mesh).map(Some)
                }
            })
            .collect::<Result<_>>()?;
        let attrs = request.get("attrs").cloned().unwrap_or(json!({}));
        Ok(Self {
            entry,
            attrs: Attrs::new(entry, &attrs)?,
            mesh,
            inputs,
        })
    }

    /// Runs the op on operands without values: everything happens but the computation.
    fn explain(&self) -> Result<Outcome> {
        let make = |ty: &TensorType| Tensor::zeros(&ty.shape, ty.dtype, (&self.mesh, &ty.sharding));
        let inputs = self
            .inputs
            .iter()
            .map(|ty| ty.as_ref().map(make).transpose())
            .collect::<Result<Vec<_>>>()?;
        let ((outputs, ledger), decisions) = trace(|| {
            Ledger::record(|| {
                self.entry
                    .call(&inputs, &self.attrs, &Place::from(&self.mesh))
            })
        });
        Ok(Outcome {
            inputs,
            outputs: outputs?,
            ledger,
            decisions,
        })
    }

    /// The largest difference between the sharded and the unsharded result on seeded data.
    fn difference(&self, cpu: &Device) -> Result<f64> {
        // Any index below the smallest dimension is in range of every dimension.
        let smallest = self
            .inputs
            .iter()
            .flatten()
            .flat_map(|t| t.shape.dims())
            .copied()
            .filter(|n| *n > 0)
            .min()
            .unwrap_or(1);
        let mesh = self.mesh.on(cpu)?;
        let (mut plain, mut sharded) = (vec![], vec![]);
        for (seed, ty) in self.inputs.iter().enumerate() {
            let Some(ty) = ty else {
                plain.push(None);
                sharded.push(None);
                continue;
            };
            let values: Vec<f32> = (0..ty.shape.numel())
                .map(|i| {
                    let n = (i as u64 + 1 + 1000 * seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
                        >> 40;
                    match ty.dtype.kind() {
                        Kind::F32 | Kind::F64 => (n % 7) as f32 - 3.0,
                        Kind::Bool => (n % 2) as f32,
                        _ => (n % smallest as u64) as f32,
                    }
                })
                .collect();
            let x = Tensor::from_slice(&values, &ty.shape, cpu)?.cast(ty.dtype)?;
            sharded.push(Some(sweep::lay_out(
                &x,
                &sweep::values(&x)?,
                &mesh,
                ty.sharding.clone(),
            )?));
            plain.push(Some(x));
        }
        let expected = self.entry.call(&plain, &self.attrs, &Place::from(cpu))?;
        let actual = self
            .entry
            .call(&sharded, &self.attrs, &Place::from(&mesh))?;
        let mut worst = 0f64;
        for (a, e) in actual.iter().zip(&expected) {
            for (a, e) in sweep::values(&a.full_tensor()?)?
                .iter()
                .zip(&sweep::values(e)?)
            {
                if a != e && !(a.is_nan() && e.is_nan()) {
                    worst = worst.max(if (a - e).is_nan() {
                        f64::INFINITY
                    } else {
                        (a - e).abs()
                    });
                }
            }
        }
        Ok(worst)
    }
}

/// Where an operand had to go: as the first op that reads it wants it.
fn target<'a>(x: &'a Tensor, decisions: &'a [Decision]) -> &'a anymesh::Sharding {
    decisions
        .iter()
        .find_map(|d| {
            d.inputs
                .iter()
                .position(|t| t.is(x))
                .map(|i| &d.solution.inputs[i])
        })
        .unwrap_or(x.sharding())
}

fn answer(value: &Value) -> Result<Value> {
    let request = Request::parse(value)?;
    let outcome = request.explain()?;
    let inputs: Vec<Value> = outcome
        .inputs
        .iter()
        .map(|x| {
            x.as_ref().map_or(Value::Null, |x| {
                request::to_json(target(x, &outcome.decisions), x.rank())
            })
        })
        .collect();
    let outputs: Vec<Value> = outcome
        .outputs
        .iter()
        .map(|t| {
            let mut out = request::to_json(t.sharding(), t.rank());
            out["shape"] = json!(t.dims());
            out["dtype"] = json!(t.dtype().name());
            out
        })
        .collect();
    let mut answer = json!({ "inputs": inputs, "outputs": outputs, "recv_bytes": outcome.ledger.bytes(), "steps": outcome.ledger.to_json() });
    if value.get("run").and_then(Value::as_bool) == Some(true) {
        answer["max_difference"] = json!(request.difference(&anymesh::device("cpu")?)?);
    }
    Ok(answer)
}

/// Every op as JSON.
fn list() -> Value {
    let catalog = ops::catalog();
    let rule = |name: &str| {
        catalog
            .iter()
            .find(|o| o.name == name)
            .map(|o| o.to_string())
    };
    registry::entries()
        .iter()
        .map(|e| {
            let attrs: Vec<Value> = e.attrs.iter().map(|a| json!({ "name": a.name, "kind": a.kind.to_string(), "default": a.default, "doc": a.doc })).collect();
            json!({ "op": e.name, "operands": e.operands, "attrs": attrs, "rule": rule(e.name) })
        })
        .collect()
}

impl RuleCommand {
    pub(crate) fn run(&self) -> Result<()> {
        if self.list {
            println!("{:#}", list());
            return Ok(());
        }
        if self.jsonl {
            return request::serve(answer).map_err(|e| bad(e.to_string()));
        }
        let (Some(op), Some(mesh)) = (&self.op, &self.mesh) else {
            return Err(bad(
                "give an op, --mesh and --in for each operand, or --list, or --jsonl; for example: anymesh rule matmul --mesh dp=2,tp=4 --in \"f32[64@dp,32]\" --in \"f32[32,64@tp]\"",
            ));
        };
        let entry = registry::find(op)?;
        let mesh = Mesh::new(mesh, &meta())?;
        let attrs: Value = serde_json::from_str(&self.attrs)
            .map_err(|e| bad(format!("--attrs is not JSON: {e}")))?;
        let inputs = self
            .inputs
            .iter()
            .map(|t| {
                if t == "_" {
                    Ok(None)
                } else {
                    TensorType::parse(t, &mesh).map(Some)
                }
            })
            .collect::<Result<Vec<_>>>()?;
        if self.json {
            let inputs: Vec<Value> = inputs
                .iter()
                .map(|ty| {
                    ty.as_ref().map_or(Value::Null, |ty| {
                        let mut v = request::to_json(&ty.sharding, ty.shape.rank());
                        v["shape"] = json!(ty.shape.dims());
                        v["dtype"] = json!(ty.dtype.name());
                        v
                    })
                })
                .collect();
            let request = json!({ "op": op, "attrs": attrs, "mesh": self.mesh, "inputs": inputs, "run": self.run });
            println!("{:#}", request::reply(answer(&request)));
            return Ok(());
        }
        let request = Request {
            entry,
            attrs: Attrs::new(entry, &attrs)?,
            mesh,
            inputs,
        };
        let outcome = request.explain()?;
        if let Some(info) = ops::catalog().iter().find(|o| o.name == entry.name) {
            println!("{}({})  rule: {info}\n", entry.name, entry.operands);
        }
        for decision in &outcome.decisions {
            explain(decision)?;
        }
        for (i, t) in outcome.outputs.iter().enumerate() {
            println!("result {i}: {}", t.type_string());
        }
        println!("\n{}", outcome.ledger);
        if self.run {
            println!(
                "largest difference from the unsharded result on seeded data: {}",
                request.difference(&anymesh::device("cpu")?)?
            );
        }
        Ok(())
    }
}

/// One decision: the rule that ran, for the operands that there were, and what it left to choose.
fn explain(decision: &Decision) -> Result<()> {
    let (rule, mesh) = (&decision.rule, decision.inputs[0].mesh());
    let step = if decision.step == decision.op {
        String::new()
    } else {
        format!(" ({})", decision.step)
    };
    println!("{}{step}: {rule}", decision.op);
    let factors: Vec<String> = rule
        .factors
        .iter()
        .zip(rule.letters())
        .map(|(f, letter)| {
            format!(
                "{letter} = {} ({})",
                f.size,
                format!("{:?}", f.kind).to_lowercase()
            )
        })
        .collect();
    println!("  factors: {}", factors.join(", "));
    for (n, solution) in decision.alternatives()?.iter().take(5).enumerate() {
        let mark = if n == 0 { "chosen" } else { "  or  " };
        println!(
            "  {mark} {:>12} bytes{}  {}",
            solution.bytes,
            if solution.owed > 0 {
                format!(" (+{} owed)", solution.owed)
            } else {
                String::new()
            },
            assignment(rule, mesh, decision, solution)
        );
    }
    println!();
    Ok(())
}

fn assignment(rule: &Rule, mesh: &Mesh, decision: &Decision, solution: &Solution) -> String {
    use anymesh::spmd::Choice;
    let axes: Vec<String> = (0..mesh.axes().len())
        .map(|a| {
            let what = match solution.choices[a] {
                Choice::Whole => "whole".to_string(),
                Choice::Cut(f) => format!("cuts {}", rule.letters()[f]),
                Choice::Through(_, r) => format!("partial {r}"),
            };
            format!("{}: {what}", mesh.axes()[a].0)
        })
        .collect();
    let inputs: Vec<String> = decision
        .inputs
        .iter()
        .zip(&solution.inputs)
        .map(|(x, s)| s.type_string(x.dtype(), x.shape(), mesh))
        .collect();
    format!("{}  |  {}", axes.join(", "), inputs.join(", "))
}
