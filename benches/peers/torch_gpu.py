"""Runs benches/kernels on CUDA and the same ops in PyTorch eager, in one go on one GPU, and prints the ratios.

    python3 benches/peers/torch_gpu.py PATH-OF-THE-BENCH-BINARY [cuda:0 [a part of the names]]
"""

import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_tf32 = False
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def timed(f, batch=100):
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    samples = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(batch):
            f()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / batch)
    return statistics.median(samples)


def grouped(name):
    """The faster one of torch's grouped product and a loop over groups."""
    what, (groups, n, k, m) = name.split()[:-2], map(int, name.split()[-1].split("x"))
    dtype = DTYPES[name.split()[-2]]
    sums, total = [], 0
    for g in range(groups):
        total += 8 + g * 37 % 16
        sums.append(total)
    ends = [n * s // total for s in sums]
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    ranges = list(zip([0] + ends, ends))
    x, y = torch.randn(n, k, device="cuda", dtype=dtype), torch.randn(n, m, device="cuda", dtype=dtype)
    w = torch.randn(groups, m, k, device="cuda", dtype=dtype)
    if what == ["grouped"]:
        out, turned = torch.empty(n, m, device="cuda", dtype=dtype), w.transpose(1, 2)
        one = lambda: torch._grouped_mm(x, turned, offsets)
        loop = lambda: [torch.mm(x[a:b], turned[g], out=out[a:b]) for g, (a, b) in enumerate(ranges)]
    elif what == ["grouped", "dx"]:
        out = torch.empty(n, k, device="cuda", dtype=dtype)
        one = lambda: torch._grouped_mm(y, w, offsets)
        loop = lambda: [torch.mm(y[a:b], w[g], out=out[a:b]) for g, (a, b) in enumerate(ranges)]
    else:
        out = torch.empty(groups, m, k, device="cuda", dtype=dtype)
        one = lambda: torch._grouped_mm(y.t(), x, offsets)
        loop = lambda: [torch.mm(y[a:b].t(), x[a:b], out=out[g]) for g, (a, b) in enumerate(ranges)]
    return min((one, loop), key=lambda f: timed(f, 10))


def peer(name):
    """The same op in PyTorch; None where there is no peer."""
    words = name.split()
    if words[0] == "grouped":
        return grouped(name)
    if words[0] == "matmul":
        n = int(words[2])
        a, b = (torch.randn(n, n, device="cuda").to(DTYPES[words[1]]) for _ in range(2))
        return lambda: a @ b
    if "x" not in words[-1]:
        return None
    n, dtype, op = int(words[-1].split("x")[0]), DTYPES[words[-2]], " ".join(words[:-2])
    x, y = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    w, b = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    return {
        "copy": lambda: x * 1.0,
        "add": lambda: x + y,
        "gelu": lambda: F.gelu(x),
        "exp": lambda: torch.exp(x),
        "sum last": lambda: x.sum(1),
        "sum first": lambda: x.sum(0),
        "sum all": lambda: x.sum(),
        "amax last": lambda: x.amax(1),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: F.layer_norm(x, (n,), w, b, 1e-5),
        "rms_norm": lambda: F.rms_norm(x, (n,), w, 1e-5),
        "transpose copy": lambda: x.t().contiguous(),
    }.get(op)


def main():
    binary, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda:0"
    ours = subprocess.run([binary, device, *sys.argv[3:]], check=True, capture_output=True, text=True).stdout
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__} eager, anymesh on {device}\n")
    print("| op | anymesh us | torch us | ratio (torch / anymesh) | GB/s or TFLOP/s |\n|---|---|---|---|---|")
    for line in ours.splitlines():
        row = json.loads(line)
        f = peer(row["name"])
        rate = f"{row['bytes'] / row['us'] / 1e3:.0f} GB/s" if row["bytes"] else f"{row['flops'] / row['us'] / 1e6:.0f} TFLOP/s" if row["flops"] else ""
        if f is None:
            print(f"| {row['name']} | {row['us']:.2f} | | | {rate} |")
            continue
        theirs = timed(f)
        print(f"| {row['name']} | {row['us']:.1f} | {theirs:.1f} | {theirs / row['us']:.2f} | {rate} |", flush=True)


main()
