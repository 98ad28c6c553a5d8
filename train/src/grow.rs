//! Rows for new tokens.

use crate::{Error, Module, Param, Result, models::Model};
use anymesh_core::{DType, Tensor, grad::no_grad};

/// Gives a model `tokens` tokens in all: its embedding, and its head where that is another
/// parameter, get rows for the new ones. Old rows stay as they are, a new row is the mean of the
/// old ones, and layouts are kept. Fewer tokens than there are is an error.
///
/// State of an optimizer that was made for the old rows no longer fits: grow first, then train.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Policy, grow_vocabulary, models::{LlamaConfig, ModelConfig}};
/// # let device = anymesh_backend_cpu::device();
/// let config = LlamaConfig {
///     vocab_size: 10, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,
///     num_attention_heads: 2, ..LlamaConfig::default()
/// };
/// let mesh = Mesh::new("tp=2", &device)?;
/// let mut model = ModelConfig::Llama(config).build(&Build::new(&mesh, Policy::f32(), 1))?;
/// grow_vocabulary(&mut model, 13)?;
/// assert_eq!(model.embedding().value().type_string(), "f32[13@tp, 8]");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn grow_vocabulary(model: &mut Model, tokens: usize) -> Result<()> {
    let before = model.embedding().value().dims()[0];
    if tokens < before {
        return Err(Error::parameter(
            model.embedding().name(),
            format!("it has {before} tokens, and cannot be grown to {tokens}"),
        ));
    }
    let owner = model.embedding().name().to_string();
    let rows = [owner.as_str(), "lm_head.weight"];
    model.try_each(&mut |name, p| match rows.contains(&name) {
        true => grow_rows(p, tokens),
        false => Ok(()),
    })?;
    match model {
        Model::Gpt2(m) => m.set_vocabulary(tokens),
        Model::Llama(m) => m.set_vocabulary(tokens),
        Model::Moe(m) => m.set_vocabulary(tokens),
        Model::Bert(m) => m.set_vocabulary(tokens),
    }
    Ok(())
}

/// Gives a parameter as many rows in all; the new ones are the mean of the old.
pub fn grow_rows(param: &mut Param, rows: usize) -> Result<()> {
    let old = param.value().detach();
    let (count, sharding) = (old.dims()[0], old.sharding().clone());
    if rows <= count {
        return Ok(());
    }
    let grown = no_grad(|| -> Result<Tensor> {
        let wide = match old.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let mean = old.cast(wide)?.mean(&[0], true)?.cast(old.dtype())?;
        let new = mean.expand(mean.shape().with(0, rows - count))?;
        Ok(Tensor::concat(&[&old, &new], 0)?.reshard(sharding)?)
    })?;
    param.replace(grown)
}
