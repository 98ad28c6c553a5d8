"""Runs benches/step and the same training step in JAX and PyTorch, in turns on one machine, and prints the ratios.

    python3 benches/peers/step.py PATH-OF-THE-BENCH-BINARY [ROUNDS]

A round is one process of each: anymesh on one device and on eight simulated ranks (dp=2, tp=4), JAX on one device and
on eight host devices with the same shardings, PyTorch eager with a thread for each core. All begin with the same
weights and see the same tokens, so their losses must agree.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 4, 256, 8, 128, 16, 512
WARM_UP, STEPS = 3, 20
LR, BETA1, BETA2, EPS, DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


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


def parameters():
    """Name to (values, mesh axis of each dimension), with the names and values of bench/src/step.rs."""
    c, shapes = WIDTH, {}

    def norm(name):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (c,), (None,)

    def linear(name, inner, outer, axes):
        shapes[f"{name}.weight"] = (outer, inner), axes
        shapes[f"{name}.bias"] = (outer,), axes[:1]

    shapes["transformer.wte.weight"] = (VOCABULARY, c), ("tp", None)
    shapes["transformer.wpe.weight"] = (CONTEXT, c), (None, None)
    for layer in range(LAYERS):
        name = f"transformer.h.{layer}"
        norm(f"{name}.ln_1")
        for part in "qkv":
            linear(f"{name}.attn.{part}_proj", c, c, ("tp", None))
        linear(f"{name}.attn.o_proj", c, c, (None, "tp"))
        norm(f"{name}.ln_2")
        linear(f"{name}.mlp.up_proj", c, 4 * c, ("tp", None))
        linear(f"{name}.mlp.down_proj", 4 * c, c, (None, "tp"))
    norm("transformer.ln_f")
    made = {}
    for name, (shape, axes) in shapes.items():
        start = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        values = start + 0.035 * noise(stream(name), np.arange(np.prod(shape)))
        made[name] = values.astype(np.float32).reshape(shape), axes
    return made


def tokens(step):
    """The inputs and targets of a step."""
    at = np.arange(BATCH * (CONTEXT + 1)).reshape(BATCH, CONTEXT + 1) + (step << 16)
    all = ((noise(1 << 20, at) + 1.0) / 2.0 * VOCABULARY).astype(np.int32)
    return all[:, :-1], all[:, 1:]


def measure(name, count, step):
    """Prints what benches/step prints, of a function that takes the number of a step and gives its loss."""
    losses = [step(i) for i in range(WARM_UP)]
    times = []
    for i in range(STEPS):
        start = time.perf_counter()
        losses.append(step(WARM_UP + i))
        times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"name": name, "parameters": count, "losses": losses, "ms": times}))


def with_torch():
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(os.cpu_count())
    w = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, (values, _) in parameters().items()}
    # One product for queries, keys and values, as PyTorch programs have it.
    for layer in range(LAYERS):
        for kind in ["weight", "bias"]:
            name = f"transformer.h.{layer}.attn"
            parts = [w.pop(f"{name}.{part}_proj.{kind}").data for part in "qkv"]
            w[f"{name}.qkv.{kind}"] = torch.nn.Parameter(torch.cat(parts))
    optimizer = torch.optim.AdamW(w.values(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)

    def norm(name, x):
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def step(i):
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(t)).long() for t in tokens(i))
        x = F.embedding(inputs, w["transformer.wte.weight"]) + w["transformer.wpe.weight"]
        for layer in range(LAYERS):
            n = f"transformer.h.{layer}"
            qkv = linear(f"{n}.attn.qkv", norm(f"{n}.ln_1", x)).split(WIDTH, dim=2)
            q, k, v = (t.view(BATCH, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2) for t in qkv)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(f"{n}.attn.o_proj", seen.transpose(1, 2).reshape(BATCH, CONTEXT, WIDTH))
            h = F.gelu(linear(f"{n}.mlp.up_proj", norm(f"{n}.ln_2", x)), approximate="tanh")
            x = x + linear(f"{n}.mlp.down_proj", h)
        logits = F.linear(norm("transformer.ln_f", x), w["transformer.wte.weight"])
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    measure(f"PyTorch {torch.__version__}", sum(p.numel() for p in w.values()), step)


def with_jax(ranks):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    shape = (2, 4) if ranks == 8 else (1, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]).reshape(shape), ("dp", "tp"))
    place = lambda axes: NamedSharding(mesh, PartitionSpec(*axes))
    made = parameters()
    shardings = {name: place(axes) for name, (_, axes) in made.items()}
    w = {name: jax.device_put(values, shardings[name]) for name, (values, _) in made.items()}
    zeros = lambda: {name: jax.device_put(np.zeros_like(made[name][0]), shardings[name]) for name in made}
    state = (w, zeros(), zeros())
    batch = place(("dp", None))

    def norm(w, name, x):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(w, name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def loss_of(w, inputs, targets):
        x = w["transformer.wte.weight"][inputs] + w["transformer.wpe.weight"]
        for layer in range(LAYERS):
            n = f"transformer.h.{layer}"
            h = norm(w, f"{n}.ln_1", x)
            heads = (-1, CONTEXT, HEADS, WIDTH // HEADS)
            q, k, v = (linear(w, f"{n}.attn.{part}_proj", h).reshape(heads) for part in "qkv")
            seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(w, f"{n}.attn.o_proj", seen.reshape(-1, CONTEXT, WIDTH))
            h = jax.nn.gelu(linear(w, f"{n}.mlp.up_proj", norm(w, f"{n}.ln_2", x)), approximate=True)
            x = x + linear(w, f"{n}.mlp.down_proj", h)
        logits = norm(w, "transformer.ln_f", x) @ w["transformer.wte.weight"].T
        own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - own).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, number, inputs, targets):
        w, m, v = state
        loss, g = jax.value_and_grad(loss_of)(w, inputs, targets)
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, g)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, g)
        c1, c2 = 1 - BETA1**number, 1 - BETA2**number
        w = jax.tree.map(lambda w, m, v: w - LR * (m / c1 / (jnp.sqrt(v / c2) + EPS) + DECAY * w), w, m, v)
        return jax.lax.with_sharding_constraint((w, m, v), (shardings,) * 3), loss

    def step(i):
        nonlocal state
        inputs, targets = (jax.device_put(t, batch) for t in tokens(i))
        state, loss = update(state, jnp.float32(i + 1), inputs, targets)
        jax.block_until_ready(state)
        return float(loss)

    count = sum(values.size for values, _ in made.values())
    measure(f"JAX {jax.__version__}", count, step)


def main(binary, rounds):
    def ours(*mesh):
        return [binary, "cpu", "small", *mesh, str(STEPS)], {}

    def peer(kind, **env):
        return [sys.executable, __file__, kind], env

    eight = "--xla_force_host_platform_device_count=8"
    programs = {
        "anymesh, one device": ours(),
        "JAX, one device": peer("jax1", JAX_PLATFORMS="cpu"),
        "PyTorch eager": peer("torch"),
        "anymesh, 8 ranks": ours("dp=2,tp=4"),
        "JAX, 8 devices": peer("jax8", JAX_PLATFORMS="cpu", XLA_FLAGS=eight),
    }
    times = {name: [] for name in programs}
    losses, versions = {}, {}
    for _ in range(rounds):
        for name, (command, env) in programs.items():
            out = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **env}).stdout
            row = json.loads(out.splitlines()[-1])
            times[name] += row["ms"]
            losses[name], versions[name] = row["losses"], (row["name"], row["parameters"])
    print(f"{os.cpu_count()} cores, {rounds} rounds of {STEPS} steps; " + ", ".join(sorted({v for v, _ in versions.values()} - {"small"})))
    print(f"parameters: {sorted({count for _, count in versions.values()})}; losses of the first steps and the largest difference in all {WARM_UP + STEPS}:")
    first = losses["anymesh, one device"]
    for name, all in losses.items():
        apart = max(abs(a - b) for a, b in zip(all, first))
        print(f"  {name:20} " + " ".join(f"{loss:.6f}" for loss in all[:4]) + f"  {apart:.1e}")
        assert apart < 1e-4, "not the same training"
    print("\n| | min ms | median ms | JAX / this | PyTorch / this |\n|---|---|---|---|---|")
    median = {name: statistics.median(ms) for name, ms in times.items()}
    for name, ms in times.items():
        jax = median["JAX, 8 devices" if "8" in name else "JAX, one device"] / median[name]
        torch = median["PyTorch eager"] / median[name]
        print(f"| {name} | {min(ms):.0f} | {median[name]:.0f} | {jax:.2f} | {torch:.2f} |")


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        with_torch()
    elif sys.argv[1].startswith("jax"):
        with_jax(int(sys.argv[1][3:]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
