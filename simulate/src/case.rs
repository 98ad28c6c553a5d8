//! What to simulate, as a file or a command says it: presets, and what differs from them.

use crate::{Error, Layout, Limits, Machine, Model, Result, machine, preset};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A model, a machine, ranks, and what was said of a layout.
///
/// ```
/// use anymesh_simulate::Case;
/// use serde_json::json;
/// let file = json!({"model": {"preset": "llama-3-8b", "layers": 16}, "machine": "h200", "layout": {"tp": 4}});
/// let case = Case::new(file, &["ranks=32".into(), "layout.micro=2".into(), "zero=2".into()])?;
/// assert_eq!((case.model.layers, case.ranks), (16, 32));
/// assert_eq!((case.layout.dp, case.layout.tp, case.layout.zero), (8, 4, 2));
/// assert_eq!(case.pinned, ["micro", "tp", "zero"]);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What is trained.
    pub model: Model,
    /// On what.
    pub machine: Machine,
    /// On how many GPUs.
    pub ranks: usize,
    /// How; where `dp` is not said it is what is left of the ranks.
    pub layout: Layout,
    /// What was said of the layout: a search keeps it.
    pub pinned: Vec<String>,
}

impl Case {
    /// From `model` and `machine` (a preset's name, or numbers with an optional `preset` to start from),
    /// `layout` and `ranks`, with settings such as `tp=8`, `model.layers=4` or
    /// `machine.coefficients.products=0.5` after them.
    pub fn new(mut file: Value, sets: &[String]) -> Result<Case> {
        for set in sets {
            apply(&mut file, set)?;
        }
        let Value::Object(mut file) = file else {
            return Err(parse(
                "the case",
                "expected model, machine, layout and ranks",
            ));
        };
        let known = ["model", "machine", "layout", "ranks"];
        if let Some(name) = file.keys().find(|k| !known.contains(&k.as_str())) {
            return Err(Error::Unknown {
                what: "setting",
                name: name.clone(),
                known: known.map(String::from).to_vec(),
            });
        }
        let mut training = None;
        let model = resolve(file.remove("model"), "model", None, |name| {
            let found = preset(name)?;
            training = Some((found.sequence, found.batch));
            value(&found.model)
        })?;
        let machine = resolve(file.remove("machine"), "machine", Some("h100"), |name| {
            value(&machine(name)?)
        })?;
        let layout = file.remove("layout").unwrap_or_else(|| json!({}));
        let Value::Object(said) = layout else {
            return Err(parse("layout", "expected settings such as tp = 8"));
        };
        let pinned: Vec<String> = said.keys().cloned().collect();
        let mut all = Layout::default();
        if let Some((sequence, batch)) = training {
            (all.sequence, all.batch) = (sequence, batch);
        }
        let Value::Object(mut all) = value(&all)? else {
            return Err(parse("layout", "expected settings such as tp = 8"));
        };
        all.extend(said);
        let mut layout: Layout = read(Value::Object(all), "layout")?;
        let product = layout.ranks();
        let ranks = match file.remove("ranks") {
            Some(ranks) => read(ranks, "ranks")?,
            None => product.unwrap_or(0),
        };
        if !pinned.iter().any(|p| p == "dp") {
            let rest = [layout.tp, layout.pp, layout.cp];
            let rest = rest.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
            let fits = rest.filter(|rest| *rest > 0 && ranks.is_multiple_of(*rest));
            layout.dp = fits.map_or(1, |rest| (ranks / rest).max(1));
        }
        Ok(Case {
            model,
            machine,
            ranks,
            layout,
            pinned,
        })
    }

    /// Whether any axis was said, so that there is a layout to price.
    pub fn is_laid_out(&self) -> bool {
        let axes = ["dp", "tp", "pp", "cp", "ep"];
        self.pinned.iter().any(|p| axes.contains(&p.as_str()))
    }

    /// What a search over layouts of this case keeps to.
    pub fn limits(&self) -> Limits {
        Limits {
            layout: self.layout.clone(),
            pinned: self.pinned.clone(),
            ..Limits::new(self.layout.sequence, self.layout.batch)
        }
    }
}

/// A machine by its name, with settings such as `coefficients.products=0.5` over it.
///
/// ```
/// let machine = anymesh_simulate::machine_with("h100", &["memory=9.6e10"])?;
/// assert_eq!(machine.memory, 9.6e10);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
pub fn machine_with(name: &str, sets: &[impl AsRef<str>]) -> Result<Machine> {
    let mut file = json!({"machine": name});
    for set in sets {
        apply(&mut file, &format!("machine.{}", set.as_ref()))?;
    }
    let said = file.as_object_mut().and_then(|f| f.remove("machine"));
    let found: Machine = resolve(said, "machine", None, |name| value(&machine(name)?))?;
    found.check()?;
    Ok(found)
}

fn parse(what: &str, detail: impl ToString) -> Error {
    Error::Parse {
        what: what.into(),
        detail: detail.to_string(),
    }
}

fn value<T: serde::Serialize>(of: &T) -> Result<Value> {
    serde_json::to_value(of).map_err(|e| parse("a preset", e))
}

fn read<T: DeserializeOwned>(value: Value, what: &str) -> Result<T> {
    serde_json::from_value(value).map_err(|e| parse(what, e))
}

/// A preset's name, or an object that may start from one.
fn resolve<T: DeserializeOwned>(
    said: Option<Value>,
    what: &str,
    otherwise: Option<&str>,
    mut named: impl FnMut(&str) -> Result<Value>,
) -> Result<T> {
    let said = said.or_else(|| otherwise.map(|name| json!(name)));
    let whole = match said {
        None => return Err(parse(what, "it is missing: give a preset's name or a file")),
        Some(Value::String(name)) => named(&name)?,
        Some(Value::Object(mut fields)) => {
            let start = match fields.remove("preset") {
                Some(Value::String(name)) => named(&name)?,
                Some(other) => return Err(parse(what, format!("preset is {other}: it is a name"))),
                None => match otherwise {
                    Some(name) => named(name)?,
                    None => json!({"name": "own"}),
                },
            };
            merge(start, fields)
        }
        Some(other) => return Err(parse(what, format!("{other} is no name and no object"))),
    };
    read(whole, what)
}

/// Fields put over those of an object, objects in objects too.
fn merge(start: Value, fields: Map<String, Value>) -> Value {
    let Value::Object(mut all) = start else {
        return Value::Object(fields);
    };
    for (name, value) in fields {
        let value = match (all.remove(&name), value) {
            (Some(old @ Value::Object(_)), Value::Object(new)) => merge(old, new),
            (_, new) => new,
        };
        all.insert(name, value);
    }
    Value::Object(all)
}

/// `path=value` put into a case; a path without a dot is `ranks` or of the layout.
fn apply(file: &mut Value, set: &str) -> Result<()> {
    let bad = || {
        parse(
            set,
            "expected a setting such as tp=8, model.layers=4 or machine.memory=8e10",
        )
    };
    let (path, text) = set.split_once('=').ok_or_else(bad)?;
    let (path, text) = (path.trim(), text.trim());
    let value = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
    let mut parts: Vec<&str> = path.split('.').collect();
    if parts.len() == 1 && !["ranks", "model", "machine"].contains(&path) {
        parts.insert(0, "layout");
    }
    if parts.iter().any(|p| p.is_empty()) {
        return Err(bad());
    }
    let last = parts.pop().ok_or_else(bad)?;
    let mut at = file;
    for part in parts {
        let Value::Object(fields) = at else {
            return Err(bad());
        };
        let next = fields.entry(part).or_insert_with(|| json!({}));
        // A name becomes what starts from it.
        if let Value::String(name) = next {
            *next = json!({"preset": name.clone()});
        }
        at = next;
    }
    match at {
        Value::Object(fields) => fields.insert(last.into(), value),
        _ => return Err(bad()),
    };
    Ok(())
}
