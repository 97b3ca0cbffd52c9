"""A run on packed rows, saved and resumed at another dp size: losses and weights of one process without a break."""

from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import hf
from neuronx_dist.comm.backends import threads
from neuronx_dist.data import DataParallelBatchSampler, pack
from neuronx_dist.optimizer import NeuronZero1Optimizer
from tests.support.llama import tiny_llama
from tests.support.llama_training import distance, without_float32_inside

GLOBAL, STEPS = 8, 6
INPUTS = ["input_ids", "labels", "position_ids", "num_items_in_batch"]


def rows() -> Any:
    documents = [[(7 * i + n) % 32 for i in range(2 + n % 11)] for n in range(66)]
    return datasets.Dataset.from_dict({"input_ids": documents}).map(partial(pack, length=16), batched=True)


def train(folder: Path, data: Any, begin: int, end: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps `begin` to `end` on this rank, from the checkpoint of step `begin`; saves after the last one."""
    nxd.model_parallel_manual_seed(0)
    config = tiny_llama(num_hidden_layers=2, vocab_size=32, use_cache=False)
    torch.manual_seed(0)
    module = hf.swap(without_float32_inside(LlamaForCausalLM(config).double(), torch.float64))
    options = dict(input_names=INPUTS, output_loss_value_spec={"loss": True, "logits": False}, auto_partition=True)
    model = nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=2,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=True,
        **options,
    )
    params = [param for param in model.local_parameters() if param.requires_grad]
    optimizer = NeuronZero1Optimizer(params, torch.optim.AdamW, lr=1e-2)
    loader: Any = StatefulDataLoader(
        data.with_format("torch"), batch_sampler=DataParallelBatchSampler(data, GLOBAL, seed=5, last="drop")
    )
    if begin:
        loader.load_state_dict(nxd.load_checkpoint(folder, f"step_{begin}", model, optimizer)["loader"])
    losses = []
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for _ in range(begin, end):
        part = nxd.get_batch_on_this_context_parallel_rank(next(batches), balance="zigzag")
        loss = model.run_train(**part, num_items_in_batch=nxd.global_num_items(part["labels"], 2))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    nxd.save_checkpoint(folder, f"step_{end}", model, optimizer, user_content={"loader": loader.state_dict()})
    return losses, hf.full_state_dict(model)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_continues_exactly(tmp_path: Path) -> None:
    """Six steps over more than an epoch, in one piece, and in two: at dp 4, then at dp 2, pp 2."""
    data = rows()
    assert 3 * GLOBAL < len(data) < 4 * GLOBAL  # epochs of three steps, with rows left out
    expected, weights = threads.run(nxd.Mesh(1), train, tmp_path / "whole", data, 0, STEPS)[0]
    assert len({*expected}) == STEPS and expected[-1] < expected[0]
    pieces = [(nxd.Mesh(4), 0, 4), (nxd.Mesh(4, pp=2), 4, STEPS)]
    losses: list[float] = []
    for mesh, begin, end in pieces:
        results = threads.run(mesh, train, tmp_path / "pieces", data, begin, end)
        assert all(distance(found, results[0][0]) < 1e-12 for found, _ in results)
        losses += results[0][0]
    assert distance(losses, expected) < 1e-10
    for name, weight in weights.items():
        assert distance(results[0][1][name], weight) < 1e-10, name
