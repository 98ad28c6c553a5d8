"""Runs benches/kernels on the CPU and the same ops in NumPy, in one go on one machine, and prints the ratios.

    python3 benches/peers/numpy_cpu.py PATH-OF-THE-BENCH-BINARY [a part of the names]

With `--rows DEVICE` it reads names of rows, one a line, and prints for each a JSON object with its time: that is what
`anymesh bench` asks for.
"""

import json
import statistics
import subprocess
import sys
import time

import numpy as np


def timed(f, batch=5):
    f()
    samples = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(batch):
            f()
        samples.append((time.perf_counter() - start) * 1e6 / batch)
    return statistics.median(samples)


def peer(name):
    """The same op in NumPy; None where there is no peer."""
    *op, dtype, last = name.split()
    op, rng = " ".join(op), np.random.default_rng(0)
    if dtype != "f32" or ":" in last or "forward" in name or op.startswith(("attention", "adamw", "grouped")):
        return None
    sizes = [2 ** int(last[2:])] if last.startswith("2^") else [int(size) for size in last.split("x")]
    if op == "matmul":
        sizes *= 2
    x, y = (rng.standard_normal(sizes, dtype=np.float32) for _ in range(2))
    return {
        "matmul": lambda: x @ y,
        "copy": lambda: x * np.float32(1.0),
        "add": lambda: x + y,
        "exp": lambda: np.exp(x),
        "sum": lambda: x.sum(),
        "sum last": lambda: x.sum(1),
        "sum first": lambda: x.sum(0),
        "sum all": lambda: x.sum(),
        "amax last": lambda: x.max(1),
        "transpose copy": lambda: np.ascontiguousarray(x.T),
    }.get(op)


def time_of(name):
    if name.startswith("host cost"):
        tiny = np.arange(4, dtype=np.float32)
        return timed(lambda: tiny + tiny, 1000)
    f = peer(name)
    return f and timed(f)


def main():
    if sys.argv[1] == "--rows":
        for line in sys.stdin:
            us = time_of(line.strip())
            print(json.dumps({"name": line.strip(), "us": us, "how": us and "NumPy"}), flush=True)
        return
    ours = subprocess.run([sys.argv[1], "cpu", *sys.argv[2:]], check=True, capture_output=True, text=True).stdout
    print(f"NumPy {np.__version__}\n\n| op | anymesh us | NumPy us | ratio (NumPy / anymesh) |\n|---|---|---|---|")
    for row in map(json.loads, ours.splitlines()):
        theirs = time_of(row["name"])
        if theirs is not None:
            digits = 3 if row["us"] < 10 else 0
            print(f"| {row['name']} | {row['us']:.{digits}f} | {theirs:.{digits}f} | {theirs / row['us']:.2f} |")


main()
