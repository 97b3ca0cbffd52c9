"""Hand-written data-parallel loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, reduce_gradients
from tests.checking.user_programs.support import normal, programs

REGRESSION = dict(x=normal(8, 4), y=normal(8, 1))


@programs(
    mesh={"dp": 2},
    inputs=REGRESSION,
    bugs={"not_divided": "the gradients of a mean loss are summed over dp and not divided by its size"},
)
def all_reduce_by_hand(bug):
    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if bug != "not_divided":
                p.grad = p.grad / comm.size("dp")
        optimizer.step()
        optimizer.zero_grad()

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)
