//! A configuration as text: a TOML file, and single settings over it.

use crate::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use std::path::Path;
use toml::{Table, Value};

/// Reads a configuration from TOML, with single settings such as `optimizer.lr=3e-4` put over it.
/// Keys that nobody knows are errors, which show the line.
///
/// ```
/// # use anymesh_train::config::parse;
/// # #[derive(serde::Deserialize)] #[serde(deny_unknown_fields)] struct Save { keep: u64, every_steps: u64 }
/// # #[derive(serde::Deserialize)] #[serde(deny_unknown_fields)] struct Settings { steps: u64, seed: u64, save: Save }
/// let settings: Settings = parse("steps = 10\n[save]\nkeep = 3", &["save.every_steps=5", "seed=7"])?;
/// assert_eq!((settings.steps, settings.seed, settings.save.every_steps), (10, 7, 5));
/// let error = parse::<Settings>("stepps = 10", &[] as &[&str]).unwrap_err();
/// assert!(error.to_string().contains("unknown field `stepps`"), "{error}");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn parse<C: DeserializeOwned>(text: &str, set: &[impl AsRef<str>]) -> Result<C> {
    let wrong = |e: toml::de::Error| Error::config("configuration", e.to_string().trim_end());
    if set.is_empty() {
        return toml::from_str(text).map_err(wrong);
    }
    let mut table: Table = toml::from_str(text).map_err(wrong)?;
    for set in set {
        put(&mut table, set.as_ref())?;
    }
    toml::from_str(&print(&table)?).map_err(wrong)
}

/// [`parse`] of a file.
pub fn read<C: DeserializeOwned>(path: &Path, set: &[impl AsRef<str>]) -> Result<C> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?;
    parse(&text, set).map_err(|error| match error {
        Error::Config { detail, .. } => Error::config(path.display().to_string(), detail),
        other => other,
    })
}

/// A configuration with all its defaults, as TOML.
pub fn print(config: &impl Serialize) -> Result<String> {
    toml::to_string_pretty(config).map_err(|e| Error::config("configuration", e.to_string()))
}

/// Puts one setting, `a.b=value`, over a table. The value is TOML, or a text that is none.
fn put(table: &mut Table, set: &str) -> Result<()> {
    let Some((path, value)) = set.split_once('=') else {
        return Err(Error::config(
            set,
            "a setting is a key and a value: optimizer.lr=3e-4",
        ));
    };
    let value = value.trim();
    let value = match toml::from_str::<Table>(&format!("value = {value}")) {
        Ok(mut parsed) if parsed.len() == 1 => parsed.remove("value"),
        _ => None,
    }
    .unwrap_or_else(|| Value::String(value.into()));
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    if keys.iter().any(|key| key.is_empty()) {
        return Err(Error::config(set, "the key has an empty part"));
    }
    let mut at = Value::Table(std::mem::take(table));
    let outcome = put_at(&mut at, &keys, value, set);
    if let Value::Table(whole) = at {
        *table = whole;
    }
    outcome
}

fn put_at(at: &mut Value, keys: &[&str], value: Value, set: &str) -> Result<()> {
    let Some((key, rest)) = keys.split_first() else {
        *at = value;
        return Ok(());
    };
    let next = match at {
        Value::Table(table) => table
            .entry((*key).to_string())
            .or_insert_with(|| Value::Table(Table::new())),
        Value::Array(list) => {
            let length = list.len();
            let found = key.parse().ok().and_then(|i: usize| list.get_mut(i));
            found.ok_or_else(|| {
                Error::config(
                    set,
                    format!("'{key}' is no number below {length}, the length of the list"),
                )
            })?
        }
        _ => {
            let detail = format!("'{key}' is below something that is a single value");
            return Err(Error::config(set, detail));
        }
    };
    put_at(next, rest, value, set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(text: &str, set: &[&str]) -> Result<Table> {
        parse(text, set)
    }

    #[test]
    fn values_are_toml_or_text() -> Result<()> {
        let table = merged(
            "a = 1",
            &[
                "a=2.5",
                "b.c=true",
                "b.d=[1, 2]",
                "b.e=dp=2, tp=4",
                "b.d.1=7",
            ],
        )?;
        assert_eq!(table["a"].as_float(), Some(2.5));
        assert_eq!(table["b"]["c"].as_bool(), Some(true));
        assert_eq!(table["b"]["d"][1].as_integer(), Some(7));
        assert_eq!(table["b"]["e"].as_str(), Some("dp=2, tp=4"));
        Ok(())
    }

    #[test]
    fn what_cannot_be_put_is_said() {
        for (set, part) in [
            ("a", "a key and a value"),
            (".b=1", "empty part"),
            ("a.b=1", "single value"),
            ("l.5=1", "below 2"),
        ] {
            let error = merged("a = 1\nl = [1, 2]", &[set]).unwrap_err().to_string();
            assert!(error.contains(part), "{set}: {error}");
        }
        let error = merged("a = ", &[]).unwrap_err().to_string();
        assert!(error.contains("line 1"), "{error}");
    }
}
