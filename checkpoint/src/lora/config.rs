//! What `adapter_config.json` says about an adapter.

use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// How strongly and in which orientation an adapter is added.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The inner size of the two factors.
    pub r: usize,
    /// The strength: the product of the factors is scaled by `alpha / r`.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` instead.
    pub use_rslora: bool,
    /// Whether base weights are stored as `[inputs, outputs]`.
    pub fan_in_fan_out: bool,
    /// Inner sizes of modules that have their own, by the end of their names.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Strengths of modules that have their own, by the end of their names.
    pub alpha_pattern: BTreeMap<String, f64>,
}

const WHAT: &str = "configuration of a LoRA adapter";

impl Config {
    /// Reads `adapter_config.json`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
        let json: Value = serde_json::from_slice(&text)
            .map_err(|e| Error::format(path, WHAT, format!("not JSON: {e}")))?;
        parse(&json).map_err(|detail| Error::format(path, WHAT, detail))
    }

    /// The inner size that a module's factors must have.
    pub fn rank(&self, module: &str) -> usize {
        own(&self.rank_pattern, module).unwrap_or(self.r)
    }

    /// What a module's product is scaled by.
    pub fn scale(&self, module: &str) -> f64 {
        let alpha = own(&self.alpha_pattern, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// The value of the first pattern that is a module's name or ends it after a dot.
fn own<T: Copy>(patterns: &BTreeMap<String, T>, module: &str) -> Option<T> {
    let ends = |pattern: &str| {
        module
            .strip_suffix(pattern)
            .is_some_and(|front| front.is_empty() || front.ends_with('.'))
    };
    patterns
        .iter()
        .find(|(pattern, _)| ends(pattern))
        .map(|(_, value)| *value)
}

fn parse(json: &Value) -> std::result::Result<Config, String> {
    let rank = |value: &Value, what: &str| {
        let rank = value
            .as_u64()
            .filter(|&r| r > 0 && r <= 1 << 20)
            .ok_or_else(|| format!("{what} is {value}, not a rank"))?;
        Ok::<usize, String>(rank as usize)
    };
    let number = |value: &Value, what: &str| {
        value
            .as_f64()
            .filter(|x| x.is_finite())
            .ok_or_else(|| format!("{what} is {value}, not a number"))
    };
    let flag = |key: &str| match json.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(value) => value
            .as_bool()
            .ok_or_else(|| format!("'{key}' is {value}, not true or false")),
    };
    let get = |key: &str| json.get(key).ok_or_else(|| format!("it has no '{key}'"));
    let pattern = |key: &str| -> std::result::Result<Vec<(String, &Value)>, String> {
        let Some(entries) = json.get(key).and_then(Value::as_object) else {
            return Ok(vec![]);
        };
        let plain = |name: &str| {
            name.chars()
                .all(|c| c.is_alphanumeric() || "._-".contains(c))
        };
        match entries.keys().find(|name| !plain(name)) {
            Some(name) => Err(format!(
                "'{key}': '{name}' is a regular expression; write out the names of the modules"
            )),
            None => Ok(entries
                .iter()
                .map(|(name, value)| (name.clone(), value))
                .collect()),
        }
    };
    if let Some(kind) = json
        .get("peft_type")
        .filter(|kind| kind.as_str() != Some("LORA"))
    {
        return Err(format!("the adapter is of type {kind}, not \"LORA\""));
    }
    if flag("use_dora")? {
        return Err(
            "the adapter uses DoRA ('use_dora'), whose magnitudes are not merged here".into(),
        );
    }
    Ok(Config {
        r: rank(get("r")?, "'r'")?,
        alpha: number(get("lora_alpha")?, "'lora_alpha'")?,
        use_rslora: flag("use_rslora")?,
        fan_in_fan_out: flag("fan_in_fan_out")?,
        rank_pattern: pattern("rank_pattern")?
            .into_iter()
            .map(|(name, value)| Ok((name, rank(value, "'rank_pattern'")?)))
            .collect::<std::result::Result<_, String>>()?,
        alpha_pattern: pattern("alpha_pattern")?
            .into_iter()
            .map(|(name, value)| Ok((name, number(value, "'alpha_pattern'")?)))
            .collect::<std::result::Result<_, String>>()?,
    })
}
