"""Random streams: what agrees across ranks, what differs, and that recomputation draws the same again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import random

KEEP = 64


def masks() -> dict[str, list[float]]:
    random.model_parallel_manual_seed(17)
    x = torch.ones(KEEP)
    found = {"default": F.dropout(x, 0.5).tolist()}
    with random.get_rng_tracker().fork():
        found["tp"] = F.dropout(x, 0.5).tolist()
    found["default again"] = F.dropout(x, 0.5).tolist()
    with random.get_rng_tracker().fork():
        found["tp again"] = F.dropout(x, 0.5).tolist()
    torch.manual_seed(17)
    reference = [F.dropout(x, 0.5).tolist() for _ in range(2)]
    assert [found["default"], found["default again"]] == reference, "the fork does not move the default stream"
    torch.manual_seed(17 + 2718 + comm.rank("tp"))  # NxD's seeds
    reference = [F.dropout(x, 0.5).tolist() for _ in range(2)]
    assert [found["tp"], found["tp again"]] == reference, "the stream goes on where it stopped"
    return found


def test_dropout_agrees_in_the_default_stream_and_differs_in_the_tensor_parallel_one():
    ranks = comm.threads.run(Mesh(4, tp=2), masks)
    assert all(found["default"] == ranks[0]["default"] for found in ranks)
    assert all(found["default again"] == ranks[0]["default again"] for found in ranks)
    for draw in ("tp", "tp again"):
        assert ranks[0][draw] == ranks[2][draw] and ranks[1][draw] == ranks[3][draw]  # dp replicas agree
        assert ranks[0][draw] != ranks[1][draw]
    assert ranks[0]["tp"] != ranks[0]["tp again"]


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = F.dropout(x * weight, 0.5)
    with random.get_rng_tracker().fork():
        x = F.dropout(x, 0.5)
    x = F.dropout(x + weight, 0.25)
    with random.get_rng_tracker().fork():
        return F.dropout(x, 0.25) * weight


def recomputed(nested: bool) -> bool:
    grads, draws = [], []
    for run in (lambda f, *a: f(*a), random.checkpoint):
        random.model_parallel_manual_seed(5)
        weight = torch.ones(KEEP, requires_grad=True)
        x = torch.ones(KEEP)
        for _ in range(3):  # several blocks: each is recomputed with its own numbers
            x = run(block, x, weight)
        if nested:
            x = run(lambda y, w: run(block, y, w) + F.dropout(w, 0.5), x, weight)  # noqa: B023
        x.sum().backward()
        grads.append(weight.grad)
        with random.get_rng_tracker().fork():  # recomputing has moved neither stream
            draws.append((torch.rand(4), torch.get_rng_state()))
        draws[-1] = (draws[-1][0], torch.rand(4))
    return torch.equal(*grads) and all(torch.equal(a, b) for a, b in zip(*draws))


@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_draws_the_same_numbers(nested):
    assert comm.threads.run(Mesh(2, tp=2), recomputed, nested) == [True, True]


def test_streams_by_name():
    with comm.as_rank(Mesh(2, tp=2), 1):
        tracker = random.get_xla_rng_tracker()
        assert tracker is random.get_rng_tracker() and isinstance(tracker, random.XLARNGStatesTracker)
        with pytest.raises(ValueError, match="model_parallel_manual_seed"), tracker.fork():
            pass
        before = torch.get_rng_state()
        tracker.add("mine", 3)
        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(ValueError, match="'mine' already exists"):
            tracker.add("mine", 4)
        states = tracker.get_states()
        with tracker.fork("mine"):
            first = torch.rand(3)
        tracker.set_states(states)
        with tracker.fork("mine"):
            assert torch.equal(torch.rand(3), first)
        with pytest.raises(ZeroDivisionError), tracker.fork("mine"):
            raise ZeroDivisionError
        assert torch.equal(before, torch.get_rng_state())
        tracker.reset()
        assert not tracker.get_states()
        random.model_parallel_xla_manual_seed(1)
        random.model_parallel_xla_manual_seed(1)  # again: forgets what was there
        assert list(tracker.get_states()) == [random.TENSOR_PARALLEL] == ["model-parallel-rng"]
    with comm.as_rank(Mesh(2, tp=2), 0):
        assert not random.get_rng_tracker().get_states()  # streams belong to a rank
