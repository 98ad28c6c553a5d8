//! Names of tensors in GGUF files and in Hugging Face's models.

/// The architectures whose tensors have names in Hugging Face's models that are known here.
pub const ARCHITECTURES: [&str; 2] = ["llama", "qwen2"];

/// Outside of the layers.
const MODEL: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// In each layer.
const LAYER: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// What Hugging Face calls a tensor of a GGUF file; `None` where the architecture is not one of
/// [`ARCHITECTURES`], or has no such tensor.
///
/// ```
/// # use anymesh_checkpoint::gguf::hugging_face_name;
/// assert_eq!(
///     hugging_face_name("llama", "blk.3.attn_q.weight").as_deref(),
///     Some("model.layers.3.self_attn.q_proj.weight")
/// );
/// assert_eq!(hugging_face_name("llama", "output.weight").as_deref(), Some("lm_head.weight"));
/// assert_eq!(hugging_face_name("llama", "blk.3.ssm_in.weight"), None);
/// ```
pub fn hugging_face_name(architecture: &str, name: &str) -> Option<String> {
    if !ARCHITECTURES.contains(&architecture) {
        return None;
    }
    let (module, part) = name.rsplit_once('.')?;
    if !["weight", "bias"].contains(&part) {
        return None;
    }
    let found = |table: &[(&str, &'static str)], module: &str| {
        table
            .iter()
            .find(|(theirs, _)| *theirs == module)
            .map(|(_, ours)| *ours)
    };
    match module.strip_prefix("blk.") {
        None => Some(format!("{}.{part}", found(&MODEL, module)?)),
        Some(rest) => {
            let (layer, module) = split_layer(rest)?;
            Some(format!(
                "model.layers.{layer}.{}.{part}",
                found(&LAYER, module)?
            ))
        }
    }
}

/// `3.attn_q` as the layer and what is in it.
fn split_layer(text: &str) -> Option<(&str, &str)> {
    text.split_once('.')
        .filter(|(layer, _)| !layer.is_empty() && layer.bytes().all(|b| b.is_ascii_digit()))
}

/// Which of the two products whose rows are turned a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    Query,
    Key,
}

/// Whether the converter turned the rows of a tensor.
///
/// Rotary embeddings turn pairs of elements of a head: Hugging Face's models the elements `i` and
/// `i + half`, and llama.cpp, for this architecture, the elements `2 i` and `2 i + 1`. So the
/// converter puts the rows of queries and keys into another order; for others it does not, because
/// llama.cpp then pairs as Hugging Face does.
pub(super) fn turned(architecture: &str, name: &str) -> Option<Turned> {
    let module = (architecture == "llama").then(|| name.strip_prefix("blk."))??;
    match split_layer(module)?.1 {
        "attn_q.weight" | "attn_q.bias" => Some(Turned::Query),
        "attn_k.weight" | "attn_k.bias" => Some(Turned::Key),
        _ => None,
    }
}
