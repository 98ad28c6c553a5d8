"""Runs benches/plain and the same programs in PyTorch on one GPU, in one go, and prints the ratios.

    python3 benches/peers/torch_plain.py PATH-OF-THE-BENCH-BINARY DEVICE [DEVICE ...] [--style ops|composed] [--batch 16x1024] [--steps N]

Each DEVICE of anymesh (`cuda:0`, `eager:cuda:0`) is a row. The peer writes the step as benches/plain does: `ops` with
layer_norm, scaled_dot_product_attention and cross_entropy, `composed` of elementwise ops, reductions and products; AdamW is
arithmetic on parameters in both. It runs eager and through torch.compile, of which the update is a part. Both begin with
random weights of the same kind, so losses agree about, not exactly.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, WARM_UP = 12, 768, 12, 50304, 1024, 3
RATE, DECAY, BETAS = 3e-4, 0.1, (0.9, 0.95)
BF16, F32 = torch.bfloat16, torch.float32


def parameters():
    made = {"wte": (VOCABULARY, WIDTH), "wpe": (CONTEXT, WIDTH), "ln.weight": (WIDTH,), "ln.bias": (WIDTH,)}
    for layer in range(LAYERS):
        for norm in ("ln1", "ln2"):
            made[f"{layer}.{norm}.weight"] = made[f"{layer}.{norm}.bias"] = (WIDTH,)
        for name, rows, columns in (("qkv", 3 * WIDTH, WIDTH), ("out", WIDTH, WIDTH), ("up", 4 * WIDTH, WIDTH), ("down", WIDTH, 4 * WIDTH)):
            made[f"{layer}.{name}.weight"], made[f"{layer}.{name}.bias"] = (rows, columns), (rows,)

    def value(name, shape):
        if "ln" in name and name.endswith("weight"):
            return torch.ones(shape, device="cuda")
        if name.endswith("bias"):
            return torch.zeros(shape, device="cuda")
        return torch.randn(shape, device="cuda") * 0.02

    return {name: value(name, shape).requires_grad_() for name, shape in made.items()}


def loss_of(of, ids, targets, mask, composed):
    def norm(x, name):
        weight, bias = of[f"{name}.weight"], of[f"{name}.bias"]
        if not composed:
            return F.layer_norm(x, (WIDTH,), weight, bias).to(BF16)
        off = x - x.mean(-1, keepdim=True)
        deviation = (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (off / deviation * weight + bias).to(BF16)

    def linear(x, name):
        weight, bias = of[f"{name}.weight"].to(BF16), of[f"{name}.bias"].to(BF16)
        return x @ weight.T + bias if composed else F.linear(x, weight, bias)

    def attention(q, k, v):
        if not composed:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-2, -1)).to(F32) * (1.0 / math.sqrt(WIDTH // HEADS))
        seen = torch.where(mask, scores, -math.inf)
        e = (seen - seen.amax(-1, keepdim=True)).exp()
        return (e / e.sum(-1, keepdim=True)).to(BF16) @ v

    def gelu(x):
        if not composed:
            return F.gelu(x, approximate="tanh")
        x = x.to(F32)
        inner = (x + (x.square() * 0.044715) * x) * math.sqrt(2 / math.pi)
        return ((x * 0.5) * (inner.tanh() + 1.0)).to(BF16)

    texts, tokens = ids.shape
    x = of["wte"][ids] + of["wpe"][:tokens]
    for layer in range(LAYERS):
        h = linear(norm(x, f"{layer}.ln1"), f"{layer}.qkv")
        q, k, v = (t.reshape(texts, tokens, HEADS, -1).transpose(1, 2) for t in h.split(WIDTH, dim=-1))
        seen = attention(q, k, v).transpose(1, 2).reshape(texts, tokens, WIDTH)
        x = x + linear(seen, f"{layer}.out")
        x = x + linear(gelu(linear(norm(x, f"{layer}.ln2"), f"{layer}.up")), f"{layer}.down")
    logits = (norm(x, "ln") @ of["wte"].to(BF16).T).reshape(texts * tokens, VOCABULARY).to(F32)
    targets = targets.reshape(-1)
    if not composed:
        return F.cross_entropy(logits, targets)
    return (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, targets[:, None])).mean()


def update(w, g, m, v, unbias):
    m.mul_(BETAS[0]).add_(g * (1 - BETAS[0]))
    v.mul_(BETAS[1]).add_(g.square() * (1 - BETAS[1]))
    step = (m / unbias[0]) / ((v / unbias[1]).sqrt() + 1e-8)
    w.copy_(w * (1 - RATE * DECAY) - step * RATE)


def updates(of, gradients, moments, unbias):
    for name, w in of.items():
        update(w, gradients[name], *moments[name], unbias)


def peer(style, texts, tokens, steps, compiled):
    torch.manual_seed(1)
    of = parameters()
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in of.items()}
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril()
    loss, apply = loss_of, torch.no_grad()(updates)
    if compiled:
        loss, apply = torch.compile(loss), torch.compile(apply)
    losses, ms, host_ms = [], [], []
    for number in range(WARM_UP + steps):
        at = (number * texts + torch.arange(texts)[:, None]) * (tokens + 1) + torch.arange(tokens + 1)
        all = torch.tensor([[((a * 0x9E3779B97F4A7C15) % 2**64 >> 40) % 5000 for a in row] for row in at.tolist()], device="cuda")
        ids, targets = all[:, :-1].contiguous(), all[:, 1:].contiguous()
        unbias = [torch.tensor(1 - beta ** (number + 1), device="cuda") for beta in BETAS]
        torch.cuda.synchronize()
        if number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        found = loss(of, ids, targets, mask, style == "composed")
        gradients = dict(zip(of, torch.autograd.grad(found, list(of.values()))))
        apply(of, gradients, moments, unbias)
        del gradients
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        done = time.perf_counter() - start
        losses.append(found.item())
        if number >= WARM_UP:
            ms.append(done * 1e3)
            host_ms.append(host * 1e3)
    return {"losses": losses, "ms": ms, "host_ms": host_ms, "peak": torch.cuda.max_memory_allocated()}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("binary")
    arguments.add_argument("devices", nargs="*")
    arguments.add_argument("--style", default="ops,composed")
    arguments.add_argument("--batch", default="16x1024")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--peer", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    texts, tokens = map(int, given.batch.split("x"))
    if given.peer:
        return print(json.dumps(peer(given.style, texts, tokens, given.steps, given.peer == "torch.compile")))
    for style in given.style.split(","):
        rows = [(device, [given.binary, device, style, given.batch, str(given.steps)]) for device in given.devices]
        again = [sys.executable, __file__, given.binary, "--style", style, "--batch", given.batch, "--steps", str(given.steps)]
        rows += [(name, [*again, "--peer", name]) for name in ("torch eager", "torch.compile")]
        print(f"GPT-2 124M, bf16, {given.batch}, {style}: ms (fastest), host ms, peak GiB, first and last loss")
        for name, command in rows:
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                print(f"{name:20} failed: {(ran.stdout + ran.stderr)[-2000:]}")
                continue
            row = json.loads(ran.stdout.strip().splitlines()[-1])
            middle, best, host = statistics.median(row["ms"]), min(row["ms"]), statistics.median(row["host_ms"])
            first, last = row["losses"][0], row["losses"][-1]
            print(f"{name:20} {middle:8.2f} ({best:.2f}) {host:8.2f} {row['peak'] / 2**30:8.2f} {first:10.4f} {last:10.4f}", flush=True)


if __name__ == "__main__":
    main()
