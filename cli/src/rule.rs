//! `anymesh rule`: what an op does with given shardings, and why.

use crate::{
    picture::PictureArgs,
    request::{self, bad, quoted},
    seeded::Seeded,
    server,
};
use anymesh::conformance::registry::{self, Attrs};
use anymesh::{
    Error, Mesh, Place, Result, Tensor, TensorType, meta, ops,
    show::{Figure, Parts, Show},
    spmd::{Decision, Ledger, trace},
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
    #[arg(long, conflicts_with_all = ["svg", "html"])]
    list: bool,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Answer requests from stdin, one JSON object a line.
    #[arg(long, conflicts_with_all = ["svg", "html"])]
    jsonl: bool,
}

/// What an op was asked to do.
pub(crate) struct Request {
    pub(crate) entry: &'static registry::Entry,
    pub(crate) attrs: Attrs,
    pub(crate) mesh: Mesh,
    pub(crate) inputs: Vec<Option<TensorType>>,
    /// Whether it shall run with values.
    run: bool,
}

/// What became of it.
pub(crate) struct Outcome {
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
    ledger: Ledger,
    decisions: Vec<Decision>,
}

/// What became of a request, and of the run that it asked for.
pub(crate) struct Answer {
    outcome: Outcome,
    /// Whether the results have the sizes that made-up values gave them.
    seeded: bool,
    pub(crate) difference: Option<f64>,
}

impl Request {
    pub(crate) fn parse(request: &Value) -> Result<Self> {
        let fields = request::object(
            request,
            "a request",
            &["op", "attrs", "mesh", "inputs", "run"],
        )?;
        let name = request::field(fields, "op")?;
        let name = name.as_str().ok_or_else(|| {
            bad(format!(
                "'op' must be the name of an op, got {}",
                quoted(name)
            ))
        })?;
        let entry = registry::find(name)?;
        let mesh = request::mesh(request::field(fields, "mesh")?, &meta())?;
        let list = request::field(fields, "inputs")?;
        let list = list.as_array().ok_or_else(|| {
            bad(format!(
                "'inputs' must be a list, with null for an operand that is left out, got {}",
                quoted(list)
            ))
        })?;
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
        let run = match fields.get("run") {
            None => false,
            Some(Value::Bool(run)) => *run,
            Some(other) => {
                return Err(bad(format!(
                    "'run' must be true or false, got {}",
                    quoted(other)
                )));
            }
        };
        Ok(Self {
            entry,
            attrs: Attrs::new(entry, fields.get("attrs").unwrap_or(&Value::Null))?,
            mesh,
            inputs,
            run,
        })
    }

    /// Runs the op on these operands and notes what it decided and sent.
    pub(crate) fn call(&self, inputs: &[Option<Tensor>], mesh: &Mesh) -> Result<Outcome> {
        let ((outputs, ledger), decisions) =
            trace(|| Ledger::record(|| self.entry.call(inputs, &self.attrs, &Place::from(mesh))));
        Ok(Outcome {
            inputs: inputs.to_vec(),
            outputs: outputs?,
            ledger,
            decisions,
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
        self.call(&inputs, &self.mesh)
    }

    /// Does what was asked for. The results of some ops have as many elements as the values say:
    /// these are only explained by running them.
    pub(crate) fn answer(&self) -> Result<Answer> {
        let reads = |device: &str| device == self.mesh.device(0).name();
        let explained = match self.explain() {
            Err(Error::Unsupported { device, .. }) if reads(&device) => None,
            outcome => Some(outcome?),
        };
        let (seeded, explained) = match (explained, self.run) {
            (Some(outcome), false) => {
                return Ok(Answer {
                    outcome,
                    seeded: false,
                    difference: None,
                });
            }
            (None, false) => {
                return Err(bad(format!(
                    "the results of {} depend on the values: ask for a run, which makes some up",
                    self.entry.name
                )));
            }
            (explained, true) => (explained.is_none(), explained),
        };
        let cpu = anymesh::device("cpu")?;
        let operands = Seeded::new(self, explained.as_ref().map(|o| &o.outputs[..]), &cpu)?;
        let ran = operands.outcome()?;
        let difference = Some(operands.difference(&ran.outputs, &cpu)?);
        Ok(Answer {
            outcome: explained.unwrap_or(ran),
            seeded,
            difference,
        })
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

/// One request of `--jsonl`.
pub(crate) fn answer(value: &Value) -> Result<Value> {
    Request::parse(value)?.answer().map(|a| a.to_json())
}

impl Answer {
    pub(crate) fn to_json(&self) -> Value {
        let outcome = &self.outcome;
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
        if self.seeded {
            answer["seeded"] = true.into();
        }
        if let Some(difference) = self.difference {
            // JSON has no infinities.
            answer["max_difference"] = match difference.is_finite() {
                true => difference.into(),
                false => "inf".into(),
            };
        }
        answer
    }
}

impl Outcome {
    /// What was decided, how results lie, and what was sent.
    fn figures(&self) -> Vec<Figure> {
        let mut figures: Vec<Figure> = self.decisions.iter().map(Show::figure).collect();
        for (i, result) in self.outputs.iter().enumerate() {
            let mut figure = Parts::of(result).figure();
            figure.title = format!("result {i}: {}", figure.title);
            figures.push(figure);
        }
        figures.push(self.ledger.figure());
        figures
    }
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
            return server::serve(answer);
        }
        let (Some(op), Some(mesh)) = (&self.op, &self.mesh) else {
            return Err(bad(
                "give an op, --mesh and --in for each operand, or --list, or --jsonl; for example: anymesh rule matmul --mesh dp=2,tp=4 --in \"f32[64@dp,32]\" --in \"f32[32,64@tp]\"",
            ));
        };
        let entry = registry::find(op)?;
        let mesh = Mesh::new(mesh, &meta())?;
        request::check_ranks(&mesh)?;
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
        let request = Request {
            entry,
            attrs: Attrs::new(entry, &attrs)?,
            mesh,
            inputs,
            run: self.run,
        };
        let answer = match request.answer() {
            Err(error) if self.json => {
                println!("{:#}", request::reply(Err(error)));
                return Ok(());
            }
            answer => answer?,
        };
        if self.picture.write(|| answer.outcome.figures())? {
            return Ok(());
        }
        if self.json {
            println!("{:#}", request::reply(Ok(answer.to_json())));
            return Ok(());
        }
        let Answer {
            outcome,
            seeded,
            difference,
        } = answer;
        if let Some(info) = ops::catalog().iter().find(|o| o.name == entry.name) {
            println!("{}({})  rule: {info}\n", entry.name, entry.operands);
        }
        for decision in &outcome.decisions {
            explain(decision)?;
        }
        for (i, t) in outcome.outputs.iter().enumerate() {
            println!("result {i}: {}", t.type_string());
        }
        if seeded {
            println!("(the sizes are those that made-up values give)");
        }
        println!("\n{}", outcome.ledger);
        if let Some(difference) = difference {
            println!("largest difference from the unsharded result on seeded data: {difference}");
        }
        Ok(())
    }
}

/// One decision: the rule that ran, for the operands that there were, and what it left to choose.
fn explain(decision: &Decision) -> Result<()> {
    let rule = &decision.rule;
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
        let (axes, inputs) = decision.describe(solution);
        let mark = if n == 0 { "chosen" } else { "  or  " };
        println!(
            "  {mark} {:>12} bytes{}  {axes}  |  {inputs}",
            solution.bytes,
            if solution.owed > 0 {
                format!(" (+{} owed)", solution.owed)
            } else {
                String::new()
            }
        );
    }
    println!();
    Ok(())
}
