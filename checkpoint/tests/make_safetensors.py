"""Makes tests/data/safetensors and tests/data/hugging_face with the Python packages, or checks a file of ours with them.

    pip install numpy safetensors torch huggingface_hub
    python3 make_safetensors.py make
    python3 make_safetensors.py check FILE    # needs safetensors alone

Byte k of every tensor is (37 k + 11) mod 256, which gives floats of all kinds, NaNs with payloads among them; of booleans it is k mod 2.
"""

import json
import pathlib
import sys

DATA = pathlib.Path(__file__).parent / "data"
SHAPES = [[3, 5], [], [0, 4], [2, 3, 4]]


def pattern(count, boolean):
    return bytes(k % 2 if boolean else (37 * k + 11) % 256 for k in range(count))


def make():
    import torch
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import save_file

    names = "bool uint8 uint32 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64".split()
    foreign = "int8 int16 uint16 uint64".split()

    def tensor(dtype, shape):
        out = torch.empty(shape, dtype=dtype)
        raw = pattern(out.numel() * out.element_size(), dtype == torch.bool)
        if raw:
            out = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape).clone()
        return out

    def all_of(types):
        return {f"{t}.{i}": tensor(getattr(torch, t), s) for t in types for i, s in enumerate(SHAPES)}

    (DATA / "safetensors").mkdir(parents=True, exist_ok=True)
    save_file(all_of(names), DATA / "safetensors" / "types.safetensors", metadata={"format": "pt", "note": "ä \"quoted\""})
    save_file(all_of(["float32"] + foreign), DATA / "safetensors" / "foreign.safetensors")

    folder = DATA / "hugging_face"
    folder.mkdir(parents=True, exist_ok=True)
    model = {f"model.layers.{i}.weight": tensor(torch.bfloat16, [8, 16]) for i in range(6)}
    model["lm_head.weight"] = tensor(torch.float32, [16, 16])
    save_torch_state_dict(model, folder, max_shard_size=600)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 16}) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}) + "\n")


def check(path):
    import safetensors

    with safetensors.safe_open(path, "numpy") as file:
        keys = set(file.keys())
        metadata = file.metadata()
    tensors = safetensors.deserialize(open(path, "rb").read())
    assert keys == {name for name, _ in tensors}, keys
    for name, tensor in tensors:
        assert bytes(tensor["data"]) == pattern(len(tensor["data"]), tensor["dtype"] == "BOOL"), name
        print(name, tensor["dtype"], list(tensor["shape"]))
    print("metadata", json.dumps(metadata, sort_keys=True))


if __name__ == "__main__":
    make() if sys.argv[1] == "make" else check(sys.argv[2])
