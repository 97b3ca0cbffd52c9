"""Programs that call composites: trained, checked, and equal to one process; the choice takes them where they pay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.parity import assert_equal, trained, trained_parallel

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Words(nn.Module):
    """Tied embedding and head, attention by hand, layer and rms norm, cross entropy with ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=1)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + (x @ x.mT).softmax(-1) @ x
        logits = self.head(self.rms(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


class Images(nn.Module):
    """Batch norm with running statistics, group norm, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)

    def forward(self, image: Tensor) -> Tensor:
        x = self.group(self.batch(self.conv(image)).relu())
        return -x.log_softmax(1)[:, 0].sum() / 128


def words() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Words().double(), {"ids": torch.randint(16, (4, 8)), "labels": torch.randint(16, (4, 8))}


def images() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Images().double(), {"image": torch.rand(4, 3, 8, 4, dtype=torch.float64)}


class Taken:
    """A policy: every call that has one of these composites is run by it, cut along a dim of an operand."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.chosen: list[str] = []

    def __call__(self, graph: Any, config: ComputeConfig) -> Any:
        for node in graph.operations:
            wanted = [s for s in graph.strategies(node) if s.name in self.names]
            if wanted:
                self.chosen += [wanted[0].name]
                allowed = {one.name for one in wanted[:1]}
                graph.constraints.strategies.setdefault(node.call, []).append(lambda s, names=allowed: s.name in names)
        return graph


PROGRAMS: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (
        words,
        (
            "embedding of S(0) of operand 1",
            "layer_norm of S(2) of operand 0",
            "softmax of S(2) of operand 0",
            "rms_norm of S(2) of operand 0",
            "cross_entropy of S(1) of operand 0",
        ),
    ),
    (
        images,
        ("batch_norm of S(0) of operand 0", "group_norm of S(2) of operand 0", "log_softmax of S(1) of operand 0"),
    ),
    (images, ("batch_norm_of_channels of S(1) of operand 0", "log_softmax of S(1) of operand 0")),
]


@pytest.mark.parametrize("make, names", PROGRAMS)
def test_trained(make: Callable[[], Any], names: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, every gradient, weights and buffers after 3 steps, float64 at 1e-10; `spmd.check` passes on the way."""
    module, arguments = make()
    config, policy = ComputeConfig(2, 2), Taken(*names)
    wanted = trained(module, arguments, SGD, 3, 1)
    has = trained_parallel(module, arguments, SGD, 3, config, policy, tmp_path)
    assert set(policy.chosen) == set(names)
    assert_equal(has, wanted, 1e-10)
    (source,) = tmp_path.rglob("gencode0.py")
    for name in names:
        assert f"composites.{name.split()[0]}(" in source.read_text()


class Synchronised(nn.Module):
    """A batch norm that torch has converted to `nn.SyncBatchNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 1)
        nn.SyncBatchNorm.convert_sync_batchnorm(self)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(image)).relu())


@pytest.mark.parametrize(
    "taken",
    [
        "",
        pytest.param("batch_norm of S(0) of operand 0", marks=pytest.mark.full),
        "batch_norm_of_channels of S(1) of operand 0",
    ],
)
def test_batch_norm_over_units(taken: str, tmp_path: Path) -> None:
    """Two units of 1 and 2 ranks: results, gradients and statistics of one process over the batch of both."""
    torch.manual_seed(0)
    module, tp = Synchronised().double(), 2 if taken else 1
    images, weights = torch.randn(2, 4, 3, 4, 4).double() * 2 + 3, torch.randn(2, 4, 4, 4, 4).double()

    def step(module: nn.Module, optimizer: Any, image: Tensor, weight: Tensor) -> dict[str, Tensor]:
        image = image.clone().requires_grad_()
        optimizer.zero_grad()
        result = module(image)
        (result * weight).sum().backward()
        optimizer.step()
        named = module.named_parameters()
        gradients = {name: gather_full(x.grad, spec_of(x)) for name, x in named if x.grad is not None}
        assert image.grad is not None
        return {"result": result, "gradient": image.grad, **gradients, **dict(module.named_buffers())}

    def rank() -> tuple[int, dict[str, Tensor]]:
        policy = Taken(taken) if taken else "dp"
        parallel: Any = parallelize(
            module, {"image": images[0]}, policy, ComputeConfig(tp, 2 * tp), gen_savedir=tmp_path
        )
        assert f"composites.{(taken or 'batch_norm').split()[0]}(" in parallel.SOURCE and "units" in parallel.SOURCE
        assert "batch norm takes its statistics" not in parallel.PROOF
        optimizer, unit = build_optimizer(parallel, SGD), comm.rank("dp")
        for _ in range(2):
            found = step(parallel, optimizer, images[unit], weights[unit])
        return unit, found

    ranks = threads.run(Mesh(2 * tp, tp=tp), rank)
    optimizer = SGD(module.parameters())
    for _ in range(2):
        wanted = step(module, optimizer, images.flatten(0, 1), weights.flatten(0, 1))
    for unit, found in ranks:
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            x = x.unflatten(0, (2, -1))[unit] if name in ("result", "gradient") else x
            torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=name)
