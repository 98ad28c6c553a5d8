"""Collectives of anymesh over NCCL and of torch.distributed on the same GPUs with the same libnccl, in one go; prints the ratios.

    LD_PRELOAD=PATH/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 python3 benches/peers/nccl.py PATH-OF-THE-NCCL-TEST-BINARY [ranks]

The binary is the test `nccl` of anymesh-cluster, whose `bench` prints JSON lines. Ranks share a GPU where there are fewer GPUs.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time

SIZES = [4 << 10, 1 << 20, 16 << 20, 64 << 20]


def rank_of_torch():
    import torch
    import torch.distributed as dist

    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["PEER_DEVICE"]))
    dist.init_process_group("nccl")
    for size in SIZES:
        elements = size // 4
        whole = torch.ones(elements, device="cuda")
        piece = torch.ones(elements // n, device="cuda")
        for op in ["all_reduce", "all_gather", "reduce_scatter"]:

            def call():
                # Out of place, as in anymesh: a tensor is a value.
                if op == "all_reduce":
                    out = whole.clone()
                    dist.all_reduce(out)
                elif op == "all_gather":
                    out = torch.empty(elements, device="cuda")
                    dist.all_gather_into_tensor(out, piece)
                else:
                    out = torch.empty(elements // n, device="cuda")
                    dist.reduce_scatter_tensor(out, whole)
                return out

            dist.barrier()
            host, total = [], []
            for turn in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                results = [call() for _ in range(10)]
                issued = time.perf_counter()
                torch.cuda.synchronize()
                done = time.perf_counter()
                del results
                if turn > 1:
                    host.append((issued - start) * 1e5)
                    total.append((done - start) * 1e5)
            if rank == 0:
                print(json.dumps({"op": op, "bytes": size, "ranks": n, "host_us": statistics.median(host), "us": statistics.median(total)}), flush=True)
    dist.destroy_process_group()


def torch_lines(n):
    import torch

    gpus = torch.cuda.device_count()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(n):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PEER_DEVICE=str(rank % gpus))
        ranks.append(subprocess.Popen([sys.executable, __file__, "--torch-rank"], env=env, stdout=subprocess.PIPE, text=True))
    text = ranks[0].communicate(timeout=120)[0]
    for peer in ranks[1:]:
        peer.communicate(timeout=30)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def anymesh_lines(binary, n, **more):
    done = subprocess.run([binary, "bench", str(n)], env=dict(os.environ, **more), capture_output=True, text=True, timeout=150)
    if done.returncode != 0:
        sys.exit(f"{binary} bench {n} failed:\n{done.stdout}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    binary = sys.argv[1]
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    peer = torch_lines(n)
    ours = anymesh_lines(binary, n)
    blocking = anymesh_lines(binary, n, NCCL_COMM_BLOCKING="1")
    print(f"{n} ranks; us a call (host us); the last column has anymesh with NCCL_COMM_BLOCKING=1")
    print(f"{'op':16}{'bytes':>12}{'torch':>22}{'anymesh':>22}{'torch/anymesh':>16}{'blocking':>22}")
    for t, a, b in zip(peer, ours, blocking):
        assert (t["op"], t["bytes"]) == (a["op"], a["bytes"]) == (b["op"], b["bytes"])
        cell = lambda x: f"{x['us']:.0f} ({x['host_us']:.0f})"
        print(f"{t['op']:16}{t['bytes']:>12}{cell(t):>22}{cell(a):>22}{t['us'] / a['us']:>16.2f}{cell(b):>22}")


if __name__ == "__main__":
    rank_of_torch() if "--torch-rank" in sys.argv else main()
