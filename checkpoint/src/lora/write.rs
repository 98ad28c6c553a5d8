//! Writing the folder of an adapter.

use super::{CONFIG, Config, Parts, TENSORS};
use crate::hugging_face::{Export, write_folder};
use crate::safetensors::{copy_tensor, write_in_place};
use crate::{Result, Source};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What stands before the names of a base's modules in an adapter's file.
pub const PREFIX: &str = "base_model.model.";

/// Writes an adapter as PEFT does: `adapter_model.safetensors` and `adapter_config.json`, in a
/// folder that must not be there yet or be empty. It is there whole or not at all.
///
/// Tensors are named `base_model.model.<module>.lora_A.weight` and `..lora_B.weight`; any other is
/// one of the base that was trained whole. `more` are settings beside those of the [`Config`], such
/// as `base_model_name_or_path`, `task_type` and `lora_dropout`.
///
/// ```
/// use anymesh_checkpoint::{lora, Memory, Source, TensorInfo};
/// use anymesh_core::DType;
///
/// # let folder = std::env::temp_dir().join(format!("anymesh-doc-lora-{}", std::process::id()));
/// let mut adapter = Memory::default();
/// for (factor, shape) in [("A", [1, 3]), ("B", [2, 1])] {
///     let info = TensorInfo { dtype: DType::U8, shape: shape.to_vec() };
///     let bytes = vec![1; info.bytes()];
///     adapter.insert(format!("{}q.lora_{factor}.weight", lora::PREFIX), info, bytes)?;
/// }
/// let config = lora::Config {
///     r: 1,
///     alpha: 2.0,
///     use_rslora: false,
///     fan_in_fan_out: false,
///     rank_pattern: [].into(),
///     alpha_pattern: [].into(),
/// };
/// lora::write(&folder, &adapter, &config, &Default::default())?;
/// let (found, read) = lora::open(&folder)?;
/// assert_eq!((read, found.tensors()), (config, adapter.tensors()));
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), anymesh_checkpoint::Error>(())
/// ```
pub fn write(
    folder: impl AsRef<Path>,
    adapter: &dyn Source,
    config: &Config,
    more: &Map<String, Value>,
) -> Result<()> {
    let parts = Parts::of(adapter)?;
    let targets: Vec<&String> = parts.factors.keys().collect();
    let modules = parts.whole.keys().map(|name| {
        let (module, _) = name.rsplit_once('.').unwrap_or((name, ""));
        module
    });
    let mut whole: Vec<&str> = modules.collect();
    whole.dedup();
    let alphas = config.alpha_pattern.iter();
    let alphas: Map<String, Value> = alphas.map(|(k, x)| (k.clone(), number(*x))).collect();
    let mut settings = json!({
        "peft_type": "LORA",
        "base_model_name_or_path": null,
        "bias": "none",
        "fan_in_fan_out": config.fan_in_fan_out,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(config.alpha),
        "lora_dropout": 0.0,
        "modules_to_save": if whole.is_empty() { Value::Null } else { json!(whole) },
        "r": config.r,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": alphas,
        "target_modules": targets,
        "task_type": null,
        "use_dora": false,
        "use_rslora": config.use_rslora,
    });
    if let Some(settings) = settings.as_object_mut() {
        settings.extend(more.clone());
    }
    let text = format!("{settings:#}\n").into_bytes();
    let options = Export {
        files: [(CONFIG.to_string(), text)].into(),
        ..Export::default()
    };
    write_folder(folder.as_ref(), &options, |temporary| {
        let path = temporary.join(TENSORS);
        write_in_place(&path, adapter.tensors(), &options.metadata, |name, out| {
            copy_tensor(adapter, name, options.chunk, out)
        })
    })
}

/// Whole numbers as such: that is how they are mostly given.
fn number(x: f64) -> Value {
    match x.fract() == 0.0 && x.abs() < 1e9 {
        true => (x as i64).into(),
        false => x.into(),
    }
}
