"""Layouts that the exact choice finds for models of transformers at their real shapes, on meta, and its time."""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from neuronx_dist import Mesh, comm, hf
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, parallelize
from neuronx_dist.parallelize.choose.conversions import conversion
from neuronx_dist.parallelize.choose.exact import choose
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.prove.verify import check_types
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.planning.costs import H100
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import Division, operands_of
from neuronx_dist.program.record import record_program
from neuronx_dist.spmd.types import I, S, Shard

pytestmark = pytest.mark.slow

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "use_cache": False,
}  # fmt: skip


def llama(layers: int) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_8B, num_hidden_layers=layers))


def gpt2_medium(layers: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1024, n_head=16, n_layer=layers))


def vit_huge(layers: int) -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=1280, num_attention_heads=16, intermediate_size=5120, num_hidden_layers=layers, num_labels=1000
        )
    )


def on_meta(model: Any, layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return model(layers).to(dtype)


def tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def images(batch: int) -> dict[str, torch.Tensor]:
    pixels = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return {"pixel_values": pixels, "labels": torch.empty(batch, dtype=torch.long, device="meta")}


def found(module: nn.Module, arguments: dict[str, torch.Tensor], memory: float | None = None) -> Division:
    program = decomposed(record_program(module, arguments, training=True))
    return choose(program, "tp", 8, costs=H100, memory=memory)


def types_of(division: Division, pattern: str) -> list[Any]:
    return [division.types[value] for value in division.program.parameters if re.search(pattern, value.path)]


def collectives(division: Division, layer: str) -> Counter[str]:
    """The collectives in the forward of one layer, each (value, wanted type) once."""
    wanted = {}
    for call in division.program.calls:
        for value, want in zip(operands_of(call), division.strategies[call].operands, strict=True):
            if division.type_of(value) != want:
                wanted.setdefault((value, want), call)
    operators = [
        conversion(value, division.type_of(value), want, division.size).operator
        for (value, want), call in wanted.items()
        if layer in call.module
    ]
    return Counter(operator for operator in operators if operator != "convert")


def test_llama_3_8b_gets_columns_rows_sequence_parallelism_and_a_parallel_vocabulary():
    division = found(on_meta(llama, 3), tokens(1, 4096))
    assert set(types_of(division, r"(q|k|v|gate|up)_proj|lm_head")) == {S(0)}
    assert set(types_of(division, r"(o|down)_proj")) == {S(1)}
    assert set(types_of(division, r"norm")) == {I}
    assert collectives(division, "layers.1") == {"all_gather": 2, "reduce_scatter": 2}
    norms = [call for call in division.program.calls if "layers.1.input_layernorm" in call.module]
    assert all(division.strategies[call].results == (S(1),) for call in norms)  # the sequence is cut
    (loss,) = [call for call in division.program.calls if call.name == "cross_entropy"]
    assert division.strategies[loss].operands[0] == S(1)  # logits are not gathered
    (attention, *_) = [call for call in division.program.calls if call.name == "scaled_dot_product_attention"]
    assert division.strategies[attention].operands == (S(1),) * 3  # by heads, though there are fewer keys than queries


def test_weights_are_held_whole_where_that_moves_less_and_are_cut_where_memory_wants_it():
    """At 32,768 tokens a sum of all gradients is less than the activations of a layer."""
    layers, arguments = 2, tokens(8, 4096)
    whole = found(on_meta(llama, layers), arguments)
    assert set(types_of(whole, r"layers.*_proj")) == {I}
    assert not collectives(whole, "layers.1")
    fits = found(on_meta(llama, layers), arguments, memory=8e9)  # whole: 11 to 12 GB
    assert any(isinstance(spmd_type, Shard) for spmd_type in types_of(fits, r"layers.*_proj"))


def test_gpt2_gets_its_fused_queries_keys_and_values_cut_within_each():
    division = found(on_meta(gpt2_medium, 3), tokens(1, 1024))
    assert set(types_of(division, r"c_attn.weight")) == {S(1, stride=3)}
    assert set(types_of(division, r"c_fc.weight")) == {S(1)}
    assert set(types_of(division, r"c_proj.weight")) == {S(0)}
    assert collectives(division, "h.1") == {"all_reduce": 2}


@pytest.mark.parametrize(("batch", "weights"), [(8, {S(0), S(1)}), (64, {I})])
def test_vit_gets_columns_and_rows_for_few_images_and_the_batch_cut_for_many(batch, weights):
    division = found(on_meta(vit_huge, 3), images(batch))
    assert set(types_of(division, r"layers.*(proj|fc\d).weight")) == weights
    assert collectives(division, "layers.1") == ({"all_reduce": 2} if batch == 8 else {})


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, cos, sin):
        return self.layer(x, position_embeddings=(cos, sin))


def test_an_emitted_llama_block_issues_the_collectives_of_hf_swap(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=32,
    )  # fmt: skip
    cpu = ComputeConfig(2, 2, pas_config={"costs": "cpu"})

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    def rank():
        arguments = {"x": torch.ones(1, 8, 64, requires_grad=True), "cos": torch.ones(1, 8, 16)}
        arguments["sin"] = arguments["cos"]
        issued = []
        for block in (
            Block(hf.swap(model()).model.layers[0]),
            parallelize(Block(model().model.layers[0]), arguments, "tp", cpu, gen_savedir=tmp_path),
        ):
            with comm.record() as calls:
                block(**arguments).sum().backward()
            issued.append(Counter((call.verb, call.shape) for call in calls))
        return issued

    for swapped, emitted in threads.run(Mesh(2, tp=2), rank):
        assert emitted == swapped == {("all_reduce", (1, 8, 64)): 4}
    (source,) = tmp_path.rglob("gencode0.py")
    assert source.read_text().count("dst=I, inplace=True)") == 2  # of the outputs of o_proj and down_proj


def test_compiling_32_layers_takes_seconds():
    """CPU seconds; a call is recorded in less than 2 ms."""
    model, arguments = on_meta(llama, 32, torch.float32), tokens(1, 4096)

    start = time.process_time()
    program = decomposed(record_program(model, arguments, training=True))
    recorded = time.process_time()
    division = choose(program, "tp", 8, costs=H100)
    signature = inspect.signature(model.forward)
    source = emit(division, name="Llama", stored=stored_of(model, division), signature=signature)
    emitted = time.process_time()
    check_types(source, division, arguments)
    checked = time.process_time()
    assert len(program.calls) > 1700
    assert recorded - start < 2e-3 * len(program.calls)
    assert emitted - recorded < 1.5
    assert checked - emitted < 15
