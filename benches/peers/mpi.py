"""Exchange and all-reduce over MPI beside a loop in C with the same MPI, on this machine in one run.

    cargo bench -p anymesh-cluster --features mpi --bench exchange --no-run    # prints the path of the binary
    python3 benches/peers/mpi.py PATH [PROCESSES ...]                          # needs mpicc and mpirun

The two take turns, three times each; the tables have the medians. A ratio above 1 means that anymesh is faster."""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

TURNS = 3


def run(program, processes):
    """The microseconds of every call and size."""
    options = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else []
    command = ["mpirun", *options, "-n", str(processes), program]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    fields = [line.split() for line in lines]
    return {(op, int(size)): float(us) for op, size, us in (f for f in fields if len(f) == 3)}


ours = sys.argv[1]
version = subprocess.run(["mpirun", "--version"], check=True, capture_output=True, text=True).stdout
source = pathlib.Path(__file__).with_name("mpi_loop.c")
with tempfile.TemporaryDirectory() as folder:
    loop = os.path.join(folder, "mpi_loop")
    subprocess.run(["mpicc", "-O3", "-march=native", "-o", loop, source], check=True)
    print(version.split("\n")[0])
    for processes in map(int, sys.argv[2:] or ["2", "4"]):
        turns = [(run(ours, processes), run(loop, processes)) for _ in range(TURNS)]
        print(f"\n{processes} processes\n\n| call | bytes | anymesh us | C us | ratio (C / anymesh) |\n|---|---|---|---|---|")
        for op, size in turns[0][1]:
            mine, theirs = (statistics.median(turn[i][op, size] for turn in turns) for i in (0, 1))
            print(f"| {op} | {size} | {mine:.1f} | {theirs:.1f} | {theirs / mine:.2f} |")
