"""Runs benches/step and the same training step in PyTorch on one device, in one go, and prints the ratios.

    python3 benches/peers/torch_step.py PATH-OF-THE-BENCH-BINARY DEVICE [WORDS ...] [--steps N] [--tiny] [--no-compile]

DEVICE is one of anymesh (`cuda:0`, `cpu`); the peer runs on the GPU if it is a CUDA one, else on the CPU. WORDS are those of
benches/step: a model (`gpt2`, `llama`, `small`, `tiny`), `bf16` or `f32`, texts and tokens such as `16x1024`; several rows are
separated by `,`. Without words: GPT-2 124M with 16x1024 tokens in bf16 and in f32, with 1x1024 in bf16, and a layer of Llama
with h=4096 in bf16. The peer is plain modules, F.scaled_dot_product_attention, bf16 autocast and fused AdamW, eager and
through torch.compile. All begin with the same weights and see the same tokens, so their losses must agree.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WARM_UP = 3
LR, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
# layers, width, heads, heads of keys, inner width, vocabulary, longest text, (texts, tokens)
MODELS = {
    "gpt2": (12, 768, 12, 12, 3072, 50304, 1024, (16, 1024)),
    "llama": (1, 4096, 32, 8, 14336, 512, 8192, (4, 2048)),
    "small": (4, 256, 8, 8, 1024, 512, 128, (16, 128)),
    "tiny": (2, 32, 4, 4, 128, 64, 16, (2, 16)),
}


def noise(stream, at):
    """`noise` of bench/src/noise.rs."""
    with np.errstate(over="ignore"):
        x = (np.uint64(stream << 32) | at.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        return ((x ^ (x >> np.uint64(29))) >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1.0


def stream(name):
    """`stream` of bench/src/noise.rs."""
    hash = 0x811C9DC5
    for byte in name.encode():
        hash = (hash ^ byte) * 0x01000193 & 0xFFFFFFFF
    return hash


def weights(name, shape):
    """The values that bench/src/step.rs gives a parameter."""
    start = 1.0 if ("ln_" in name or "norm" in name) and name.endswith("weight") else 0.0
    made = start + 0.035 * noise(stream(name), np.arange(int(np.prod(shape)), dtype=np.uint64))
    return torch.from_numpy(made.astype(np.float32).reshape(shape))


def tokens(step, batch, vocabulary):
    """The inputs and labels of a step."""
    texts, length = batch
    at = np.arange(texts * (length + 1)).reshape(texts, length + 1) + (step << 16)
    all = torch.from_numpy(((noise(1 << 20, at) + 1.0) / 2.0 * vocabulary).astype(np.int64))
    return all[:, :-1].contiguous(), all[:, 1:].contiguous()


class Gpt2Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # One product for queries, keys and values, as PyTorch programs have it.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(c, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, s, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, width, heads, keys, inner, vocabulary, longest):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.h = nn.ModuleList(Gpt2Layer(width, heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def begin(self):
        """Gives every parameter the values that it has in benches/step."""

        def fill(parameter, *names):
            shape = (parameter.shape[0] // len(names), *parameter.shape[1:])
            parameter.data = torch.cat([weights(name, shape) for name in names])

        both = lambda module, *names: [
            fill(getattr(module, kind), *(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias")
        ]
        fill(self.wte.weight, "transformer.wte.weight")
        fill(self.wpe.weight, "transformer.wpe.weight")
        for i, layer in enumerate(self.h):
            at = f"transformer.h.{i}"
            both(layer.ln_1, f"{at}.ln_1")
            both(layer.qkv, *(f"{at}.attn.{part}_proj" for part in "qkv"))
            both(layer.out, f"{at}.attn.o_proj")
            both(layer.ln_2, f"{at}.ln_2")
            both(layer.up, f"{at}.mlp.up_proj")
            both(layer.down, f"{at}.mlp.down_proj")
        both(self.ln_f, "transformer.ln_f")


class LlamaLayer(nn.Module):
    def __init__(self, width, heads, keys, inner):
        super().__init__()
        self.size = width // heads
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj, self.self_attn.o_proj = linear(width, width), linear(width, width)
        self.self_attn.k_proj, self.self_attn.v_proj = (linear(width, keys * self.size) for _ in range(2))
        self.mlp.gate_proj, self.mlp.up_proj = linear(width, inner), linear(width, inner)
        self.mlp.down_proj = linear(inner, width)

    def forward(self, x, cos, sin):
        b, s, c = x.shape

        def turned(x):
            x = x.view(b, s, -1, self.size).transpose(1, 2)
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        attn, h = self.self_attn, self.input_layernorm(x)
        q, k = turned(attn.q_proj(h)), turned(attn.k_proj(h))
        v = attn.v_proj(h).view(b, s, -1, self.size).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(seen.transpose(1, 2).reshape(b, s, c))
        h = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))


class Llama(nn.Module):
    def __init__(self, layers, width, heads, keys, inner, vocabulary, longest):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(LlamaLayer(width, heads, keys, inner) for _ in range(layers))
        self.model.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(longest).double(), 500000.0 ** (-torch.arange(0, size, 2).double() / size))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))

    def begin(self):
        for name, parameter in self.named_parameters():
            parameter.data = weights(name, parameter.shape)


def parse(words):
    """The model, dtype and batch that words of benches/step mean."""
    name = next((word for word in words if word in MODELS), "gpt2")
    dtype, batch = "f32", MODELS[name][-1]
    for word in words:
        if word in ("bf16", "f32"):
            dtype = word
        elif "x" in word and word not in MODELS:
            batch = tuple(map(int, word.split("x")))
        elif word not in MODELS:
            sys.exit(f"'{word}' is none of {', '.join(MODELS)}, bf16, f32 and texts x tokens such as 16x1024")
    return name, dtype, batch


def peer(name, dtype, batch, device, steps, compiled):
    """What benches/step prints, of PyTorch."""
    *sizes, _ = MODELS[name]
    model = (Llama if name == "llama" else Gpt2)(*sizes)
    model.begin()
    model.to(device)
    cuda, vocabulary = device == "cuda", sizes[5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def loss_of(inputs, labels):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(inputs)
            return F.cross_entropy(logits.view(-1, vocabulary), labels.view(-1))

    if compiled:
        loss_of = torch.compile(loss_of)
    losses, ms, host_ms = [], [], []
    wait = torch.cuda.synchronize if cuda else lambda: None
    for step in range(WARM_UP + steps):
        inputs, labels = (t.to(device) for t in tokens(step, batch, vocabulary))
        wait()
        if cuda and step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = loss_of(inputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        host = time.perf_counter() - start
        wait()
        done = time.perf_counter() - start
        losses.append(loss.item())
        if step >= WARM_UP:
            ms.append(done * 1e3)
            host_ms.append(host * 1e3)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "ms": ms,
        "host_ms": host_ms,
        "peak": torch.cuda.max_memory_allocated() if cuda else None,
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("binary")
    arguments.add_argument("device")
    arguments.add_argument("words", nargs="*")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    arguments.add_argument("--no-compile", action="store_true", help="only eager")
    arguments.add_argument("--peer", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    device = "cuda" if "cuda" in given.device else "cpu"
    if given.peer:
        row = peer(*parse(given.words), device, given.steps, given.peer == "compile")
        return print(json.dumps(row))
    rows = [row.split() for row in " ".join(given.words).split(",") if row.strip()]
    if given.tiny:
        rows = [["tiny", "f32"], ["tiny", "bf16"]]
    elif not rows:
        rows = [["gpt2", "bf16"], ["gpt2", "f32"], ["gpt2", "bf16", "1x1024"], ["llama", "bf16"]]
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"PyTorch {torch.__version__} on {where}, anymesh on {given.device}; median of {given.steps} steps\n")
    print("| step | | ms | min ms | host ms | peak GiB | this / anymesh | losses apart |\n|---|---|---|---|---|---|---|---|")
    for words in rows:
        name, dtype, batch = parse(words)
        title = f"{name} {dtype} {batch[0]}x{batch[1]}"
        own = [sys.executable, __file__, given.binary, given.device, *words, "--steps", str(given.steps)]
        # Each in a process of its own: none has the memory or the settings of another.
        programs = {"anymesh": [given.binary, given.device, *words, str(given.steps)], "torch eager": [*own, "--peer", "eager"]}
        if not given.no_compile:
            programs["torch.compile"] = [*own, "--peer", "compile"]
        ours = None
        for program, command in programs.items():
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"| {title} | {program} | failed: {last} | | | | | |", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            ours = ours or (row if program == "anymesh" else None)
            ms, host = statistics.median(row["ms"]), statistics.median(row["host_ms"])
            peak = f"{row['peak'] / 2**30:.2f}" if row["peak"] else ""
            ratio = apart = ""
            if ours and row is not ours:
                ratio = f"{ms / statistics.median(ours['ms']):.2f}"
                apart = f"{max(abs(a - b) for a, b in zip(row['losses'], ours['losses'])):.1e}"
                assert row["parameters"] == ours["parameters"], (row["parameters"], ours["parameters"])
            print(f"| {title} | {program} | {ms:.2f} | {min(row['ms']):.2f} | {host:.2f} | {peak} | {ratio} | {apart} |", flush=True)


main()
