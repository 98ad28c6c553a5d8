//! Models to files of Hugging Face.

use super::{Gpt2, Model, Moe};
use crate::{Error, Module, Result};
use anymesh_checkpoint::{
    Error as CheckpointError, Source, TensorInfo,
    hugging_face::{Export, export},
    map::{Mapped, Mapping, Options},
};
use anymesh_core::{Region, Tensor, grad::no_grad};
use std::{collections::BTreeMap, path::Path};

impl Model {
    /// Writes a Hugging Face folder under the names that Hugging Face has: `config.json`,
    /// safetensors files, and the other files given, such as `tokenizer.json`. Parameters are
    /// gathered a piece at a time. The folder must not be there yet, or be empty.
    ///
    /// Adapters are merged first ([`merge_lora`](crate::merge_lora)). Over several processes save a
    /// checkpoint instead, and export that.
    pub fn export(&self, folder: impl AsRef<Path>, files: BTreeMap<String, Vec<u8>>) -> Result<()> {
        let values = self.values();
        if let Some(name) = values.keys().find(|name| name.contains(".lora_A.")) {
            let detail = "an adapter is beside the weights: merge it into them first";
            return Err(Error::parameter(name, detail));
        }
        let live = Live::new(values);
        let mut files = files;
        if !files.contains_key("config.json") {
            let mut settings = self.config().to_settings()?;
            let dtype = self.embedding().value().dtype();
            settings.insert("torch_dtype".into(), torch_name(dtype).into());
            let text = format!("{:#}\n", serde_json::Value::Object(settings));
            files.insert("config.json".into(), text.into_bytes());
        }
        let options = Export {
            files,
            ..Export::default()
        };
        let mapping = match self {
            Self::Gpt2(_) => Some(Gpt2::mapping("transformer.")),
            Self::Moe(model) => Some(Moe::mapping(model.config())),
            Self::Llama(_) | Self::Bert(_) => None,
        };
        match mapping {
            Some(mapping) => {
                let mapping = Mapping::parse(&mapping)?;
                let back = Options {
                    reverse: true,
                    ..Options::default()
                };
                export(&Mapped::new(live, &mapping, &back)?, folder, &options)?;
            }
            None => {
                export(&live, folder, &options)?;
            }
        }
        Ok(())
    }
}

fn torch_name(dtype: anymesh_core::DType) -> &'static str {
    use anymesh_core::DType;
    match dtype {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

/// Tensors of a running program, read region by region.
struct Live {
    tensors: BTreeMap<String, Tensor>,
    infos: BTreeMap<String, TensorInfo>,
}

impl Live {
    fn new(tensors: BTreeMap<String, Tensor>) -> Self {
        let info = |(name, t): (&String, &Tensor)| {
            let (dtype, shape) = (t.dtype(), t.dims().to_vec());
            (name.clone(), TensorInfo { dtype, shape })
        };
        Self {
            infos: tensors.iter().map(info).collect(),
            tensors,
        }
    }
}

impl Source for Live {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<(), CheckpointError> {
        self.info(name)?;
        let Some(tensor) = self.tensors.get(name) else {
            return Ok(());
        };
        no_grad(|| {
            let mut part = tensor.clone();
            for (dim, (&start, &count)) in region.start.iter().zip(&region.shape).enumerate() {
                if count != tensor.dims()[dim] {
                    part = part.narrow(dim as i64, start, count)?;
                }
            }
            part.full_tensor()?.copy_bytes(out)
        })?;
        Ok(())
    }
}
