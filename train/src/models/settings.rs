//! Settings of models, as `config.json` of Hugging Face has them.

use crate::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// What `config.json` says.
pub type Settings = Map<String, Value>;

/// The settings that a configuration has a field for; others are passed over, and so is `null`
/// where the field has a default.
pub(crate) fn read<T: Default + Serialize + DeserializeOwned>(settings: &Settings) -> Result<T> {
    let known = fields::<T>()?;
    let mut taken = Settings::new();
    for (key, value) in settings {
        if known.contains_key(key) && !value.is_null() {
            taken.insert(key.clone(), value.clone());
        }
    }
    take(taken)
}

/// The settings, all of which must be known.
pub(crate) fn read_strictly<T: Default + Serialize + DeserializeOwned>(
    settings: &Settings,
) -> Result<T> {
    let known = fields::<T>()?;
    if let Some(key) = settings.keys().find(|key| !known.contains_key(*key)) {
        let names: Vec<&str> = known.keys().map(String::as_str).collect();
        let detail = format!("there is no such setting: there are {}", names.join(", "));
        return Err(Error::config(key, detail));
    }
    take(settings.clone())
}

/// A configuration as settings.
pub(crate) fn write<T: Serialize>(config: &T) -> Result<Settings> {
    match serde_json::to_value(config) {
        Ok(Value::Object(settings)) => Ok(settings),
        Ok(_) => Err(Error::config("config", "it is not a list of settings")),
        Err(error) => Err(Error::config("config", error.to_string())),
    }
}

fn fields<T: Default + Serialize>() -> Result<Settings> {
    write(&T::default())
}

fn take<T: DeserializeOwned>(settings: Settings) -> Result<T> {
    let parse = |settings: Settings| serde_json::from_value::<T>(Value::Object(settings));
    parse(settings.clone()).map_err(|error| {
        // Serde does not say which setting it was: the one that fails alone.
        let alone = |(key, value): (String, Value)| {
            let one = Settings::from_iter([(key.clone(), value)]);
            parse(one).err().map(|e| Error::config(key, e.to_string()))
        };
        let found = settings.into_iter().find_map(alone);
        found.unwrap_or_else(|| Error::config("config", error.to_string()))
    })
}

/// That a setting, where it is given, has the one value that models here have.
pub(crate) fn only(settings: &Settings, key: &str, value: Value, why: &str) -> Result<()> {
    match settings.get(key) {
        Some(found) if !found.is_null() && *found != value => Err(Error::config(
            key,
            format!("{found} is not supported, only {value}: {why}"),
        )),
        _ => Ok(()),
    }
}

/// That a setting is not given.
pub(crate) fn absent(settings: &Settings, key: &str, why: &str) -> Result<()> {
    match settings.get(key) {
        Some(found) if !found.is_null() => Err(Error::config(key, why)),
        _ => Ok(()),
    }
}

/// That sizes are there to be multiplied.
pub(crate) fn positive(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, n)| *n == 0) {
        Some((key, _)) => Err(Error::config(*key, "it is 0, and must be 1 or more")),
        None => Ok(()),
    }
}

/// That a share is one.
pub(crate) fn share(key: &str, value: f64) -> Result<()> {
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::config(
            key,
            format!("{value} is no share of 0 or more and below 1"),
        )),
    }
}

/// That a number is larger than zero.
pub(crate) fn above_zero(key: &str, value: f64) -> Result<()> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(Error::config(key, format!("{value} is not above zero"))),
    }
}
