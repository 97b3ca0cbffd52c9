"""The checking backend: what programs of the package read of the rank, and what a collective leaves behind."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode

from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.comm.ranks.rank_numbers import concrete
from neuronx_dist.comm.ranks.rank_values import RankValue, value_on
from neuronx_dist.gradients import norm as grad_norm
from neuronx_dist.parallel_layers import autograd_linear
from neuronx_dist.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_dist.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_dist.parallel_layers.random import model_parallel_manual_seed
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.sharded_functions import cross_entropy
from neuronx_dist.spmd import rows
from tests.comm.observed_run import MESH, ObservedRun, SeesRankValues, axes_of
from tests.support.paths import file_name

# --- programs of the package


def test_layers_loss_and_seeds_look_at_nothing():
    """All tensor-parallel ranks have the same program, though they hold different shards."""
    for rank in (0, 3):
        with ObservedRun(Mesh(8, tp=4), rank) as seen:
            model_parallel_manual_seed(3)
            embedding = ParallelEmbedding(16, 8, padding_idx=9, device="meta")
            column = ColumnParallelLinear(8, 16, gather_output=False, device="meta")
            row = RowParallelLinear(16, 8, input_is_parallel=True, device="meta")
            head = ColumnParallelLinear(8, 16, gather_output=False, bias=False, device="meta")
            with FakeTensorMode(allow_non_fake_inputs=True):
                for module in (embedding, column, row, head):
                    module.to_empty(device="cpu")
                ids = torch.zeros(2, 4, dtype=torch.long)
                seen.backend.phase = "forward"
                logits = head(row(column(embedding(ids))))
                loss = parallel_cross_entropy(logits, ids).mean()
                seen.backend.phase = "backward"
                loss.backward()
            assert axes_of(embedding.first_id) == {"tp"} and concrete(embedding.first_id) == 4 * rank
        assert not seen.calls, seen.backend.reads
        verbs = [(event.phase, event.verb, event.op) for event in seen.backend.events]
        assert verbs == [
            ("forward", "all_reduce", "sum"),
            ("forward", "all_reduce", "sum"),
            ("forward", "all_reduce", "max"),
            ("forward", "all_reduce", "sum"),
            ("backward", "all_reduce", "sum"),
            ("backward", "all_reduce", "sum"),
        ]
        for event in seen.backend.events:
            assert event.where.startswith(__file__) and event.axis == "tp" and event.ranks == (0, 1, 2, 3)
            assert event.awaited is not None and event.awaited > event.number
        inside = [event.inside.rsplit("/", 1)[1].split(":")[0] for event in seen.backend.events]
        assert inside[:4] == [file_name(module) for module in (rows, autograd_linear, cross_entropy, cross_entropy)]


def test_the_norm_of_the_gradients_reads_tp_once():
    from neuronx_dist.gradients.norm import clip_grad_norm

    with ObservedRun(Mesh(8, tp=4), 2) as seen:
        layer = RowParallelLinear(16, 8, input_is_parallel=True)
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        clip_grad_norm(layer.parameters(), 1.0)
        assert seen.axes == {"tp"}
        assert [r for r in range(8) if seen.backend.same_program(r)] == [1, 2, 3, 5, 6, 7]
        assert all(f"{file_name(grad_norm)}:" in read.inside and __file__ in read.where for read in seen.backend.reads)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, gather_output=False, bias=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_pipeline_reads_pp_and_nothing_else():
    for rank in (0, 7):
        with ObservedRun(Mesh(8, tp=2, pp=2), rank) as seen:
            model = NxDPPModel(
                Model(),
                transformer_layer_cls=Layer,
                num_microbatches=2,
                auto_partition=True,
                output_loss_value_spec=True,
            )
            model.run_train(x=torch.ones(4, 8))
            assert seen.axes == {"pp"}, seen.backend.reads
            stage = rank // 4
            assert [r for r in range(8) if seen.backend.same_program(r)] == list(range(4 * stage, 4 * stage + 4))
        messages = [(e.verb, e.axis, e.peer) for e in seen.backend.events if e.verb in ("send", "recv")]
        assert {verb for verb, _, _ in messages} == {"send", "recv"} and len(messages) == 4
        assert {peer for _, _, peer in messages} == {4 if rank == 0 else 3}
        at = next(e for e in seen.backend.events if e.verb == "send")
        assert at.on(4 * stage + 2).peer == (6 if rank == 0 else 2)
        assert at.on(4 * stage + 2).ranks == (2, 6)


# --- events


def test_events_have_what_other_ranks_must_match():
    with ObservedRun(MESH, 5) as seen:
        x = torch.ones(4, 6)
        handle = comm.all_gather(x, "cp", async_op=True)
        comm.all_reduce(x, ("dp", "cp"), op="max")
        comm.reduce_scatter(x.bfloat16(), "tp", reduce_dtype=torch.float32, dim=1)
        handle.wait()
        comm.send(x, "pp", dst=1 - comm.rank("pp"), tag=3)
        comm.recv(x, "tp", src=(comm.rank("tp") + 1) % 2)
        comm.broadcast(x, "dp", src=1)
        comm.permute(x, "tp", [(0, 1)])
        comm.barrier()
        comm.all_reduce(x, ())
    events = seen.backend.events
    assert [e.verb for e in events] == [
        "all_gather", "all_reduce", "reduce_scatter", "send", "recv", "broadcast", "permute", "gather_objects",
    ]  # fmt: skip
    gather, reduce, scatter, send, recv, broadcast, permute, objects = events
    assert (gather.number, gather.awaited) == (1, 6) and (reduce.number, reduce.awaited) == (2, 3)
    assert (gather.axis, gather.ranks, gather.shape, gather.dtype) == ("cp", (5, 7), (4, 6), torch.float32)
    assert (reduce.axis, reduce.op, reduce.ranks) == ("dp,cp", "max", (1, 3, 5, 7))
    assert (scatter.dtype, scatter.shape) == (torch.float32, (2, 4, 3))
    assert (send.peer, send.tag, send.ranks) == (13, 3, (5, 13))
    assert recv.peer == 4 and recv.on(4).peer == 5 and recv.on(12).ranks == (12, 13)
    assert broadcast.peer == MESH.group_of("dp", 5)[1] and permute.pairs == ((0, 1),)
    assert objects.shape is None and objects.dtype is None
    assert "send to rank 13 tag 3 of [4, 6] float32 over pp [5, 13]" in str(send)
    assert gather.key != reduce.key and reduce.on(1).key != reduce.on(9).key
    assert not seen.calls


def test_call_sites_under_a_mode_are_those_of_the_caller():
    for mode in (BaseTorchFunctionMode(), SeesRankValues()):
        with ObservedRun() as seen, mode:
            x = torch.ones(4)
            line = _line() + 1
            comm.all_reduce(x, "tp")
            spmd.all_reduce(x, "tp", dst=spmd.R)
        first, second = seen.backend.events
        assert first.where == first.inside == f"{__file__}:{line}"
        assert second.where == f"{__file__}:{line + 1}" and f"{rows.__file__}:" in second.inside


def _line() -> int:
    import sys

    return sys._getframe(1).f_lineno


def test_explicit_groups():
    with ObservedRun(Mesh(8, tp=2, pp=2), 5) as seen:
        every = comm.new_group([[0, 1, 2, 3], [4, 5, 6, 7]], "halves")
        assert every is not None and not seen.calls
        assert every.size == 4 and axes_of(every.rank) == {"dp", "tp"} and concrete(every.rank) == 1
        assert tuple(map(concrete, every.ranks)) == (4, 5, 6, 7) and axes_of(every.ranks[0]) == {"pp"}
        last = comm.new_group([[4, 5, 6, 7]], "last stage")
        assert last is not None and seen.axes == {"pp"} and last.size == 4
        assert [seen.backend.same_program(r) for r in range(8)] == [False] * 4 + [True] * 4
    with ObservedRun(Mesh(8, tp=2, pp=2), 1) as seen:
        assert comm.new_group([[4, 5, 6, 7]], "tp") is None and seen.axes == {"pp"}
    with ObservedRun(Mesh(4, tp=4), 0) as seen:
        uneven = comm.new_group([[0], [1, 2, 3]], "tp")
        assert uneven is not None and not seen.calls
        assert uneven.size == 1
        uneven = comm.new_group([[0, 1, 2], [3]], "tp")
        assert comm.all_gather(torch.ones(1), uneven).shape == (3,)


def test_plain_ranks_on_request_and_nothing_is_left_behind():
    backend = CheckBackend(symbolic=False)
    with comm.as_rank(MESH, 5, backend):
        for value in (comm.rank("tp"), comm.current().rank, comm.communicator("tp").rank):
            assert type(value) is int
        assert comm.communicator("tp").ranks == (4, 5)
        comm.all_reduce(torch.ones(1), "tp")
    assert len(backend.events) == 1 and backend.reads == []


def test_a_silent_twin_inside_reads_for_the_one_outside():
    with ObservedRun() as seen:
        with comm.as_rank(MESH, comm.current().rank) as inner:  # what the recorder of pipelines does
            comm.all_reduce(torch.ones(2), "tp")
            assert not seen.calls and isinstance(inner.rank, RankValue)
            assert comm.communicator("tp").rank == 1
        assert seen.axes == {"tp"} and not seen.backend.events


def test_values_are_those_of_the_shapes_backend():
    """Every rank is assumed to hold this rank's value; each verb records one event, awaited once."""
    x = torch.arange(8.0).view(4, 2)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x, "tp"),
        "all_reduce max": lambda: comm.all_reduce(x, "tp", op="max"),
        "all_gather": lambda: comm.all_gather(x, "tp", dim=1),
        "reduce_scatter": lambda: comm.reduce_scatter(x, "tp"),
        "reduce_scatter max": lambda: comm.reduce_scatter(x, "tp", op="max"),
        "all_to_all": lambda: comm.all_to_all(x, "tp", concat_dim=1),
        "permute": lambda: comm.permute(x, "tp", [(0, 1)]),
        "permute away": lambda: comm.permute(x, "tp", [(1, 0)]),
        "broadcast": lambda: comm.broadcast(x, "tp", src=1),
        "send": lambda: comm.send(x, "tp", dst=0),
        "recv": lambda: comm.recv(x.clone(), "tp", src=0),
    }
    for name, call in calls.items():
        with comm.as_rank(MESH, 5):
            expected = call()
        with ObservedRun(MESH, 5) as seen:
            found = call()
        assert torch.equal(found, expected), name
        (event,) = seen.backend.events
        assert event.verb == name.split()[0] and event.awaited == event.number + 1 == 2, name
        assert event.rank == 5 and event.phase == "" and event.communicator is not None
        handle = None
        with ObservedRun(MESH, 5) as seen:
            handle = comm.all_reduce(x, "tp", async_op=True)
            assert seen.backend.events[0].awaited is None
            handle.wait()
            handle.wait()
        assert seen.backend.events[0].awaited == 2
    with ObservedRun(MESH, 5) as seen:
        assert comm.gather_objects("x", "tp") == ["x", "x"]
        assert seen.backend.events[0].awaited == 2


def test_groups_of_several_sizes_are_read_and_their_sizes_known():
    mesh = Mesh(8, tp=2, pp=2)
    with ObservedRun(mesh, 4) as seen:
        group = comm.new_group([[0, 1, 2], [4, 5], [6, 7]], "uneven")
        assert axes_of(group.size) == {"pp", "dp", "tp"} and concrete(group.size) == 2
        assert [value_on(group.size, rank) for rank in range(8)] == [3, 3, 3, 1, 2, 2, 2, 2]
        assert [value_on(group.rank, rank) for rank in range(8)] == [0, 1, 2, 0, 0, 1, 0, 1]
        assert not seen.axes - {"pp", "dp", "tp"}
        before = len(seen.calls)
        assert group.ranks == (4, 5) and len(seen.calls) > before
        assert group.all_groups() == [(0, 1, 2), (4, 5), (6, 7), (3,)] and group.mesh_groups is None
        assert group.ranks_of(1) == (0, 1, 2) and group.ranks_of(1) is group.ranks_of(1)
    with ObservedRun(mesh, 4):
        along = comm.communicator("tp")
        assert along.mesh_groups == mesh.groups("tp") and along.all_groups() == [tuple(g) for g in mesh.groups("tp")]


def test_an_event_on_other_ranks_has_their_peers_tags_and_pairs():
    with ObservedRun(Mesh(8, tp=4), 1) as seen:
        rank, x = comm.rank("tp"), torch.ones(2)
        comm.send(x, "tp", dst=(rank + 1) % 4, tag=rank * 2)
        comm.permute(x, "tp", [(0, 1), (2, 3)])
        comm.broadcast(x, "tp", src=3)
    sent, permuted, broadcast = seen.backend.events
    there = sent.on(7)
    assert (there.rank, there.ranks, there.peer, concrete(there.tag)) == (7, (4, 5, 6, 7), 4, 6)
    assert (sent.rank, sent.peer, concrete(sent.tag)) == (1, 2, 2)
    assert permuted.on(7).pairs == ((0, 1), (2, 3)) and permuted.on(7).peer is None and broadcast.on(6).peer == 7
    assert str(there).startswith("send to rank 4 tag 6 of [2] float32 over tp [4, 5, 6, 7] at ")
    assert str(broadcast).startswith("broadcast of [2] float32 over tp [0, 1, 2, 3] at ")
