"""Runs checkpoint/benches/io and the same in safetensors and torch DCP (4 processes), in one go on one machine, and prints the ratios.

    python3 benches/peers/checkpoint.py PATH-OF-THE-BENCH-BINARY FOLDER

Needs numpy and safetensors; DCP is left out where torch is not installed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np
from safetensors.numpy import load_file, save_file

TENSORS, ROWS, COLUMNS, RUNS = 8, 4096, 4096, 5


def synced(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def one_file(folder):
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((ROWS, COLUMNS), dtype=np.float32) for i in range(TENSORS)}
    path = os.path.join(folder, "peer.safetensors")
    saves, loads = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        save_file(tensors, path)
        synced(path)
        saves.append(time.perf_counter() - start)
        start = time.perf_counter()
        loaded = load_file(path)
        sum(float(t[0, 0]) for t in loaded.values())
        loads.append(time.perf_counter() - start)
        os.remove(path)
    return statistics.median(saves), statistics.median(loads)


def dcp_worker(rank, folder, results):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE="4")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    full = [torch.randn(ROWS, COLUMNS) for _ in range(TENSORS)]
    saves, loads, reshards = [], [], []
    for i in range(RUNS):
        path = os.path.join(folder, f"dcp{i}")
        state = {f"w{k}": distribute_tensor(t, mesh, [Shard(0)]) for k, t in enumerate(full)}
        dist.barrier()
        start = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        dist.barrier()
        saves.append(time.perf_counter() - start)
        for dim, times in ((0, loads), (1, reshards)):
            target = {f"w{k}": distribute_tensor(torch.zeros_like(t), mesh, [Shard(dim)]) for k, t in enumerate(full)}
            dist.barrier()
            start = time.perf_counter()
            dcp.load(target, checkpoint_id=path)
            dist.barrier()
            times.append(time.perf_counter() - start)
        if rank == 0:
            shutil.rmtree(path)
        dist.barrier()
    if rank == 0:
        results.put([statistics.median(t) for t in (saves, loads, reshards)])
    dist.destroy_process_group()


def dcp(folder):
    try:
        import torch.multiprocessing as mp
    except ImportError:
        return None
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(dcp_worker, args=(folder, results), nprocs=4)
    return results.get()


if __name__ == "__main__":
    binary, folder = sys.argv[1], sys.argv[2]
    os.makedirs(folder, exist_ok=True)
    out = subprocess.run([binary, folder], check=True, capture_output=True, text=True).stdout
    ours = {row["what"]: row["seconds"] for row in map(json.loads, filter(lambda l: l.startswith("{"), out.splitlines()))}
    save, load = one_file(folder)
    torch = dcp(folder)
    mib = TENSORS * ROWS * COLUMNS * 4 / 2**20
    for what, seconds in ours.items():
        print(f"{what}: {seconds:.3f} s" + ("" if "stall" in what else f", {mib / seconds:.0f} MiB/s"))
    print(f"safetensors one file: save {save:.3f} s (synced), load {load:.3f} s")
    print(f"save / safetensors: {save / ours['save 512 MiB of 4 ranks, synced']:.2f}x, load / safetensors: {load / ours['load as saved']:.2f}x")
    if torch:
        names = ["save 512 MiB of 4 ranks, synced", "load as saved", "load resharded to the other axis"]
        for name, seconds in zip(names, torch):
            print(f"torch DCP {name}: {seconds:.3f} s, ours {seconds / ours[name]:.2f}x")
    else:
        print("torch is not installed: no comparison with DCP")
