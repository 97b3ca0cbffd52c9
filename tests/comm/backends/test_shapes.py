"""A backend without other ranks: the shapes of the real ones; and that verbs give backends contiguous buffers."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.shapes import ShapesBackend, ShapesCommunicator
from neuronx_dist.mesh import Mesh
from tests.comm.verb_cases import layouts, strided


def test_shapes_backend_gives_the_shapes_of_the_real_ones():
    """Fake, meta and real tensors, no group: what `as_rank` returns has shape and dtype of what processes return."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def everything(device):
        x = torch.ones(4, 6, device=device)
        return [
            comm.all_reduce(x, "tp"),
            comm.all_reduce(x.bfloat16(), "tp", reduce_dtype=torch.float32),
            comm.all_gather(x, "tp", dim=-1),
            comm.all_gather(x, "tp", out=torch.ones(8, 6, device=device)),
            comm.reduce_scatter(x, "tp", dim=1),
            comm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
            comm.permute(x, "tp", [(0, 1)]),
            comm.broadcast(x, "tp", src=1),
            comm.send(x, "tp", dst=1) if comm.rank("tp") == 0 else comm.recv(x, "tp", src=0),
            comm.all_reduce(x, "tp", async_op=True).wait(),
        ]

    expected = [[(t.shape, t.dtype) for t in found] for found in threads.run(Mesh(2, tp=2), everything, "cpu")]
    for rank in range(2):
        with comm.as_rank(Mesh(2, tp=2), rank):
            for device in ("cpu", "meta"):
                found = everything(device)
                assert [(t.shape, t.dtype) for t in found] == expected[rank]
                assert all(t.device.type == device for t in found)
            with FakeTensorMode():
                assert [(t.shape, t.dtype) for t in everything("cpu")] == expected[rank]
            # values are those of ranks that all hold what this one holds
            x = torch.arange(4.0)
            assert torch.equal(comm.all_reduce(x, "tp"), 2 * x)
            assert torch.equal(comm.all_gather(x, "tp"), x.repeat(2))
            assert torch.equal(comm.reduce_scatter(x, "tp"), 2 * x[2 * rank : 2 * rank + 2])
            assert torch.equal(comm.permute(x, "tp", [(0, 1)]), x if rank else torch.zeros(4))
            assert torch.equal(comm.recv(torch.ones(4), "tp", src=1 - rank), torch.zeros(4))


class Contiguous(ShapesCommunicator):
    """Takes nothing but contiguous buffers, as real backends do."""

    def __getattribute__(self, name):
        attribute = super().__getattribute__(name)
        if not name.startswith("start_") or name == "start_coalesced":
            return attribute

        def start(*args):
            assert all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor)), name
            assert not any(x.requires_grad for x in args if isinstance(x, torch.Tensor)), name
            seen.add(name)
            return attribute(*args)

        return start


class ContiguousBackend(ShapesBackend):
    def communicator(self, label, groups, global_rank, separate=False):
        return Contiguous(label, next(group for group in groups if global_rank in group), global_rank)


seen: set[str] = set()


@pytest.mark.parametrize("rank", range(2))
def test_buffers_of_backends_are_contiguous(rank):
    seen.clear()
    with comm.as_rank(Mesh(2, tp=2), rank, ContiguousBackend()):
        param = torch.ones(4, 6, requires_grad=True)  # verbs take its values, and write them in place
        for verb in (comm.all_reduce, comm.broadcast):
            assert verb(param, "tp", out=param) is param and param.is_leaf
        comm.recv(param, "tp", src=1 - rank)
        for x in layouts(torch.arange(24.0).view(4, 6)) + [param]:
            for dim in (0, 1):
                comm.all_gather(x, "tp", dim=dim)
                comm.all_gather(x, "tp", dim=dim, out=strided(torch.cat([x, x], dim).detach()))
                comm.reduce_scatter(x, "tp", dim=dim)
                comm.reduce_scatter(x, "tp", dim=dim, out=strided(x.detach().chunk(2, dim)[0]))
                comm.all_to_all(x, "tp", split_dim=dim, concat_dim=1 - dim)
                comm.all_to_all(x, "tp", split_dim=dim, concat_dim=dim, out=strided(x.detach()))
            for out in (None, strided(x.detach())):
                comm.all_reduce(x, "tp", out=out)
                comm.permute(x, "tp", [(0, 1), (1, 0)], out=out)
                comm.broadcast(x, "tp", src=0, out=out)
            comm.send(x, "tp", dst=1 - rank)
            comm.recv(x.detach().contiguous(), "tp", src=1 - rank)
    verbs = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send", "recv")
    assert {f"start_{verb}" for verb in verbs} <= seen
