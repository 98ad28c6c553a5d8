"""Runs benches/kernels and the same ops in PyTorch, in one go on one device, and prints the ratios.

    python3 benches/peers/torch_kernels.py PATH-OF-THE-BENCH-BINARY [cuda:0 [a part of the names]]

The peer is eager, but for cross-entropy, which is compiled, and for attention, which is the fastest one of cuDNN's,
FlashAttention's and the memory-efficient one, which is that for f32. With `--rows DEVICE` it reads names of rows, one a line, and prints for each a JSON object with its time:
that is what `anymesh bench` asks for.
"""

import inspect
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.backends.cuda.matmul.allow_tf32 = False
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f8e4m3": torch.float8_e4m3fn}
# `cuda` or `cpu`: where the peer runs.
WHERE = "cuda"


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=WHERE).to(dtype)


def wait():
    if WHERE == "cuda":
        torch.cuda.synchronize()


def timed(f, batch=None):
    batch = batch or (100 if WHERE == "cuda" else 5)
    for _ in range(min(batch, 5)):
        f()
    wait()
    samples = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(batch):
            f()
        wait()
        samples.append((time.perf_counter() - start) * 1e6 / batch)
    return statistics.median(samples)


def grouped(what, dtype, sizes):
    """The faster one of torch's grouped product and a loop over groups."""
    groups, n, k, m = sizes
    sums, total = [], 0
    for g in range(groups):
        total += 8 + g * 37 % 16
        sums.append(total)
    ends = [n * s // total for s in sums]
    offsets = torch.tensor(ends, dtype=torch.int32, device=WHERE)
    ranges = list(zip([0] + ends, ends))
    x, y, w = random(n, k, dtype=dtype), random(n, m, dtype=dtype), random(groups, m, k, dtype=dtype)
    if what == "grouped":
        out, turned = torch.empty(n, m, device=WHERE, dtype=dtype), w.transpose(1, 2)
        one = lambda: torch._grouped_mm(x, turned, offsets)
        loop = lambda: [torch.mm(x[a:b], turned[g], out=out[a:b]) for g, (a, b) in enumerate(ranges)]
    elif what == "grouped dx":
        out = torch.empty(n, k, device=WHERE, dtype=dtype)
        one = lambda: torch._grouped_mm(y, w, offsets)
        loop = lambda: [torch.mm(y[a:b], w[g], out=out[a:b]) for g, (a, b) in enumerate(ranges)]
    else:
        out = torch.empty(groups, m, k, device=WHERE, dtype=dtype)
        one = lambda: torch._grouped_mm(y.t(), x, offsets)
        loop = lambda: [torch.mm(y[a:b].t(), x[a:b], out=out[g]) for g, (a, b) in enumerate(ranges)]
    return min((one, loop), key=lambda f: timed(f, 10)), "eager"


def attention(what, dtype, sizes):
    """The fastest one of torch's kernels that takes these sizes."""
    b, heads, s, d = sizes
    h, keys = heads if isinstance(heads, tuple) else (heads, heads)
    q, grad = random(b, h, s, d, dtype=dtype), random(b, h, s, d, dtype=dtype)
    k, v = random(b, keys, s, d, dtype=dtype), random(b, keys, s, d, dtype=dtype)
    leaves = [t.requires_grad_(what == "attention backward") for t in (q, k, v)]

    def of(backend):
        def forward():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=keys != h)

        out = forward()
        if what == "attention":
            return forward
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    found = []
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name, backend in backends.items():
        if name == "math" and found:
            break
        try:
            f = of(backend)
            found.append((timed(f, 5), f, name))
        except RuntimeError:
            pass  # This build or GPU does not have it for these sizes.
    _, f, name = min(found, key=lambda row: row[0])
    return f, name


def packed_attention(what, dtype, sizes):
    """The faster one of torch's kernel for packed sequences and compiled flex attention, within documents."""
    b, heads, s, d = sizes
    h, keys = heads if isinstance(heads, tuple) else (heads, heads)
    lengths, i = [], 0
    while sum(lengths) < s:
        lengths.append(min((1 + i * 5 % 7) * (s // 32), s - sum(lengths)))
        i += 1
    backward = what.endswith("backward")

    def varlen():
        from torch.nn.attention.varlen import varlen_attn

        q, grad = random(b * s, h, d, dtype=dtype), random(b * s, h, d, dtype=dtype)
        k, v = random(b * s, keys, d, dtype=dtype), random(b * s, keys, d, dtype=dtype)
        ends = torch.tensor([0] + lengths * b, device=WHERE).cumsum(0).to(torch.int32)
        causal = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
        longest = max(lengths)
        return run([q, k, v], grad, lambda: varlen_attn(q, k, v, ends, ends, longest, longest, **causal))

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, grad = random(b, h, s, d, dtype=dtype), random(b, h, s, d, dtype=dtype)
        k, v = random(b, keys, s, d, dtype=dtype), random(b, keys, s, d, dtype=dtype)
        ids = torch.arange(len(lengths), device=WHERE).repeat_interleave(torch.tensor(lengths, device=WHERE))

        def same(batch, head, query, key):
            return (ids[query] == ids[key]) & (query >= key)

        mask = create_block_mask(same, None, None, s, s, device=WHERE)
        compiled = torch.compile(flex_attention)
        return run([q, k, v], grad, lambda: compiled(q, k, v, block_mask=mask, enable_gqa=keys != h))

    def run(leaves, grad, forward):
        if not backward:
            forward()
            return forward
        for leaf in leaves:
            leaf.requires_grad_()
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    found = []
    for name, make in (("varlen", varlen), ("flex", flex)):
        try:
            f = make()
            found.append((timed(f, 5), f, name))
        except (RuntimeError, ImportError, TypeError, ValueError) as error:
            print(f"{name}: {error}"[:300], file=sys.stderr)
    _, f, name = min(found, key=lambda row: row[0])
    return f, name


def adamw(sizes):
    layers, c, vocabulary, positions = sizes
    shapes = [(vocabulary, c), (positions, c), (c,), (c,)]
    for _ in range(layers):
        shapes += [(c,)] * 4
        for inner, outer in ((c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)):
            shapes += [(outer, inner), (outer,)]
    parameters = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True).step, "fused"


def forward_backward(op, dtype, sizes):
    n, width = sizes
    x = random(n, width, dtype=dtype).requires_grad_()
    if op == "cross_entropy":
        labels = torch.arange(n, device=WHERE) * 7919 % width

        @torch.compile
        def loss(x):
            return F.cross_entropy(x.float(), labels)

        return lambda: torch.autograd.grad(loss(x), x), "compiled"
    grad = random(n, width, dtype=dtype)
    if op == "gelu_tanh":
        return lambda: torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad), "eager"
    w, b = (random(width, dtype=dtype).requires_grad_() for _ in range(2))
    return lambda: torch.autograd.grad(F.layer_norm(x, (width,), w, b), (x, w, b), grad), "eager"


def scaled(dtype, n):
    """A product of 8-bit floats with a scale for each factor, with precise sums, stored as bf16."""
    a, b = (random(n, n).to(dtype) for _ in range(2))
    one = torch.ones((), device=WHERE)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False)


def peer(name):
    """The same op in PyTorch and how it runs there; None where there is no peer."""
    *op, dtype, last = name.split()
    op = " ".join(op)
    if name.startswith("host cost"):
        tiny = torch.arange(4, dtype=torch.float32, device=WHERE)
        return (lambda: tiny + tiny), "eager"
    if dtype not in DTYPES:
        return None
    dtype = DTYPES[dtype]
    if last.startswith("2^"):
        last = str(2 ** int(last[2:]))
    sizes = [tuple(map(int, part.split(":"))) if ":" in part else int(part) for part in last.split("x")]
    if op.startswith("grouped"):
        return grouped(op, dtype, sizes)
    if op.startswith("attention packed"):
        return packed_attention(op, dtype, sizes)
    if op.startswith("attention"):
        return attention(op, dtype, sizes)
    if op == "adamw":
        return adamw(sizes)
    if op.endswith(" forward+backward"):
        return forward_backward(op.split()[0], dtype, sizes)
    if op == "matmul":
        a, b = (random(sizes[0], sizes[0], dtype=dtype) for _ in range(2))
        return (lambda: a @ b), "eager"
    if op == "matmul_scaled":
        return scaled(dtype, sizes[0]), "eager"
    x, y = (random(*sizes, dtype=dtype) for _ in range(2))
    n = sizes[-1]
    w, b = (random(n, dtype=dtype) for _ in range(2))
    f = {
        "copy": lambda: x * 1.0,
        "add": lambda: x + y,
        "gelu": lambda: F.gelu(x),
        "exp": lambda: torch.exp(x),
        "sum": lambda: x.sum(),
        "sum last": lambda: x.sum(1),
        "sum first": lambda: x.sum(0),
        "sum all": lambda: x.sum(),
        "amax last": lambda: x.amax(1),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: F.layer_norm(x, (n,), w, b, 1e-5),
        "rms_norm": lambda: F.rms_norm(x, (n,), w, 1e-5),
        "transpose copy": lambda: x.t().contiguous(),
    }.get(op)
    return f and (f, "eager")


def time_of(name):
    """The time of a row and how it ran; None where there is no peer, or it failed."""
    try:
        found = peer(name)
        if found is None:
            return None
        f, how = found
        if name.startswith("host cost"):
            return timed(f, 200), how
        long = any(word in name for word in ("attention", "cross_entropy", "adamw"))
        return timed(f, 20 if long and WHERE == "cuda" else 1 if long else None), how
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None


def rate(row):
    if row["bytes"]:
        return f"{row['bytes'] / row['us'] / 1e3:.0f} GB/s"
    return f"{row['flops'] / row['us'] / 1e6:.1f} TFLOP/s" if row["flops"] else ""


def main():
    global WHERE
    rows = sys.argv[1] == "--rows"
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda:0"
    WHERE = "cuda" if "cuda" in device else "cpu"
    if rows:
        for line in sys.stdin:
            found = time_of(line.strip())
            row = {"name": line.strip(), "us": found and found[0], "how": found and found[1]}
            print(json.dumps(row), flush=True)
        return
    where = torch.cuda.get_device_name() if WHERE == "cuda" else f"the CPU with {torch.get_num_threads()} threads"
    ours = subprocess.run([sys.argv[1], device, *sys.argv[3:]], check=True, capture_output=True, text=True).stdout
    print(f"{where}, PyTorch {torch.__version__}, anymesh on {device}\n")
    print("| op | anymesh us | torch us | torch | ratio (torch / anymesh) | GB/s or TFLOP/s |\n|---|---|---|---|---|---|")
    for line in ours.splitlines():
        row = json.loads(line)
        us, how = time_of(row["name"]) or (math.nan, "none")
        ratio = "" if math.isnan(us) else f"{us / row['us']:.2f}"
        theirs = "" if math.isnan(us) else f"{us:.1f}"
        print(f"| {row['name']} | {row['us']:.1f} | {theirs} | {how} | {ratio} | {rate(row)} |", flush=True)


main()
