"""Uses of parameters under ZeRO-1: twice, on some ranks only, in few rows; and very small parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.optimizer.test_sharding import parts
from tests.optimizer.zero1_training import OPTIMIZERS, weights_of
from tests.support.synthetic import relative_error

VOCABULARY, HIDDEN, STEPS = 11, 3, 6


class Net(nn.Module):
    """A tied embedding and head, two experts of which each batch uses one, and parameters of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.head.weight = self.embedding.weight
        self.gain, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.double()
        generator = torch.Generator().manual_seed(0)  # its own: ranks are threads, which share torch's
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(generator=generator)

    def forward(self, ids: torch.Tensor, expert: int) -> torch.Tensor:
        x = self.experts[expert](self.embedding(ids)) * self.gain + self.bias
        return F.cross_entropy(self.head(x), ids.roll(1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, int]:
    """Few of the rows, and one of the experts: the second one only on rank 1, and only in odd steps."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY // 2, (4,), generator=generator), int(rank == 1 and step % 2 == 1)


def train_whole(optimizer: str, ranks: int) -> dict[str, torch.Tensor]:
    model = Net()
    cls, options = OPTIMIZERS[optimizer]
    reference = cls(model.parameters(), **options)
    for step in range(STEPS):
        reference.zero_grad()
        for rank in range(ranks):
            (model(*batch(step, rank)) / ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
    return weights_of(model)


@pytest.mark.each_pair
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["zero1", "pairs", "masters", "main_grad"])
@pytest.mark.parametrize("dp", [2, 4])
def test_training_is_that_of_one_process(dp: int, way: str, optimizer: str) -> None:
    """Tied in one stage; unused in a step on all ranks but one, or on all; smaller than dp; most rows without use."""
    cls, options = OPTIMIZERS[optimizer]

    def rank_main() -> dict[str, torch.Tensor]:
        model = Net()
        arguments: dict[str, Any] = dict(max_norm=0.5, use_grad_acc_hook=way == "main_grad", **options)
        if way == "pairs":
            arguments["sharding_groups"] = parts(2)(Mesh(dp))
        wrapper = MasterWeightsOptimizer if way == "masters" else NeuronZero1Optimizer
        zero1 = wrapper(model.parameters(), cls, **arguments)
        for step in range(STEPS):
            zero1.zero_grad()
            model(*batch(step, comm.rank("dp"))).backward()
            grads.reduce_gradients(model, average_over_data=way == "masters")
            zero1.step()
        return weights_of(model)

    expected = train_whole(optimizer, dp)
    assert not torch.equal(expected["experts.1.weight"], Net().experts[1].weight)
    for weights in comm.threads.run(Mesh(dp), rank_main):
        for name, value in weights.items():
            assert relative_error(value, expected[name]) < 1e-10, name
        assert torch.equal(weights["unused.weight"], Net().unused.weight)  # not decayed


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
def test_sparse_gradients_are_refused_by_name(wrapper: Any) -> None:
    def rank_main() -> None:
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = wrapper(model.parameters(), torch.optim.SGD, lr=1.0)
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"\(4, 2\) is sparse.*sparse=False"):
            optimizer.step()

    comm.threads.run(Mesh(2), rank_main)
