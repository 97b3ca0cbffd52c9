"""`random_numbers("part")`: ranks with one part agree, others differ, and no rank draws more than its part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from neuronx_dist import shard_tensor
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_tensor, random_numbers
from neuronx_dist.shard_tensor.attention_method import attention_method
from neuronx_dist.shard_tensor.draws import drawn_between

PARTS = [Replicate(), Shard(0)]
SIZES = [None, (5, 2)]
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 3), 0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "randn_like": torch.randn_like,
    "randn": lambda x: shard_tensor.randn(7, 40, device_mesh=x.device_mesh, placements=PARTS, sizes=SIZES),
    "of a generator": lambda x: x.clone().uniform_(generator=torch.Generator().manual_seed(1)),
}


class _Largest(TorchDispatchMode):
    """The number of elements of the largest plain tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


def on_grid(function):
    return threads.run(Mesh(world_size=4), lambda: function(DeviceMesh("cpu", [[0, 1], [2, 3]])))


@pytest.mark.parametrize("draw", DRAWS)
def test_a_rank_draws_its_part(draw):
    def rank(mesh):
        torch.manual_seed(4)
        x = distribute_tensor(torch.ones(7, 40), mesh, PARTS, sizes=SIZES)
        with random_numbers("part"), _Largest() as largest:
            y = DRAWS[draw](x)
        return y.to_local(), torch.rand(1), largest.elements / y.to_local().numel()

    results = on_grid(rank)
    parts = [part for part, _, _ in results]
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
    assert not torch.equal(parts[0][:2], parts[1])
    assert len({following.item() for _, following, _ in results}) == 1  # default streams are at one position
    assert max(share for _, _, share in results) == 1


@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
def test_attention_draws_the_noise_of_its_weights(method):
    """Equal scores, and the identity as values: the result is the noise, divided by the number of keys."""
    p, n = 0.25, 64

    def rank(mesh):
        torch.manual_seed(4)
        q = torch.zeros(1, 2, n, n, dtype=torch.float64)
        q, k, v = (
            distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
            for x in (q, q, torch.eye(n, dtype=q.dtype).expand_as(q))
        )
        with random_numbers("part"), attention_method(method):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        y.sum().backward()
        return y.full_tensor().detach() * n * (1 - p), v.grad.full_tensor()

    noise, gradient = threads.run(Mesh(world_size=2), lambda: rank(DeviceMesh("cpu", range(2))))[0]
    assert torch.allclose(noise, noise.round(), atol=1e-12) and set(noise.round().unique().tolist()) == {0, 1}
    assert torch.allclose(gradient, (noise.sum(2) / (n * (1 - p)))[..., None].expand_as(gradient))
    shares = noise.view(2, 2, n // 2, 2, n // 2).mean((2, 4)).flatten()  # of heads and blocks
    assert (shares - (1 - p)).abs().max() < 5 * (p * (1 - p) / (n // 2) ** 2) ** 0.5
    assert not torch.equal(noise[0, 0], noise[0, 1]) and not torch.equal(noise[0, :, : n // 2], noise[0, :, n // 2 :])


def test_a_checkpointed_layer_draws_again():
    def rank(mesh):
        torch.manual_seed(4)
        x = distribute_tensor(torch.ones(7, 40), mesh, PARTS, sizes=SIZES).requires_grad_()
        with random_numbers("part"):
            y = checkpoint(lambda x: F.dropout(x * x, 0.5), x, use_reentrant=False)
            y.sum().backward()
        return torch.equal(x.grad.to_local(), 2 * y.to_local())

    assert all(on_grid(rank))


def test_bounds_that_differ_by_two_to_the_32():
    numbers = []
    for start in (0, 2**32):
        torch.manual_seed(4)
        with random_numbers("part"):
            numbers.append(drawn_between(torch.rand, (2**33,), [(start, start + 9)]))
    assert not torch.equal(*numbers)
