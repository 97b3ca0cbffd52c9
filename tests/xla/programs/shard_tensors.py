"""ShardTensors as the replayed ranks run them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor


def sharded(x: torch.Tensor, dim: int | None) -> ShardTensor:
    mesh = DeviceMesh.from_axes("tp", device_type=x.device.type)
    placement = Replicate() if dim is None else Shard(dim)
    return ShardTensor.from_local(x, mesh, [placement], sharding_shapes="chunk")


def pointwise_and_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear layer of shards of rows, an activation, a mean; gradients of the weights are reduced."""
    y = torch.tanh(F.linear(sharded(x, 0), sharded(w, None), sharded(b, None)) * 2.0)
    loss = y.square().mean()
    loss.backward()
    return {"y": y.to_local().detach(), "loss": loss.full_tensor().detach(), "x": x.grad, "w": w.grad, "b": b.grad}


def redistributed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = sharded(x, 0)
    whole = y.full_tensor()
    (whole * whole).sum().backward()
    return {"whole": whole.detach(), "x": x.grad}


def convolutions(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Halos of both neighbours, of one row and two."""
    h = torch.tanh(F.conv2d(sharded(x, 2), sharded(w, None), padding=1))
    y = F.conv2d(h, sharded(v, None), padding=(2, 1), dilation=(2, 1))
    y.square().mean().backward()
    return {"y": y.to_local().detach(), "x": x.grad, "w": w.grad, "v": v.grad}


def pools(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Halos of maxima and of means, with padding that counts and that does not; windows that meet no bound."""
    h = F.max_pool2d(sharded(x, 2), 3, 1, 1)
    h = F.avg_pool2d(h, 3, 1, 1) + F.avg_pool2d(h, 3, 1, 1, count_include_pad=False)
    y = F.avg_pool2d(F.max_pool2d(h, (2, 1)), (2, 1))
    y.square().sum().backward()
    return {"h": h.to_local().detach(), "y": y.to_local().detach(), "x": x.grad}


def rolled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = sharded(x, 0).roll(1, 0).flip(0)
    (y * y).sum().backward()
    return {"y": y.to_local().detach(), "x": x.grad}


def uneven(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": F.conv1d(sharded(x, 2), torch.ones(1, 1, 2, device=x.device)).to_local()}
