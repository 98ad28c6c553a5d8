//! Adapters alone: in a folder as PEFT has it, and as values by name.

use super::{Adapter, Lora, is_factor, layer};
use crate::{Error, Module, Param, Result};
use anymesh_checkpoint::{
    Memory, Source, TensorInfo,
    lora::{self, Config, Factors, PREFIX, Parts},
};
use anymesh_core::Tensor;
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// The values of what is trained, as they are stored: of adapters, and of other parameters that
/// were [unfrozen](Module::unfreeze). [`Module::set_values`] puts them back into a model with the
/// same adapters: a checkpoint of them is small.
pub fn lora_values<M: Module + ?Sized>(model: &M) -> BTreeMap<String, Tensor> {
    let mut values = BTreeMap::new();
    model.visit("", &mut |name, p| {
        if p.is_trainable() || is_factor(name) {
            values.insert(name.to_string(), p.value().detach());
        }
    });
    values
}

/// Writes the adapters of a model into a folder as PEFT has it, which must not be there yet or be
/// empty: `adapter_model.safetensors` with `base_model.model.<layer>.lora_A.weight` and so on, and
/// `adapter_config.json`. Other parameters that are trained are written whole. `about` are further
/// settings, such as `base_model_name_or_path` and `task_type`.
///
/// On several processes all call it, and the one with the first rank of the mesh writes.
pub fn save_lora<M: Module + ?Sized>(
    folder: impl AsRef<Path>,
    model: &M,
    about: &Map<String, Value>,
) -> Result<()> {
    let mut adapters: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    let mut dropout: f64 = 0.0;
    let mut first = true;
    model.visit("", &mut |name, p| {
        if let Some(adapter) = &p.adapter {
            adapters.insert(layer(name).into(), (adapter.rank(), adapter.alpha()));
            dropout = dropout.max(adapter.dropout);
            first = p.value().mesh().is_first();
        }
    });
    let config = config_of(&adapters)?;
    let mut file = Memory::default();
    for (name, value) in lora_values(model) {
        let info = TensorInfo {
            dtype: value.dtype(),
            shape: value.dims().to_vec(),
        };
        file.insert(format!("{PREFIX}{name}"), info, value.to_bytes()?)?;
    }
    let mut more = Map::from_iter([("lora_dropout".to_string(), dropout.into())]);
    more.extend(about.clone());
    if first {
        lora::write(folder, &file, &config, &more)?;
    }
    Ok(())
}

/// One rank and strength for all, and what differs by name.
fn config_of(adapters: &BTreeMap<String, (usize, f64)>) -> Result<Config> {
    let Some(&(r, alpha)) = adapters.values().next() else {
        return Err(Error::config("lora", "the model has no adapters to save"));
    };
    let ranks = adapters.iter().filter(|(_, a)| a.0 != r);
    let alphas = adapters.iter().filter(|(_, a)| a.1 != alpha);
    Ok(Config {
        r,
        alpha,
        use_rslora: false,
        fan_in_fan_out: false,
        rank_pattern: ranks.map(|(name, a)| (name.clone(), a.0)).collect(),
        alpha_pattern: alphas.map(|(name, a)| (name.clone(), a.1)).collect(),
    })
}

/// Reads the adapters of a folder that [`save_lora`] or PEFT wrote and puts them beside the weights
/// they are for; all else is frozen but what the folder has whole, which goes into the model.
/// Returns how many adapters there are. Where something of the folder does not fit the model it is
/// an error, and nothing is changed.
pub fn load_lora<M: Module + ?Sized>(model: &mut M, folder: impl AsRef<Path>) -> Result<usize> {
    let (file, config) = lora::open(folder)?;
    let parts = Parts::of(&file)?;
    let mut made: BTreeMap<String, Box<Adapter>> = BTreeMap::new();
    let mut whole: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut outcome = Ok(());
    model.visit("", &mut |name, p| {
        if outcome.is_ok() && !is_factor(name) {
            outcome = prepare(name, p, &file, &config, &parts, &mut made, &mut whole);
        }
    });
    outcome?;
    let known: BTreeSet<String> = made.keys().chain(whole.keys()).cloned().collect();
    let wanted = parts
        .factors
        .keys()
        .map(|module| format!("{module}.weight"));
    let mut wanted = wanted.chain(parts.whole.keys().cloned());
    if let Some(name) = wanted.find(|name| !known.contains(name)) {
        let detail = "the adapter is for it, and the model has none of this name";
        return Err(Error::parameter(name, detail));
    }
    let count = made.len();
    model.try_each(&mut |name, p| {
        if is_factor(name) {
            return Ok(());
        }
        p.train(whole.contains_key(name))?;
        if let Some(value) = whole.get(name) {
            p.set(value)?;
        }
        if let Some(adapter) = made.remove(name) {
            p.adapter = Some(adapter);
        }
        Ok(())
    })?;
    Ok(count)
}

/// Reads what a folder has for one parameter.
fn prepare(
    name: &str,
    p: &Param,
    file: &dyn Source,
    config: &Config,
    parts: &Parts,
    made: &mut BTreeMap<String, Box<Adapter>>,
    whole: &mut BTreeMap<String, Tensor>,
) -> Result<()> {
    let place = |p: &Param| (p.value().mesh().clone(), p.value().sharding().clone());
    if let Some(stored) = parts.whole.get(name) {
        let (mesh, sharding) = place(p);
        check_shape(name, file, stored, p)?;
        let value = anymesh_checkpoint::load(file, stored, (&mesh, sharding))?;
        whole.insert(name.into(), value);
    }
    let module = layer(name);
    let factors = match parts.factors.get(module) {
        Some(factors) if name.ends_with("weight") => factors,
        _ => return Ok(()),
    };
    let Factors { a, b, embedding } = factors;
    if *embedding || config.fan_in_fan_out {
        let detail =
            "its adapter is for a weight with the inputs first, which models here have not";
        return Err(Error::parameter(name, detail));
    }
    let rank = config.rank(module);
    let settings = Lora {
        rank,
        alpha: config.scale(module) * rank as f64,
        ..Lora::default()
    };
    let mut adapter = Adapter::new(name, p, &settings)?;
    for (factor, stored) in [(&mut adapter.a, a), (&mut adapter.b, b)] {
        check_shape(name, file, stored, factor)?;
        let (mesh, sharding) = place(factor);
        factor.set(&anymesh_checkpoint::load(file, stored, (&mesh, sharding))?)?;
    }
    made.insert(name.into(), Box::new(adapter));
    Ok(())
}

fn check_shape(name: &str, file: &dyn Source, stored: &str, p: &Param) -> Result<()> {
    let info = file.info(stored)?;
    match info.shape == p.value().dims() {
        true => Ok(()),
        false => Err(Error::parameter(
            name,
            format!(
                "'{stored}' is {info}, and {} is needed",
                p.value().type_string()
            ),
        )),
    }
}
