"""What small models of transformers give: the facts of tiny_models.json.

    python tiny_models.py > tiny_models.json

Needs torch and transformers. Weights follow from their names and places (see `value`), so that they need not be stored.
"""

import json
import sys

import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

IDS = [[(5 * i * i + 3) % 61 for i in range(9)], [(7 * i * i + 11) % 61 for i in range(9)]]

small = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
)
scaling = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=2.0,
    original_max_position_embeddings=16,
)
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=3)),
    "llama": (LlamaForCausalLM, LlamaConfig(**small, tie_word_embeddings=True)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**small, tie_word_embeddings=False, rope_parameters=scaling)),
    "mistral": (MistralForCausalLM, MistralConfig(**small, sliding_window=None, head_dim=6, rope_theta=1e6)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**small, tie_word_embeddings=True, use_sliding_window=False)),
    "bert": (
        BertModel,
        BertConfig(
            vocab_size=61,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            max_position_embeddings=16,
        ),
    ),
}


def value(name, count):
    """0.2 sin(0.7 i + c) with c the sum of the bytes of the name modulo 97; around 1 for the factors of norms."""
    c = sum(name.encode()) % 97
    values = 0.2 * torch.sin(0.7 * torch.arange(count, dtype=torch.float64) + c)
    is_norm = name.endswith("weight") and any(n in name.lower() for n in ("norm", "ln_"))
    return values + 1.0 if is_norm else values


def main():
    facts = {}
    for family, (kind, config) in MODELS.items():
        config._attn_implementation = "eager"
        model = kind(config).eval().double()
        shapes = {}
        with torch.no_grad():
            for name, w in model.named_parameters():
                w.copy_(value(name, w.numel()).reshape(w.shape))
                shapes[name] = list(w.shape)
            ids = torch.tensor(IDS)
            out = model(ids)
            out = out.last_hidden_state if family == "bert" else out.logits
        facts[family] = {
            "config": json.loads(config.to_json_string()),
            "shapes": shapes,
            "last": [[round(x, 9) for x in row] for row in out[:, -1].tolist()],
        }
    about = {
        "by": f"tiny_models.py beside this file: transformers {transformers.__version__}, torch {torch.__version__}, float64 (whose norms and rotations are float32)",
        "last": "logits, or the encoder's vectors, at the last place of each text",
    }
    json.dump({"about": about, "ids": IDS, "models": facts}, sys.stdout)
    print()


main()
