"""A small model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 4, 2, 2, 96
NAMES = {
    "self_attn.q_proj": ("attn_q", HIDDEN, HIDDEN),
    "self_attn.k_proj": ("attn_k", HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": ("attn_v", HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HIDDEN),
    "mlp.gate_proj": ("ffn_gate", 128, HIDDEN),
    "mlp.up_proj": ("ffn_up", 128, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, 128),
}


MERGES = [("a", "b"), ("ab", "c")]
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 125)), *map("".join, MERGES)]


def write_gguf(path: Path, architecture: str) -> None:
    """Writes a model of 8 bits. Rows of a Llama's query and key are permuted in such files."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges([f"{first} {second}" for first, second in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = torch.Generator().manual_seed(2)

    def add(name: str, *shape: int, quantized: bool = True) -> None:
        values = torch.randn(shape, generator=generator).numpy()
        if not quantized:
            writer.add_tensor(name, values)
            return
        dtype = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, dtype), raw_dtype=dtype)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN, quantized=False)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", HIDDEN, quantized=False)
        for name, *shape in NAMES.values():
            add(f"blk.{layer}.{name}.weight", *shape)
        for name, size in (("attn_q", HIDDEN), ("attn_k", 32), ("attn_v", 32)) if architecture == "qwen2" else ():
            add(f"blk.{layer}.{name}.bias", size, quantized=False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
