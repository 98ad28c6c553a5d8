"""Makes tests/data/gguf with the Python package of GGUF, or says what that package reads in a file.

    pip install gguf sentencepiece
    python3 make_gguf.py make
    python3 make_gguf.py sums FILE    # name, type, shape and CRC-32 of each tensor as f32 (or as it is, where it is not quantized)
    python3 make_gguf.py encode TOKENIZER TEXTS    # with the package tokenizers: the tokens of each text

`types.gguf` has a tensor of every type that we read, quantized by the package where it can and random blocks where it cannot,
and a value of every type of metadata; `types.f32` is what the package makes of the tensors, one after the other by name.
`llama.gguf` is a small model whose queries and keys were turned as converters do; `llama.sums` has the names,
shapes and CRC-32s of the model as it was before. `pieces.gguf` has a tokenizer of
SentencePiece and no tensors, `pieces.tokens.json` the tokens that it gives for texts; `smollm2.tokens.json` has those that llama.cpp
gives with the tokenizer of SmolLM2. The seeds of the fuzzer are made too.
"""

import pathlib
import sys
import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value

DATA = pathlib.Path(__file__).parent / "data" / "gguf"
random = np.random.default_rng(7)


def blocks(kind, count):
    """Random blocks: anything but scales that are not finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    out = random.integers(0, 256, (count, size), dtype=np.uint8)
    scales = random.normal(0, 0.1, (count, 2)).astype(np.float16).view(np.uint8)
    if kind == Type.Q4_K:
        out[:, :4] = scales
    elif kind == Type.Q6_K:
        out[:, 208:] = scales[:, :2]
    else:
        raise ValueError(kind)
    return out


def values(writer):
    """A value of every type."""
    writer.add_uint8("value.u8", 200)
    writer.add_int8("value.i8", -100)
    writer.add_uint16("value.u16", 60000)
    writer.add_int16("value.i16", -30000)
    writer.add_uint32("value.u32", 4000000000)
    writer.add_int32("value.i32", -2000000000)
    writer.add_float32("value.f32", 1e-5)
    writer.add_bool("value.bool", True)
    writer.add_string("value.text", "Ä \"quoted\"\n")
    writer.add_uint64("value.u64", 2**64 - 1)
    writer.add_int64("value.i64", -(2**63))
    writer.add_float64("value.f64", 0.1)
    writer.add_array("value.numbers", [1, 2, 3])
    writer.add_array("value.texts", ["a", "", "ü"])
    writer.add_array("value.bools", [True, False])
    writer.add_key_value("value.nested", [[1, 2], [3]], Value.ARRAY, Value.ARRAY)


def types():
    writer = gguf.GGUFWriter(DATA / "types.gguf", "types")
    values(writer)
    expected = {}
    for kind in [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q6_K]:
        data = random.normal(0, 2, (3, 512)).astype(np.float32)
        if kind in (Type.Q4_K, Type.Q6_K):
            data = blocks(kind, 6).reshape(3, -1)
        elif kind == Type.F16:
            data = data.astype(np.float16)
        elif kind != Type.F32:
            data = gguf.quants.quantize(data, kind)
        expected[kind.name] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    # Three dimensions, and whole numbers.
    cube = random.normal(0, 1, (2, 3, 64)).astype(np.float32)
    data = gguf.quants.quantize(cube, Type.Q8_0)
    expected["cube"] = gguf.quants.dequantize(data, Type.Q8_0)
    writer.add_tensor("cube", data, raw_dtype=Type.Q8_0)
    write(writer)
    (DATA / "types.f32").write_bytes(b"".join(expected[name].astype("<f4").tobytes() for name in sorted(expected)))


def crc(array):
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def permute(weights, heads):
    """What converters to GGUF do with the rows of queries and keys of Llama models."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def llama(path, layers):
    """A small model; returns what it was before the converter."""
    hidden, heads, kv, inner, tokens = 32, 4, 2, 32, 5
    head = hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"token_embd.weight": ("model.embed_tokens.weight", (tokens, hidden)), "output_norm.weight": ("model.norm.weight", (hidden,))}
    for i in range(layers):
        theirs, ours = f"blk.{i}.", f"model.layers.{i}."
        names |= {
            theirs + "attn_norm.weight": (ours + "input_layernorm.weight", (hidden,)),
            theirs + "attn_q.weight": (ours + "self_attn.q_proj.weight", (heads * head, hidden)),
            theirs + "attn_q.bias": (ours + "self_attn.q_proj.bias", (heads * head,)),
            theirs + "attn_k.weight": (ours + "self_attn.k_proj.weight", (kv * head, hidden)),
            theirs + "attn_k.bias": (ours + "self_attn.k_proj.bias", (kv * head,)),
            theirs + "attn_v.weight": (ours + "self_attn.v_proj.weight", (kv * head, hidden)),
            theirs + "attn_output.weight": (ours + "self_attn.o_proj.weight", (hidden, heads * head)),
            theirs + "ffn_norm.weight": (ours + "post_attention_layernorm.weight", (hidden,)),
            theirs + "ffn_gate.weight": (ours + "mlp.gate_proj.weight", (inner, hidden)),
            theirs + "ffn_up.weight": (ours + "mlp.up_proj.weight", (inner, hidden)),
            theirs + "ffn_down.weight": (ours + "mlp.down_proj.weight", (hidden, inner)),
        }
    expected = {}
    for theirs, (ours, shape) in names.items():
        kind = Type.F32 if len(shape) == 1 else Type.F16 if "attn_v" in theirs else Type.Q4_1 if "ffn" in theirs else Type.Q8_0
        # Rows are quantized each by itself, so that their order does not change what they hold.
        data = gguf.quants.quantize(random.normal(0, 1, shape).astype(np.float32), kind)
        expected[ours] = data if kind == Type.F16 else gguf.quants.dequantize(data, kind)
        if "attn_q." in theirs or "attn_k." in theirs:
            data = permute(data, heads if "attn_q." in theirs else kv)
        writer.add_tensor(theirs, data, raw_dtype=kind)
    write(writer)
    return [f"{name} {','.join(map(str, x.shape))} {crc(x)}\n" for name, x in sorted(expected.items())]


def seeds():
    """Small files for the fuzzer."""
    folder = DATA.parents[3] / "fuzz" / "seeds" / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    llama(folder / "model", 1)
    writer = gguf.GGUFWriter(folder / "types", "types")
    values(writer)
    for kind in [Type.F16, Type.Q4_0, Type.Q5_1, Type.Q4_K, Type.Q6_K]:
        block = gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor(kind.name, np.zeros((2, block * (32 if kind == Type.F16 else 1)), np.uint8), raw_dtype=kind)
    write(writer)
    for name, model in [("bytes", "gpt2"), ("pieces", "llama")]:
        writer = gguf.GGUFWriter(folder / name, "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(["<s>", "a", "b", "ab", "▁", "▁ab", "<0x0A>"])
        writer.add_token_types([3, 1, 1, 1, 1, 1, 6])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0])
        writer.add_token_merges(["a b", "▁ ab"])
        writer.add_bos_token_id(0)
        writer.add_chat_template("{{ messages }}")
        write(writer)


def pieces():
    """A tokenizer of SentencePiece, and the tokens that it gives."""
    import io
    import json

    import sentencepiece

    root = DATA.parents[3]
    lines = [line for name in ["README.md", "ARCHITECTURE.md"] for line in (root / name).read_text(encoding="utf-8").splitlines()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=640, model_type="bpe", byte_fallback=True, split_digits=True,
        character_coverage=0.999, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, max_sentence_length=100000,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(model.vocab_size())
    kind = lambda i: 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
    writer = gguf.GGUFWriter(DATA / "pieces.gguf", "pieces")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in ids])
    writer.add_token_scores([model.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    write(writer)
    texts = [entry["text"] for entry in json.loads((DATA / "smollm2.tokens.json").read_text(encoding="utf-8"))]
    texts = [text for text in texts if text and "<|" not in text] + [line for line in lines if line.strip()][::8]
    entries = [{"text": text, "tokens": [model.bos_id(), *model.encode(text)]} for text in texts]
    lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in entries)
    (DATA / "pieces.tokens.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sums(path):
    plain = {Type.F32: np.float32, Type.F16: np.float16}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        data = tensor.data if tensor.tensor_type in plain else gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4")
        print(tensor.name, tensor.tensor_type.name, ",".join(map(str, shape)), crc(data))


def encode(tokenizer, texts):
    import json

    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
    for entry in json.loads(pathlib.Path(texts).read_text(encoding="utf-8")):
        tokens = tokenizer.encode(entry["text"]).ids
        first = len(tokenizer.encode("").ids)
        assert tokenizer.decode(tokens[first:], skip_special_tokens=False) == entry["text"], entry["text"]
        print(json.dumps(tokens, separators=(",", ":")))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        DATA.mkdir(parents=True, exist_ok=True)
        types()
        (DATA / "llama.sums").write_text("".join(llama(DATA / "llama.gguf", 2)))
        seeds()
        pieces()
    elif sys.argv[1] == "sums":
        sums(sys.argv[2])
    else:
        encode(*sys.argv[2:])
