"""Models that no installed package has, written as for one device: values and gradients, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, Shard, distribute_module, distribute_tensor, fallback
from tests.shard_tensor.support.cases import assert_close, on_ranks

Forward = Callable[[nn.ModuleDict, torch.Tensor], torch.Tensor]


def wavenet(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Gated causal convolutions of `x` [batch, channels, time], with dilations and skips."""
    skips = 0
    for dilation in (1, 2, 4):
        padded = F.pad(x, (dilation, 0))
        gate = torch.sigmoid(F.conv1d(padded, layers["gate"].weight, dilation=dilation))
        y = torch.tanh(F.conv1d(padded, layers["filter"].weight, dilation=dilation)) * gate
        skips = skips + y
        x = x + layers["mix"](y)
    return F.relu(skips)


def deeponet(layers: nn.ModuleDict, points: torch.Tensor) -> torch.Tensor:
    """Values of operators at `points` [points, 2]: a branch of sensors, replicated, and a trunk."""
    sensors = torch.linspace(-1, 1, 15, dtype=points.dtype).view(3, 5)
    return torch.einsum("fk,pk->fp", layers["branch"](sensors), torch.tanh(layers["trunk"](points)))


def dgcnn(layers: nn.ModuleDict, points: torch.Tensor) -> torch.Tensor:
    """Edge convolution of `points` [points, 3] over their 3 nearest neighbours."""
    distances = (points[:, None] - points[None]).square().sum(-1)
    nearest = distances.topk(3, 1, largest=False)[1]
    neighbours = points[nearest]
    centre = points[:, None].expand(-1, 3, -1)
    return F.relu(layers["edge"](torch.cat([centre, neighbours - centre], -1))).amax(1)


def graphcast(layers: nn.ModuleDict, nodes: torch.Tensor) -> torch.Tensor:
    """Messages along edges, summed at their ends; `nodes` are [nodes, features]."""
    count = nodes.shape[0]
    sources = torch.arange(2 * count) % count
    targets = (torch.arange(2 * count) * 3 + 1) % count
    for _ in range(2):
        messages = F.silu(layers["message"](torch.cat([nodes[sources], nodes[targets]], -1)))
        nodes = nodes + torch.zeros_like(nodes).index_add(0, targets, messages)
    return F.layer_norm(nodes, nodes.shape[-1:])


def neighbourhood(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Attention of each position of `x` [positions, features] to 5 around it, as NATTEN's, by windows of keys."""
    q, k, v = layers["qkv"](x).chunk(3, -1)
    keys, values = (F.pad(each, (0, 0, 2, 2)).unfold(0, 5, 1) for each in (k, v))  # [positions, features, 5]
    weights = torch.softmax((q.unsqueeze(-1) * keys).sum(1), -1)
    return (values * weights.unsqueeze(1)).sum(-1)


def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({
        "gate": nn.Conv1d(4, 4, 2, bias=False), "filter": nn.Conv1d(4, 4, 2, bias=False), "mix": nn.Conv1d(4, 4, 1),
        "branch": nn.Linear(5, 6), "trunk": nn.Linear(2, 6), "edge": nn.Linear(6, 4), "message": nn.Linear(8, 4),
        "qkv": nn.Linear(4, 12),
    }).double()  # fmt: skip


MODELS: dict[str, tuple[Forward, tuple[int, ...], int]] = {
    "WaveNet": (wavenet, (2, 4, 12), 2),
    "DeepONet": (deeponet, (12, 2), 0),
    "DGCNN": (dgcnn, (12, 3), 0),
    "GraphCast": (graphcast, (12, 4), 0),
    "neighbourhood attention": (neighbourhood, (12, 4), 0),
}


@pytest.mark.parametrize("sizes", [(7, 5), (8, 0, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, sizes: tuple[int, ...]) -> None:
    forward, shape, dim = MODELS[name]
    twin = layers()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    expected = forward(twin, whole)
    expected.square().sum().backward()

    def rank(mesh: DeviceMesh) -> None:
        model = distribute_module(layers(), mesh)
        x = distribute_tensor(whole.detach(), mesh, [Shard(dim)], sizes=[sizes], src=None).requires_grad_()
        with fallback("error"):
            y = forward(model, x)
            y.square().sum().backward()
        assert_close(y.full_tensor().detach(), expected.detach(), name)
        assert_close(x.grad.full_tensor(), whole.grad, "gradient of the input")
        for (key, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            if other.grad is not None:
                grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
                assert_close(grad, other.grad, f"gradient of {key}")

    on_ranks(len(sizes), rank)


def test_a_neighbourhood_is_a_halo() -> None:
    def rank(mesh: DeviceMesh) -> list[comm.Call]:
        model = distribute_module(layers(), mesh)
        x = distribute_tensor(torch.ones(40, 4, dtype=torch.float64), mesh, [Shard(0)], sizes=[(23, 17)], src=None)
        with comm.record() as calls, torch.no_grad():
            neighbourhood(model, x)
        return calls

    for calls in on_ranks(2, rank):
        assert [call.verb for call in calls] == ["exchange"] * 3
        assert all(call.bytes <= 4 * 4 * 8 for call in calls)  # 4 rows of 4 features, whatever the shards' sizes
