"""Tokens per second of `anymesh generate` and of llama.cpp, both in f32 or 16-bit floats with the same weights on the same
threads, in one run.

    cargo build --release -p anymesh-cli --no-default-features --features cpu
    python3 benches/peers/decode.py target/release/anymesh target/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Needs gguf and xllamacpp (llama.cpp as a Python package). The GGUF file is written again in F32, BF16 and F16 for llama.cpp;
anymesh unpacks it when it is opened. Rounds alternate; the table has the best and the median of each. The likeliest token is taken each time,
and the texts of f32 are compared.
"""

import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

import gguf
import numpy as np

TOKENS, ROUNDS = 64, 5
PROMPT = "Once upon a time"
THREADS = int(os.environ.get("THREADS", os.cpu_count()))


def write_as(dtype, source, target):
    """Matrices as floats of a type of GGUF; vectors are F32, as llama.cpp has them."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == "general.file_type":
            writer.add_uint32(key, gguf.LlamaFileType["ALL_F32" if dtype == "F32" else f"MOSTLY_{dtype}"])
        elif field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(list(reversed(tensor.shape)))
        kind = gguf.GGMLQuantizationType[dtype if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(binary, model, *more):
    command = [binary, "generate", model, PROMPT, "--max-tokens", str(TOKENS), "--device", "cpu", *more]
    env = {**os.environ, "RAYON_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return float(re.search(r"then ([\d.]+) tokens/s", done.stderr)[1]), done.stdout.rstrip("\n")


def llama_cpp(path):
    """One round in a process of its own: its threads spin, and would take the cores from the other."""
    done = subprocess.run([sys.executable, __file__, "--llama.cpp", path], capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.strip().splitlines()[-1])
    return last["rate"], last["text"]


def llama_cpp_round(path):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 1024, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    with contextlib.redirect_stderr(None):
        server = xllamacpp.Server(params)
        ask = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0.0, "cache_prompt": False}
        answer = server.handle_completions(ask)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    rate = answer["timings"]["predicted_per_second"]
    print(json.dumps({"rate": rate, "text": answer["choices"][0]["text"]}))


def main():
    if sys.argv[1] == "--llama.cpp":
        return llama_cpp_round(sys.argv[2])
    binary, model = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for dtype in ["F32", "BF16", "F16"]:
            path = os.path.join(folder, f"{dtype}.gguf")
            write_as(dtype, model, path)
            runs[f"anymesh {dtype.lower()}"] = functools.partial(ours, binary, model, "--dtype", dtype.lower())
            runs[f"llama.cpp {dtype}"] = functools.partial(llama_cpp, path)
        runs["anymesh f32, tp=3"] = lambda: ours(binary, model, "--mesh", "tp=3")
        rates, texts = {name: [] for name in runs}, {}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                rate, texts[name] = run()
                rates[name].append(rate)
    print(f"{TOKENS} tokens after '{PROMPT}', {THREADS} threads, {ROUNDS} rounds\n")
    print("| | tokens/s, best | median |\n|---|---|---|")
    for name, found in rates.items():
        print(f"| {name} | {max(found):.1f} | {statistics.median(found):.1f} |")
    for dtype in ["F32", "BF16", "F16"]:
        mine, other = rates[f"anymesh {dtype.lower()}"], rates[f"llama.cpp {dtype}"]
        medians = statistics.median(mine) / statistics.median(other)
        print(f"\n{dtype}, anymesh / llama.cpp: {medians:.2f} by the medians, {max(mine) / max(other):.2f} by the best")
    same = texts["anymesh f32"].strip() == texts["llama.cpp F32"].strip()
    print("the texts are the same" if same else f"the texts differ:\n{texts}")


main()
