"""Values of ShardTensors written into plain tensors, as Fourier layers and running losses do: they are gathered."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor, fallback, promotion_mode, report
from tests.shard_tensor.support.cases import assert_close, on_ranks


def modes(x, buffer):
    buffer[:, 1:4] = x[:, :3]
    return buffer


def added(x, buffer):
    return buffer.add_(x, alpha=2)


def copied(x, buffer):
    return buffer.copy_(x)


def scattered(x, buffer):
    return buffer.scatter_add_(0, torch.tensor([[1, 0, 3, 2]]), x[:1])


def augmented(x, buffer):
    buffer += x.mean(0)
    return buffer


WRITES = [modes, added, copied, scattered, augmented]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_write_into_a_plain_tensor(write, dim):
    values = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)

    def computed(x):
        buffer = write(x * 3, torch.ones(5, 4, dtype=torch.float64))
        return buffer, (buffer * x.square()).sum()

    expected = values.clone().requires_grad_()
    buffer, loss = computed(expected)
    loss.backward()

    def run(mesh):
        sizes = [(5, 0) if dim == 0 else (1, 3)]
        x = distribute_tensor(values.clone().requires_grad_(), mesh, [Shard(dim)], sizes=sizes, src=None)
        with report() as r:
            written, total = computed(x)
        assert type(written) is torch.Tensor and (write is augmented or r.gathers)
        assert_close(written.detach(), buffer.detach(), "values")
        total.backward()
        assert_close(x.grad.full_tensor(), expected.grad, "gradient")

    on_ranks(2, run)


@pytest.mark.parametrize("write", [modes, added, copied, scattered])
def test_it_is_refused_where_gathers_are(write):
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)], src=None)
        buffer = torch.zeros(5, 4)
        with fallback("error"), pytest.raises(NotImplementedError, match=r"they would be gathered .* distribute it"):
            write(x, buffer)
        with promotion_mode("disabled"), pytest.raises(ValueError, match="a plain tensor of shape"):
            write(x, buffer)
        assert not buffer.any()
        replicated = x.redistribute(placements=[Replicate()])
        with fallback("error"), report() as r:
            write(replicated, buffer)
        assert r.calls == [] and buffer.any()

    on_ranks(2, run)
