"""Runs benches/kernels on the CPU and the same ops in NumPy, in one go on one machine, and prints the ratios.

    python3 benches/peers/numpy_cpu.py PATH-OF-THE-BENCH-BINARY
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


rng = np.random.default_rng(0)
a, b = (rng.standard_normal((1024, 1024), dtype=np.float32) for _ in range(2))
x, y = (rng.standard_normal(1 << 24, dtype=np.float32) for _ in range(2))
tiny = np.arange(4, dtype=np.float32)
PEERS = {
    "matmul f32 1024": lambda: a @ b,
    "add f32 2^24": lambda: x + y,
    "exp f32 2^24": lambda: np.exp(x),
    "sum f32 2^24": lambda: x.sum(),
}

ours = subprocess.run([sys.argv[1], "cpu"], check=True, capture_output=True, text=True).stdout
print(f"NumPy {np.__version__}\n\n| op | anymesh us | NumPy us | ratio (NumPy / anymesh) |\n|---|---|---|---|")
for line in ours.splitlines():
    row = json.loads(line)
    if row["name"] in PEERS:
        theirs = timed(PEERS[row["name"]])
        print(f"| {row['name']} | {row['us']:.0f} | {theirs:.0f} | {theirs / row['us']:.2f} |")
    else:
        theirs = timed(lambda: tiny + tiny, 1000)
        print(f"| {row['name']} | {row['us']:.3f} | {theirs:.3f} | {theirs / row['us']:.2f} |")
