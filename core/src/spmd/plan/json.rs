//! Plans for programs.

use super::{
    PlannedStep, StepPlan, Totals,
    session::Hold,
    steps::{Take, sharding_text},
};
use crate::{
    Alternative, Error, Mesh, Result, Sharding, ShardingSpec, TypeSpec, meta,
    spmd::{Choice, Fingerprint},
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// What the first field says.
const FORMAT: &str = "anymesh step plan 1";

impl StepPlan {
    /// Everything there is to it, as JSON.
    pub fn to_json(&self) -> Value {
        let mut meshes = Meshes::default();
        let steps: Vec<Value> = self.steps.iter().map(|s| s.to_json(&mut meshes)).collect();
        let Fingerprint { calls, hash } = self.fingerprint;
        json!({
            "format": FORMAT,
            "totals": totals_json(&self.totals),
            "eager": totals_json(&self.eager),
            "fingerprint": { "calls": calls, "hash": format!("{hash:016x}") },
            "steps": steps,
        })
    }

    /// A plan from [its JSON](Self::to_json).
    pub fn from_json(value: &Value) -> Result<Self> {
        let plan = Fields::of(value, "a plan")?;
        if plan.text("format")? != FORMAT {
            return Err(bad(value, format!("the format '{FORMAT}'")));
        }
        let fingerprint = Fields::of(plan.get("fingerprint")?, "a fingerprint")?;
        let mut meshes = Meshes::default();
        let steps = plan.list("steps")?.iter();
        Ok(Self {
            totals: totals(plan.get("totals")?)?,
            eager: totals(plan.get("eager")?)?,
            fingerprint: Fingerprint {
                calls: fingerprint.number("calls")?,
                hash: fingerprint.hash("hash")?,
            },
            steps: steps
                .map(|step| PlannedStep::from_json(step, &mut meshes))
                .collect::<Result<Vec<_>>>()?
                .into(),
        })
    }
}

fn totals_json(t: &Totals) -> Value {
    json!({ "recv_bytes": t.bytes, "seconds": t.seconds, "memory": t.memory })
}

fn totals(value: &Value) -> Result<Totals> {
    let fields = Fields::of(value, "totals")?;
    Ok(Totals {
        bytes: fields.number("recv_bytes")?,
        seconds: fields.seconds("seconds")?,
        memory: fields.number("memory")?,
    })
}

impl PlannedStep {
    /// Everything there is to it, as JSON.
    fn to_json(&self, meshes: &mut Meshes) -> Value {
        let alternatives: Vec<Value> = self
            .alternatives
            .iter()
            .map(|a| json!({ "choice": a.description, "recv_bytes": a.bytes }))
            .collect();
        let mut step = json!({
            "op": self.op, "rule": self.rule, "caller": self.caller, "mesh": self.mesh,
            "operands": self.operands, "targets": self.targets, "results": self.results,
            "recv_bytes": self.bytes, "seconds": self.seconds, "memory": self.memory,
            "key": format!("{:016x}", self.key),
        });
        if !alternatives.is_empty() {
            step["alternatives"] = alternatives.into();
        }
        let mut form = |operand: usize, form: &Sharding| {
            let rank = rank_of(&self.operands, operand);
            match meshes.get(&self.mesh) {
                Ok(mesh) => sharding_text(form, mesh, rank),
                Err(_) => String::new(),
            }
        };
        match &self.take {
            Take::Call {
                choices,
                cuts,
                sources,
                again,
                holds,
            } => {
                step["choice"] = self.choice.clone().into();
                step["choices"] = choices.iter().map(choice_json).collect();
                step["cuts"] = cuts.iter().map(|(f, a)| json!([f, a])).collect();
                if sources.iter().any(Option::is_some) {
                    let source =
                        |(i, s): (usize, &Option<Sharding>)| s.as_ref().map(|s| form(i, s));
                    step["sources"] = json!(
                        sources
                            .iter()
                            .enumerate()
                            .map(source)
                            .collect::<Vec<Option<String>>>()
                    );
                }
                if *again != 0 {
                    step["again"] = (*again).into();
                }
                if !holds.is_empty() {
                    let hold = |h: &Hold| json!({ "operand": h.operand, "form": form(h.operand.into(), &h.form), "until": h.until });
                    step["holds"] = holds.iter().map(hold).collect();
                }
            }
            Take::Reshard { source } => {
                step["source"] = json!(source.as_ref().map(|s| form(0, s)));
            }
        }
        step
    }

    fn from_json(value: &Value, meshes: &mut Meshes) -> Result<Self> {
        let step = Fields::of(value, "a step")?;
        let mesh = step.text("mesh")?;
        let operands = step.texts("operands")?;
        let mut form = |operand: usize, text: &str| -> Result<Sharding> {
            let spec: ShardingSpec = text.parse()?;
            spec.on(meshes.get(&mesh)?, rank_of(&operands, operand))
        };
        let take = match step.find("choices") {
            None => Take::Reshard {
                source: match step.find("source") {
                    None | Some(Value::Null) => None,
                    Some(Value::String(text)) => Some(form(0, text)?),
                    Some(other) => return Err(bad(other, "a sharding")),
                },
            },
            Some(choices) => {
                let choices = list(choices)?.iter().map(choice);
                let sources = match step.find("sources") {
                    None => vec![None; operands.len()],
                    Some(sources) => (list(sources)?.iter().enumerate())
                        .map(|(i, source)| match source {
                            Value::Null => Ok(None),
                            Value::String(text) => form(i, text).map(Some),
                            other => Err(bad(other, "a sharding")),
                        })
                        .collect::<Result<_>>()?,
                };
                let holds = step.find("holds").map_or(Ok(&[][..]), list)?.iter();
                let holds = holds.map(|hold| {
                    let hold = Fields::of(hold, "a form that is held")?;
                    let operand = hold.small("operand")?;
                    Ok(Hold {
                        operand,
                        form: form(operand.into(), &hold.text("form")?)?,
                        until: hold.number("until")? as usize,
                    })
                });
                let cuts = step.list("cuts")?.iter().map(|pair| match list(pair)? {
                    [factor, axis] => Ok((small(factor)?, small(axis)?)),
                    _ => Err(bad(pair, "a factor and an axis")),
                });
                if sources.len() != operands.len() {
                    return Err(bad(value, "a source for each operand"));
                }
                Take::Call {
                    choices: choices.collect::<Result<_>>()?,
                    cuts: cuts.collect::<Result<_>>()?,
                    sources: sources.into(),
                    again: match step.find("again") {
                        None => 0,
                        Some(bits) => number(bits)? as u32,
                    },
                    holds: holds.collect::<Result<_>>()?,
                }
            }
        };
        let alternatives = step.find("alternatives").map_or(Ok(&[][..]), list)?.iter();
        let alternative = |value: &Value| {
            let fields = Fields::of(value, "an alternative")?;
            Ok(Alternative {
                description: fields.text("choice")?,
                bytes: fields.number("recv_bytes")?,
            })
        };
        Ok(Self {
            op: step.text("op")?,
            rule: step.text("rule")?,
            caller: step.text("caller")?,
            targets: step.texts("targets")?,
            results: step.texts("results")?,
            choice: match step.find("choice") {
                None => String::new(),
                Some(_) => step.text("choice")?,
            },
            alternatives: alternatives.map(alternative).collect::<Result<_>>()?,
            bytes: step.number("recv_bytes")?,
            seconds: step.seconds("seconds")?,
            memory: step.number("memory")?,
            key: step.hash("key")?,
            mesh,
            operands,
            take,
        })
    }
}

fn choice_json(choice: &Choice) -> Value {
    match choice {
        Choice::Whole => "whole".into(),
        Choice::Cut(f) => json!({ "cut": f }),
        Choice::Through(operands, reduction) => {
            json!({ "through": operands, "reduction": reduction.name() })
        }
    }
}

fn choice(value: &Value) -> Result<Choice> {
    if value == "whole" {
        return Ok(Choice::Whole);
    }
    let fields = Fields::of(value, "a choice")?;
    if let Some(factor) = fields.find("cut") {
        return Ok(Choice::Cut(small(factor)?.into()));
    }
    let operands = u32::try_from(fields.number("through")?);
    let operands = operands.map_err(|_| bad(value, "operands as bits"))?;
    Ok(Choice::Through(
        operands,
        fields.text("reduction")?.parse()?,
    ))
}

/// The dimensions of an operand, from the text of its type.
fn rank_of(operands: &[String], operand: usize) -> usize {
    let ty = operands.get(operand).map(|text| text.parse::<TypeSpec>());
    ty.and_then(Result::ok).map_or(0, |ty| ty.shape.rank())
}

/// Meshes without values, by their text.
#[derive(Default)]
struct Meshes(HashMap<String, Mesh>);

impl Meshes {
    fn get(&mut self, text: &str) -> Result<&Mesh> {
        if !self.0.contains_key(text) {
            let axes = text.strip_prefix("mesh(").and_then(|t| t.strip_suffix(')'));
            let mesh = Mesh::new(axes.unwrap_or(text), &meta())?;
            self.0.insert(text.into(), mesh);
        }
        self.0.get(text).ok_or_else(|| bad(&json!(text), "a mesh"))
    }
}

/// The most of a text that errors repeat.
const SHOWN: usize = 80;

fn bad(value: &Value, expected: impl Into<String>) -> Error {
    let text: String = value.to_string().chars().take(SHOWN).collect();
    Error::Parse {
        what: "step plan",
        text,
        expected: expected.into(),
    }
}

fn list(value: &Value) -> Result<&[Value]> {
    let found = value.as_array().map(Vec::as_slice);
    found.ok_or_else(|| bad(value, "a list"))
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().ok_or_else(|| bad(value, "a number"))
}

fn small(value: &Value) -> Result<u8> {
    let found = value.as_u64().and_then(|n| u8::try_from(n).ok());
    found.ok_or_else(|| bad(value, "a small number"))
}

/// An object whose fields are asked for by name.
struct Fields<'v> {
    value: &'v Value,
    map: &'v Map<String, Value>,
}

impl<'v> Fields<'v> {
    fn of(value: &'v Value, what: &str) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| bad(value, what))?;
        Ok(Self { value, map })
    }

    fn find(&self, name: &str) -> Option<&'v Value> {
        self.map.get(name)
    }

    fn get(&self, name: &str) -> Result<&'v Value> {
        let missing = || bad(self.value, format!("a field '{name}'"));
        self.find(name).ok_or_else(missing)
    }

    fn text(&self, name: &str) -> Result<String> {
        let value = self.get(name)?;
        let text = value.as_str().ok_or_else(|| bad(value, "a text"))?;
        Ok(text.to_string())
    }

    fn texts(&self, name: &str) -> Result<Vec<String>> {
        let text = |value: &Value| match value.as_str() {
            Some(text) => Ok(text.to_string()),
            None => Err(bad(value, "a text")),
        };
        self.list(name)?.iter().map(text).collect()
    }

    fn list(&self, name: &str) -> Result<&'v [Value]> {
        list(self.get(name)?)
    }

    fn number(&self, name: &str) -> Result<u64> {
        number(self.get(name)?)
    }

    fn small(&self, name: &str) -> Result<u8> {
        small(self.get(name)?)
    }

    fn seconds(&self, name: &str) -> Result<f64> {
        let value = self.get(name)?;
        let seconds = value.as_f64().filter(|s| s.is_finite() && *s >= 0.0);
        seconds.ok_or_else(|| bad(value, "seconds"))
    }

    fn hash(&self, name: &str) -> Result<u64> {
        let text = self.text(name)?;
        u64::from_str_radix(&text, 16).map_err(|_| bad(&json!(text), "16 hexadecimal digits"))
    }
}
