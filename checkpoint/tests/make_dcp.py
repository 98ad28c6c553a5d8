"""Makes tests/data/dcp with torch.distributed.checkpoint.

    pip install numpy torch
    python3 make_dcp.py

Byte k of every (global) tensor is (37 k + 11) mod 256; of booleans it is k mod 2.
"""

import os
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DATA = pathlib.Path(__file__).resolve().parent / "data" / "dcp"
TYPES = "bool uint8 uint32 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64".split()


def tensor(dtype, shape):
    dtype = getattr(torch, dtype)
    out = torch.empty(shape, dtype=dtype)
    count = out.numel() * out.element_size()
    raw = bytes(k % 2 if dtype == torch.bool else (37 * k + 11) % 256 for k in range(count))
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape).clone() if raw else out


def one():
    """One process: every type, and tensors whose storage is not row-major."""
    state = {f"types.{name}": tensor(name, [3, 5]) for name in TYPES}
    state["scalar"] = tensor("float32", [])
    state["empty"] = tensor("float32", [0, 4])
    # Equal values in another order of storage, in a part of a larger storage, and repeated.
    state["transposed"] = tensor("float32", [4, 6]).T.contiguous().T
    state["permuted"] = tensor("int32", [2, 3, 4]).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    state["parameter"] = torch.nn.Parameter(tensor("bfloat16", [2, 2]))
    state["nested"] = {"step": 7, "list": [tensor("uint8", [3]), "text"]}
    state["foreign"] = tensor("int16", [3])
    dcp.save(state, checkpoint_id="one")


def rank(index, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=index, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    full = tensor("float32", [5, 7])
    state = {
        "rows": distribute_tensor(full, mesh, [Shard(0), Replicate()]),
        "columns": distribute_tensor(full, mesh, [Replicate(), Shard(1)]),
        "both": distribute_tensor(full, mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(tensor("bfloat16", [13, 2]), mesh, [Shard(0), Shard(0)]),
        "whole": distribute_tensor(full, mesh, [Replicate(), Replicate()]),
        "plain": tensor("int64", [3]),
    }
    dcp.save(state, checkpoint_id="mesh")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The folder's path is stored: a relative one is the same everywhere.
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    os.chdir(DATA)
    one()
    mp.spawn(rank, args=(4,), nprocs=4)
