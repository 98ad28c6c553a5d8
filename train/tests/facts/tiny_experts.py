"""What small mixtures of experts of transformers give: the facts of tiny_experts.json.

    python tiny_experts.py > tiny_experts.json

Needs torch, transformers and safetensors. Weights follow from the names that files have for them and from their places, as in
tiny_models.py; transformers itself reads them from such a file, because inside it has other names.
"""

import json
import os
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

IDS = [[(5 * i * i + 3) % 61 for i in range(9)], [(7 * i * i + 11) % 61 for i in range(9)]]

small = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**small, intermediate_size=20, num_local_experts=4, sliding_window=None)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **small,
            head_dim=6,
            intermediate_size=40,
            moe_intermediate_size=12,
            num_experts=6,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            use_sliding_window=False,
        ),
    ),
}


def value(name, count):
    """As in tiny_models.py."""
    c = sum(name.encode()) % 97
    values = 0.2 * torch.sin(0.7 * torch.arange(count, dtype=torch.float64) + c)
    is_norm = name.endswith("weight") and any(n in name.lower() for n in ("norm", "ln_"))
    return values + 1.0 if is_norm else values


def main():
    facts = {}
    for family, (kind, config) in MODELS.items():
        config._attn_implementation = "eager"
        shapes = {}
        with tempfile.TemporaryDirectory() as folder:
            kind(config).save_pretrained(folder)
            path = os.path.join(folder, "model.safetensors")
            with safe_open(path, "pt") as file:
                shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
            count = lambda shape: torch.Size(shape).numel()
            save_file({n: value(n, count(s)).reshape(s) for n, s in shapes.items()}, path, {"format": "pt"})
            model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager").eval()
            said = json.load(open(os.path.join(folder, "config.json")))
        with torch.no_grad():
            out = model(torch.tensor(IDS)).logits
        said.pop("torch_dtype", None)
        facts[family] = {
            "config": said,
            "shapes": shapes,
            "last": [[round(x, 9) for x in row] for row in out[:, -1].tolist()],
        }
    about = {
        "by": f"tiny_experts.py beside this file: transformers {transformers.__version__}, torch {torch.__version__}, float64 (whose norms, rotations and routers are float32)",
        "last": "logits at the last place of each text",
    }
    json.dump({"about": about, "ids": IDS, "models": facts}, sys.stdout)
    print()


main()
