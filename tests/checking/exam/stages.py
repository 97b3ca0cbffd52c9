"""Norms over pipeline stages, with a table that two stages hold (item 8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.checking.exam.support import pair
from tests.checking.user_programs.support import integers

TOKENS = dict(ids=integers(12, 4, 6), labels=integers(12, 4, 6))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + F.gelu(self.linear(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pair(
    "8 tied table",
    mesh={"pp": 2, "dp": 2},
    inputs=TOKENS,
    bugs={
        "twice": "the table of the first stage and that of the last one are both counted",
        "own": "each stage clips by the norm of its own gradients",
    },
)
def norm_over_stages(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model.run_train(**batch)
        squares, params = torch.zeros(()), [p for _, p in model.local_named_parameters()]
        for p in params:
            is_table = tuple(p.shape) == (12, 8)
            if not is_table or bug or comm.rank("pp") == 0:
                squares = squares + p.grad.square().sum()
        if bug != "own":
            squares = comm.all_reduce(squares, "pp")
        factor = (0.1 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in params:
            p.grad.mul_(factor)
        optimizer.step()

    def model_fn():
        return nxd.NxDPPModel(
            Tied().to(torch.get_default_dtype()),
            transformer_layer_cls=Block,
            num_microbatches=2,
            auto_partition=True,
            input_names=["ids", "labels"],
            output_loss_value_spec=True,
        )

    return dict(model_fn=model_fn, step=step)
