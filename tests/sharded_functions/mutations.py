"""The smallest case for each collective call of `sharded_functions`: an AssertionError if the call is made wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm
from neuronx_dist.sharded_functions import norms
from neuronx_dist.sharded_functions.softmax import log_softmax
from tests.sharded_functions.shards import assert_like_whole, randn, shard

__all__ = [
    "entropy_of_shards",
    "linear_cross_entropy",
    "moments_of_shards",
    "rms_of_shards",
    "softmax_of_shards",
    "transformed_softmax_of_shards",
]


def softmax_of_shards() -> None:
    """Logits beyond what exp can take, the largest of them on one rank: the maximum has to be the whole row's."""
    logits = randn(6, 8) * 2000
    logits[3:] -= 5000.0
    logits[0, :4] += 3000.0
    assert_like_whole(lambda x: log_softmax(x, 1, axis="tp"), lambda x: torch.log_softmax(x, 1), logits, 1, (5, 3))


def transformed_softmax_of_shards() -> None:
    """Differentiates by `torch.func`, which takes the operators themselves instead of one node for all of them."""
    logits, weights = randn(3, 8), randn(3, 8, seed=3)
    (expected,) = torch.func.vjp(lambda x: torch.log_softmax(x, 1), logits)[1](weights)

    def rank() -> torch.Tensor:
        _, vjp = torch.func.vjp(lambda x: log_softmax(x, 1, axis="tp"), shard(logits, 1, (5, 3)))
        gradient: torch.Tensor = vjp(shard(weights, 1, (5, 3)))[0]
        return gradient

    joined = torch.cat(comm.threads.run(Mesh(2, tp=2), rank), 1)
    torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-12)


def moments_of_shards() -> None:
    ours = lambda x: norms.layer_norm(x, 1, axis="tp", count=8)  # noqa: E731
    assert_like_whole(ours, lambda x: F.layer_norm(x, (8,)), randn(3, 8).exp(), 1, (4, 4))


def rms_of_shards() -> None:
    ours = lambda x: norms.rms_norm(x, 1, axis="tp", count=8)  # noqa: E731
    assert_like_whole(ours, lambda x: F.rms_norm(x, (8,)), randn(3, 8), 1, (4, 4))


def entropy_of_shards() -> None:
    """The last class is padding, of which -inf and its gradient are no NaN."""
    whole = randn(3, 8)
    whole[:, -1] = -torch.inf
    whole.requires_grad_()
    expected = torch.distributions.Categorical(logits=whole[:, :-1]).entropy()
    expected.sum().backward()

    def rank_main() -> None:
        rank = comm.rank("tp")
        local = whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
        found = nxd.parallel_entropy(local)
        found.sum().backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(local.grad, whole.grad.chunk(2, -1)[rank], rtol=1e-10, atol=1e-10)

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def linear_cross_entropy(sequence: bool = False, transform: bool = False) -> None:
    """Logits beyond what exp can take, the largest of them on one rank; `transform`: the gradients of `torch.func`."""
    x, weight = 40 * randn(2, 4, 8), 40 * randn(6, 8)
    weight[:3] += 1.0
    labels = torch.tensor([[0, 5, 2, -100], [1, 4, 3, 0]])
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    expected = F.cross_entropy(F.linear(*leaves).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()

    def rank_main() -> None:
        rank, dim = comm.rank("tp"), 1 if sequence else None
        local = [x.chunk(2, 1)[rank] if sequence else x, weight.chunk(2)[rank]]

        def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return nxd.parallel_linear_cross_entropy(x, weight, labels, reduction="sum", sequence_dimension=dim)

        if transform:
            grads, value = torch.func.grad_and_value(loss, argnums=(0, 1))(*local)
        else:
            local = [leaf.clone().requires_grad_() for leaf in local]
            value = loss(*local)
            grads = torch.autograd.grad(value, local)
        whole_x, whole_weight = (leaf.grad for leaf in leaves)
        wanted = [whole_x.chunk(2, 1)[rank] if sequence else whole_x, whole_weight.chunk(2)[rank]]
        for found, right in zip((value, *grads), (expected, *wanted), strict=True):
            torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-9, atol=1e-9)

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)
