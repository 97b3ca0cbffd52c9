"""Parts that all backends share: works, handles, and tensors that are sent together in one buffer."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm
from neuronx_dist.comm.base import DONE, Communicator, Works
from neuronx_dist.mesh import Mesh


def test_works_are_awaited_in_order_and_then_finished_once():
    events = []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            events.append(self.name)

    Works([Work("a"), Work("b")], lambda: events.append("end")).wait()
    Works([Work("c")]).wait()
    assert events == ["a", "b", "end", "c"] and DONE.wait() is None


def test_a_handle_that_a_mode_has_seen_is_finished_outside_of_it():
    with comm.as_rank(Mesh(2, tp=2), 0):
        handle = comm.all_gather(torch.ones(2, 2), "tp", dim=1, async_op=True)
        with Functions() as mode:
            result = handle.wait()
    assert mode.names == [] and result.shape == (2, 4)


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("verb, shapes", [
    ("all_reduce", [(2, 3), ()]), ("all_gather", [(2, 2, 3), (2,)]), ("reduce_scatter", [(3,)]),
])  # fmt: skip
def test_tensors_that_travel_together_are_views_of_one_buffer(verb, shapes):
    """[2, 3] and [] (not scattered), of which a copy travels: what is given is left alone."""
    xs = [torch.arange(6.0).view(2, 3), torch.tensor(9.0)][: len(shapes)]
    started = []

    class One(Communicator):
        def start_all_reduce(self, buffer, op):
            started.append((buffer.clone(), op))
            return DONE

        def start_all_gather(self, gathered, x):
            started.append((x.clone(), None))
            gathered.copy_(x.expand_as(gathered))
            return DONE

        def start_reduce_scatter(self, out, scattered, op):
            started.append((scattered.clone(), op))
            out.copy_(scattered[1])
            return DONE

    work, results = One("tp", (4, 5), 5).start_coalesced(verb, xs, "max", [None] * len(xs))
    ((sent, op),) = started
    assert work is DONE and op == (None if verb == "all_gather" else "max")
    assert [tuple(result.shape) for result in results] == shapes
    assert torch.equal(sent.reshape(-1), torch.cat([x.reshape(-1) for x in xs]))
    assert len({result.untyped_storage()._cdata for result in results}) == 1
    expected = [torch.stack([x, x]) if verb == "all_gather" else x[1] if verb == "reduce_scatter" else x for x in xs]
    assert all(torch.equal(result, x) for result, x in zip(results, expected))
    results[0].zero_()
    assert xs[0].sum() == 15
