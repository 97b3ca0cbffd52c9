"""A model written by hand with the parallel layers, biases and all, beside the same model of torch's own layers."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import ShardSpec, set_spec
from tests.support.llama_training import IGNORED, SEQ, VOCAB, Report, batch, differences, mean_loss

pytestmark = pytest.mark.slow

HIDDEN, STEPS, MICROBATCHES = 12, 5, 2
TOLERANCE = 1e-10


class Block(nn.Module):
    """`x + down(dropout(gelu(up(norm(x)))))`, the first linear layer fused from two."""

    def __init__(self, sequence_parallel: bool, whole_inputs: bool) -> None:
        super().__init__()
        sp: dict[str, Any] = dict(sequence_parallel_enabled=sequence_parallel)
        self.norm = nxd.LayerNorm(HIDDEN, dtype=torch.float64, **sp)
        # Upstream's defaults gather between the layers and split again: slow, and to be right as well.
        self.up = nxd.ColumnParallelLinear(HIDDEN, 32, bias=True, gather_output=whole_inputs, dtype=torch.float64, **sp)
        self.dropout = nn.Dropout(0.0)
        self.down = nxd.RowParallelLinear(
            32, HIDDEN, bias=True, input_is_parallel=not whole_inputs, dtype=torch.float64, **sp
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Positions are a parameter of the model itself; a skip leads from the first block to the last, over stages.

    Activations are `[seq, batch, hidden]`, sharded on seq under sequence parallelism, as in Megatron and upstream.
    """

    def __init__(
        self, sequence_parallel: bool = False, shard_across_embedding: bool = False, whole_inputs: bool = False
    ) -> None:
        super().__init__()
        sp: dict[str, Any] = dict(sequence_parallel_enabled=sequence_parallel)
        self.sequence_parallel = sequence_parallel
        self.embed = nxd.ParallelEmbedding(
            VOCAB, HIDDEN, padding_idx=3, dtype=torch.float64, shard_across_embedding=shard_across_embedding, **sp
        )
        self.position = nn.Parameter(torch.zeros(SEQ, 1, HIDDEN, dtype=torch.float64))
        if sequence_parallel:  # each rank uses its own rows of it
            set_spec(self, "position", ShardSpec(full_shape=(SEQ, 1, HIDDEN), sequence_parallel=True))
        self.blocks = nn.ModuleList(Block(sequence_parallel, whole_inputs) for _ in range(4))
        self.norm = nxd.LayerNorm(HIDDEN, dtype=torch.float64, **sp)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=True, gather_output=False, dtype=torch.float64, **sp)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        position = self.position
        if self.sequence_parallel:
            size = x.shape[0]
            position = position.narrow(0, comm.rank("tp") * size, size)
        else:
            x = x.transpose(0, 1)
        first = x = self.blocks[0](x + position)
        for block in self.blocks[1:3]:
            x = block(x)
        x = self.blocks[3](x + first)
        logits = self.head(self.norm(x)).transpose(0, 1)
        losses = nxd.parallel_cross_entropy(logits[:, :-1].contiguous(), labels[:, 1:], ignore_index=IGNORED)
        return losses.sum() / items


class Plain(nn.Module):
    """The same of torch's layers, `[batch, seq, hidden]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.position = nn.Parameter(torch.zeros(SEQ, 1, HIDDEN))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "up": nn.Linear(HIDDEN, 32), "down": nn.Linear(32, HIDDEN)})
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def run(block: Any, x: torch.Tensor) -> torch.Tensor:
            return x + block["down"](F.gelu(block["up"](block["norm"](x))))

        first = x = run(self.blocks[0], self.embed(ids) + self.position.transpose(0, 1))
        for block in list(self.blocks)[1:3]:
            x = run(block, x)
        return self.head(self.norm(run(self.blocks[3], x + first)))


@functools.lru_cache(maxsize=1)
def plain_model() -> Plain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Plain().double()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.2)
            model.embed.weight[3] = 0.0
    return model


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


@functools.lru_cache(maxsize=1)
def reference() -> Report:
    model = copy.deepcopy(plain_model())
    optimizer = optimizer_of(model.parameters())
    report = Report([], [], {}, {})
    for step in range(STEPS):
        ids, labels = batch("uneven", step)
        loss = mean_loss(model(ids), labels)
        loss.backward()
        report.losses.append(float(loss.detach()))
        report.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        report.gradients[step] = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    report.weights = {name: param.detach() for name, param in model.named_parameters()}
    return report


def train(state: dict[str, torch.Tensor], model_options: dict[str, Any]) -> Report:
    with torch.device("meta"):
        module = Model(**model_options)
    model = nxd.NxDPPModel(
        module,
        transformer_layer_cls=Block,
        num_microbatches=MICROBATCHES,
        output_loss_value_spec=True,
        broadcast_and_average_loss=True,
        auto_partition=comm.size("pp") > 1,
    )
    hf.load_pretrained(model, state)
    params = list(model.local_parameters())
    optimizer = optimizer_of(params)
    report = Report([], [], {}, {})
    for step in range(STEPS):
        ids, labels = (rows.chunk(comm.size("dp"))[comm.rank("dp")] for rows in batch("uneven", step))
        items = nxd.global_num_items(labels, MICROBATCHES, dtype=torch.float64)
        report.losses.append(float(model.run_train(ids=ids, labels=labels, items=items)))
        report.norms.append(float(nxd.clip_grad_norm(params, math.inf)))
        report.gradients[step] = hf.full_state_dict(model, gradients=True)
        optimizer.step()
        optimizer.zero_grad()
    report.weights = hf.full_state_dict(model)
    return report


@pytest.mark.each_value
@pytest.mark.parametrize(
    "model_options",
    [
        {},
        {"sequence_parallel": True},
        {"shard_across_embedding": True},
        {"shard_across_embedding": True, "sequence_parallel": True},
        {"whole_inputs": True},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(8, tp=2, pp=2), Mesh(4, tp=4)], ids=str)
def test_as_one_process(mesh: Mesh, model_options: dict[str, Any]) -> None:
    state = plain_model().state_dict()
    for rank, report in enumerate(comm.threads.run(mesh, train, state, model_options)):
        for what, value in differences(report, reference()).items():
            assert value < TOLERANCE, (rank, what, value)
