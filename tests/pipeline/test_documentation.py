"""Every python block of docs/pipelines.md runs, in the order of the page."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.support.llama import tiny_llama
from tests.support.paths import ROOT
from tests.support.pipeline_models import Block, Model, batch


def test_the_blocks_of_the_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pipelines.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"Model": Model, "Block": Block, "batch": batch()}
    with comm.as_rank(Mesh(1), 0):
        for number, block in enumerate(blocks):
            others = llama() if "nxd.recompute(" in block else {}
            exec(compile(block, f"docs/pipelines.md, block {number}", "exec"), {**names, **others} if others else names)
    assert "pipeline" in dir(nxd)
    assert len(blocks) == 9 and torch.isfinite(names["loss"]) and len(names["outputs"]) == 4


def llama() -> dict[str, Any]:
    """Names of the block on recomputation, whose words are those of a Llama."""
    module = LlamaForCausalLM(tiny_llama(num_hidden_layers=4))
    options = dict(num_microbatches=2, output_loss_value_spec={"loss": True, "logits": False}, auto_partition=True)
    model = nxd.NxDPPModel(module, transformer_layer_cls=LlamaDecoderLayer, **options)
    ids = torch.randint(0, module.config.vocab_size, (4, 8))
    return {"model": model, "batch": {"input_ids": ids, "labels": ids}, "MyBlock": LlamaDecoderLayer}
