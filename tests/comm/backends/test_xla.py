"""XLA communicators, groups and worlds on a simulated `torch_xla`; tests/xla lowers programs."""

from __future__ import annotations

import datetime
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm import context
from neuronx_dist.comm.backends import xla, xla_groups
from neuronx_dist.comm.backends.xla_transfer import how_to_transfer, rows_of
from neuronx_dist.mesh import Mesh

MESH = Mesh(8, tp=2, pp=2)
CHAIN = [(0, 1), (1, 2), (2, 3)]


class Runtime:
    """torch_xla.runtime of rank 5 of 8."""

    def __init__(self) -> None:
        self.size, self.rank, self.here, self.kind = 8, 5, 1, "CPU"

    def world_size(self) -> int:
        return self.size

    def global_ordinal(self) -> int:
        return self.rank

    def addressable_device_count(self) -> int:
        return self.here

    def device_type(self) -> str:
        return self.kind


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    played: Any = Runtime()
    package: Any = ModuleType("torch_xla")
    package.device, package.synced, package.registered = lambda: torch.device("xla:0"), [], []
    package.sync = lambda: package.synced.append("sync")
    package.runtime, package.core = played, SimpleNamespace(xla_model=SimpleNamespace())
    package.distributed = SimpleNamespace(xla_backend=SimpleNamespace())
    names = {"": package, ".runtime": played, ".core": package.core, ".core.xla_model": package.core.xla_model}
    names |= {".distributed": package.distributed, ".distributed.xla_backend": package.distributed.xla_backend}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, f"torch_xla{name}", module)
    for variable in ("WORLD_SIZE", "RANK", "PJRT_DEVICE", "NEURONX_DIST_XLA_TRANSFER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(xla, "_chosen", False)
    played.package = package
    yield played
    context.set_default(None)
    context.set_of_thread(None, lambda: 5)


ROWS = {
    "a chain": (CHAIN, 4, [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]),
    "back": ([(1, 0), (3, 2)], 4, [[[0, 1], [2, 3]]]),
    "the odd ones": ([(1, 2)], 4, [[[1, 2], [3, 0]]]),
    "around": ([(3, 0)], 4, [[[1, 2], [3, 0]]]),
    "around and back": ([(0, 5)], 6, [[[1, 2], [3, 4], [5, 0]]]),
    "two ranks": ([(0, 1)], 2, [[[0, 1]]]),
    "an odd number": (CHAIN[:2], 3, [[[0, 1, 2]]]),
    "farther": ([(0, 2)], 4, [[[0, 1, 2, 3]]]),
    "itself": ([(1, 1)], 4, [[[0, 1, 2, 3]]]),
    "nothing": ([], 4, [[[0, 1, 2, 3]]]),
    "one of them farther": ([(0, 1), (1, 3)], 4, [[[0, 1, 2, 3]]]),
}


@pytest.mark.parametrize("name", ROWS)
def test_all_gathers_that_bring_pairs_together(name: str) -> None:
    pairs, size, rows = ROWS[name]
    assert rows_of(pairs, size) == rows
    for row in rows:
        assert sorted(index for group in row for index in group) == [*range(size)]
    assert all(any({*pair} <= {*group} for row in rows for group in row) for pair in pairs)


def test_how_ranks_exchange(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, expected in (("CPU", "permute"), ("TPU", "permute"), ("NEURON", "all_gather")):
        runtime.kind = kind
        assert how_to_transfer() == expected
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "permute")
    assert how_to_transfer() == "permute"
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "p2p")
    with pytest.raises(ValueError) as error:
        how_to_transfer()
    assert str(error.value) == "NEURONX_DIST_XLA_TRANSFER='p2p': use permute or all_gather, or leave it unset"


def test_as_many_processes_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    for launched, size in ((None, 8), ("1", 8), ("8", 8)):
        if launched is not None:
            monkeypatch.setenv("WORLD_SIZE", launched)
        xla_groups.check_launched(size)
    with pytest.raises(comm.CommError) as error:
        xla_groups.check_launched(1)
    assert str(error.value) == (
        "torchrun started 8 processes (WORLD_SIZE), torch_xla sees a world of 1 with PJRT_DEVICE=CPU: start one "
        "process for each XLA device. On the CPU processes have no XLA world in common: use "
        "neuronx_dist.xla_replay there"
    )


HOW = (
    "on XLA an axis is a mesh axis name, a tuple of names, a Communicator, or a ProcessGroup made with "
    "pg_options={'xla_pg_options': {'mesh': all_groups}}"
)


def test_groups_that_know_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(_mesh=[(0, 1), (2, 3)], size=lambda: 4)
    assert xla_groups.replica_groups(group) == [[0, 1], [2, 3]]
    group._mesh = []
    assert xla_groups.replica_groups(group) == [[0, 1, 2, 3]]
    with pytest.raises(TypeError) as error:
        xla_groups.replica_groups(7)
    assert str(error.value) == f"{HOW}; got 7"
    group._mesh = [[0, 1]]
    assert xla_groups.replica_groups(group) == [[0, 1]]  # all that there are
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert xla_groups.replica_groups(group) == [[0, 1]]
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(TypeError) as error:
        xla_groups.replica_groups(group)
    assert str(error.value) == f"{HOW}; this ProcessGroup lists only the group of this rank, [0, 1], of 4 ranks"


def test_a_torch_group_is_made_once_with_all_replica_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options: programs.append((ranks, pg_options)) or object())
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)) as here:
        tp = comm.communicator("tp")
        assert here.backend.process_group(tp) is tp  # torch.distributed takes no part
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
        assert here.backend.process_group(tp) is tp and programs == []
        monkeypatch.setattr(dist, "get_backend", lambda: "xla")
        group = here.backend.process_group(tp)
        assert group is here.backend.process_group(tp) and comm.communicator(group) is tp
    assert programs == [([4, 5], {"xla_pg_options": {"mesh": [[0, 1], [2, 3], [4, 5], [6, 7]]}})]


def test_communicators() -> None:
    backend = xla.XlaBackend(MESH)
    assert (backend.name, backend.has_messages) == ("xla", False)
    with comm.as_rank(MESH, 5, backend):
        crossing = {axis: comm.communicator(axis).crosses_stages for axis in ("tp", "dp", "pp", "world", ("pp", "tp"))}
        assert crossing == {"tp": False, "dp": False, "pp": True, "world": True, ("pp", "tp"): True}
        tp = comm.communicator("tp")
        assert (
            tp.groups == [[0, 1], [2, 3], [4, 5], [6, 7]] and tp.ranks == (4, 5) and tp.coordinate(torch.ones(1)) == 1
        )
        for verb, call in (
            ("send", lambda: comm.send(torch.ones(1), "tp", dst=0)),
            ("recv", lambda: tp.start_recv(None, 0, 0)),
        ):
            with pytest.raises(comm.CommError) as error:
                call()
            assert str(error.value).startswith(f"{verb} over tp (ranks [4, 5], seen from rank 5) at ")
            assert str(error.value).endswith(
                ": on XLA all ranks run one program, so a message between two of them is not possible: use "
                "comm.permute with the pairs of all ranks of the axis"
            )
        wrapped = backend.wrap(SimpleNamespace(_mesh=[[4, 5], [0, 1]]), 5)
        assert (wrapped.axis, wrapped.ranks) == ("group", (4, 5))
    for mesh in (None, Mesh(8, tp=2)):
        one = xla.XlaBackend(mesh).communicator("world", [[*range(8)]], 0)
        assert isinstance(one, xla.XlaCommunicator) and not one.crosses_stages
    with pytest.raises(comm.CommError) as error:
        xla.XlaCommunicator("mine", [[0, 1], [2]], 2)
    assert str(error.value) == "replica groups of mine have sizes [1, 2]; XLA needs one size: [[0, 1], [2]]"


def test_a_tensor_that_is_on_no_xla_device(runtime: Any) -> None:
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)), pytest.raises(comm.CommError) as error:
        comm.all_reduce(torch.ones(1), "tp")
    assert "a collective over tp (ranks [4, 5], seen from rank 5) at " in str(error.value)
    assert str(error.value).endswith(": the tensor is on cpu, not on an XLA device")


def test_objects_go_by_a_rendezvous_of_all_ranks(runtime: Any) -> None:
    asked: list[Any] = []
    answers = [pickle.dumps(("gather_objects", rank * 10)) for rank in range(8)]
    xm = runtime.package.core.xla_model
    xm.rendezvous = lambda name, payload: asked.append((name, pickle.loads(payload))) or answers
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)):
        assert comm.gather_objects({"a": 1}, "tp") == [40, 50] and asked == [("nxd.tp", ("gather_objects", {"a": 1}))]
        del answers[5:]
        with pytest.raises(comm.CommError, match=r"gather_objects over tp .*: 5 ranks answered, not all of the job"):
            comm.gather_objects(1, "tp")
        answers.append(pickle.dumps(("gather_objects", 7)))
        assert comm.gather_objects(1, "tp") == [40, 7]


def test_the_world(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert xla.world() == (8, 5)
    runtime.size = 1
    assert xla.world() == (1, 0)  # whatever number the device has
    runtime.size = 8
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    assert xla.world() == (8, 5)
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    with pytest.raises(comm.CommError) as error:
        xla.world()
    assert str(error.value) == (
        "torch.distributed says rank 4 of 8, torch_xla rank 5 of 8: start one process for each XLA device, and "
        "initialize the group with init_process_group('xla', init_method='xla://')"
    )


def test_whether_ranks_are_xla_devices(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not xla.in_use()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert not xla.in_use()
    monkeypatch.setattr(dist, "get_backend", lambda: "xla")
    assert xla.in_use()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert not xla.in_use()
    monkeypatch.setattr(xla, "_chosen", True)
    assert xla.in_use()
    monkeypatch.delitem(sys.modules, "torch_xla")
    assert not xla.in_use()


@pytest.mark.parametrize("timeout, options", [(None, {}), (7.5, {"timeout": datetime.timedelta(seconds=7.5)})])
def test_joining_the_job_that_torchrun_started(runtime: Any, monkeypatch: pytest.MonkeyPatch, timeout, options) -> None:
    called: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: called.append((args, given)))
    assert xla.join(timeout) == torch.device("xla:0") and called == [] and xla.in_use()
    monkeypatch.setenv("RANK", "5")
    xla.join(timeout)
    assert called == [(("xla",), {"init_method": "xla://", **options})]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(comm.CommError, match="torchrun started 2 processes"):
        xla.join(timeout)


@pytest.mark.parametrize("devices_here", [1, 8])
def test_a_rank_of_a_mesh_as_a_process_or_a_thread(runtime: Any, devices_here: int) -> None:
    runtime.here = devices_here
    assert xla.ranks_are_threads() == (devices_here > 1)
    xla.connect(MESH)
    assert context.current().rank == 5 and context.current().mesh is MESH
    assert isinstance(context.current().backend, xla.XlaBackend)
    assert (context._default is None) == (devices_here > 1)
    runtime.rank = 4
    assert context.is_initialized() == (devices_here == 1)
    runtime.rank = 5
    xla.disconnect()
    assert not context.is_initialized()
    runtime.size = 1
    assert not xla.ranks_are_threads()


def test_what_is_pending_is_run(runtime: Any) -> None:
    xla.run_program()
    with xla.own_program(), xla.own_program():
        assert runtime.package.synced == ["sync"] * 2
    assert runtime.package.synced == ["sync"] * 3


class Collectives:
    """torch_xla's, on tensors of the CPU: they note how they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.state = 2**63 + 5

    def all_reduce(self, op: str, x: Any, groups: Any, pin_layout: bool) -> Any:
        self.calls.append(("all_reduce", op, groups, pin_layout))
        return [item * 2 for item in x] if isinstance(x, list) else x * 2

    def all_gather(self, x: Any, dim: int, groups: Any, pin_layout: bool) -> Any:
        self.calls.append(("all_gather", dim, groups, pin_layout))
        return [torch.cat([item, item]) for item in x] if isinstance(x, list) else torch.cat([x, x + 100])

    def reduce_scatter(self, op: str, x: Any, scale: float, dim: int, count: int, groups: Any, pin_layout: bool) -> Any:
        self.calls.append(("reduce_scatter", op, scale, dim, count, groups, pin_layout))
        return x[:1] * 2

    def all_to_all(self, x: Any, split: int, concat: int, count: int, groups: Any, pin_layout: bool) -> Any:
        self.calls.append(("all_to_all", split, concat, count, groups, pin_layout))
        return x + 1

    def collective_permute(self, x: Any, pairs: Any) -> Any:
        self.calls.append(("collective_permute", pairs))
        return x + 1

    def get_rng_state(self) -> int:
        return self.state

    def set_rng_state(self, state: int) -> None:
        self.state = state


GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7]]
X = torch.arange(8.0).view(4, 2)


@pytest.fixture
def played(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    xm, notes = Collectives(), []
    runtime.package._XLAC = SimpleNamespace(
        _set_all_reduce_token=lambda device, token: notes.append(("token", device, token)),
        _set_xla_custom_op_name_prefix=lambda result, prefix, depth: notes.append((prefix, depth)),
    )
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", xm)
    runtime.package.core.xla_model = xm
    monkeypatch.setattr(xla, "in_one_program", lambda x: True)
    return SimpleNamespace(xm=xm, notes=notes, runtime=runtime, issued=[])


CALLS = {
    "all_reduce": (lambda: comm.all_reduce(X, "tp"), ("all_reduce", "sum", GROUPS, False), 2 * X),
    "all_reduce max": (lambda: comm.all_reduce(X, "tp", op="max"), ("all_reduce", "max", GROUPS, False), 2 * X),
    "all_gather": (lambda: comm.all_gather(X, "tp"), ("all_gather", 0, GROUPS, False), torch.cat([X, X + 100])),
    "reduce_scatter": (
        lambda: comm.reduce_scatter(X, "tp", op="min"), ("reduce_scatter", "min", 1.0, 0, 2, GROUPS, False), 2 * X[:2]
    ),
    "all_to_all": (lambda: comm.all_to_all(X, "tp"), ("all_to_all", 0, 0, 2, GROUPS, False), X + 1),
    "permute": (
        lambda: comm.permute(X, "tp", [(1, 0)]), ("collective_permute", [[1, 0], [3, 2], [5, 4], [7, 6]]), X + 1
    ),
    "broadcast": (lambda: comm.broadcast(X, "tp", src=1), ("all_reduce", "sum", GROUPS, False), 2 * X),
    "broadcast of another's": (
        lambda: comm.broadcast(X, "tp", src=0), ("all_reduce", "sum", GROUPS, False), torch.zeros(4, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_verbs_are_instructions_with_the_groups_of_all_ranks(played: Any, name: str) -> None:
    call, instruction, result = CALLS[name]
    rank = 5  # index 1 of its group
    with comm.as_rank(MESH, rank, xla.XlaBackend(MESH, played.issued)):
        comm.communicator("tp")._coordinates = {X.device: 1}  # a number, as on the CPU
        assert torch.equal(call(), result) and played.xm.calls == [instruction]
    (issued,) = played.issued
    verb = name.split()[0]
    assert issued[:4] == (0, verb, "tp", tuple(map(tuple, GROUPS))) and issued.dtype == torch.float32
    assert issued.shape == ((2, 2, 2) if verb in ("reduce_scatter", "all_to_all") else (4, 2))
    assert 1 <= len(issued.sites) <= 8 and issued.sites[0].startswith(f"{__file__}:") and " in " in issued.sites[0]
    assert played.notes == [("token", "cpu", None), ("nxd-0-", 1)]


def test_flags_are_broadcast_as_numbers(played: Any) -> None:
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)):
        comm.communicator("tp")._coordinates = {X.device: 1}
        x = torch.tensor([True, False])
        assert comm.broadcast(x, "tp", src=1).tolist() == [True, False] and played.notes == [("token", "cpu", None)]


@pytest.mark.parametrize("pairs, groups", [
    ([(1, 0)], [GROUPS]),
    ([(0, 1), (1, 0)], [GROUPS]),
])  # fmt: skip
def test_a_transfer_by_all_gathers(played: Any, monkeypatch: pytest.MonkeyPatch, pairs: Any, groups: Any) -> None:
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "all_gather")
    for rank, index in ((4, 0), (5, 1)):
        played.xm.calls.clear()
        with comm.as_rank(MESH, rank, xla.XlaBackend(MESH, played.issued)):
            source = next((src for src, dst in pairs if dst == index), None)
            expected = torch.zeros(4, 2) if source is None else X + 100 * source
            assert torch.equal(comm.permute(X, "tp", pairs), expected)
            assert torch.equal(comm.permute(X, "tp", pairs), expected)
            assert played.xm.calls == [("all_gather", 0, of_row, False) for of_row in groups] * 2
            assert len(comm.communicator("tp")._sources) == 1
    assert {issued.verb for issued in played.issued} == {"permute"}


def test_a_chain_is_gathered_in_two_rows(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "all_gather")
    with comm.as_rank(Mesh(8, tp=4), 6, xla.XlaBackend(Mesh(8, tp=4))):  # index 2: [0, 1, 2, 3 | 1, 2, 3, 0]
        assert torch.equal(comm.permute(X, "tp", CHAIN), X)  # from 1, whose rows come first in [1, 2]
    first, second = played.xm.calls
    assert first == ("all_gather", 0, [[0, 1], [2, 3], [4, 5], [6, 7]], False)
    assert second == ("all_gather", 0, [[1, 2], [3, 0], [5, 6], [7, 4]], False)


def test_lists_are_one_instruction(played: Any) -> None:
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH, played.issued)):
        one, other = comm.all_reduce([X, X[0]], "tp")
        assert torch.equal(one, 2 * X) and torch.equal(other, 2 * X[0]) and X.sum() == 28
        one, other = comm.all_gather([X, X[0]], "tp")
        assert torch.equal(one, torch.cat([X, X])) and torch.equal(other, torch.cat([X[0], X[0]]))
        (piece,) = comm.reduce_scatter([X], "tp")
        assert torch.equal(piece, 2 * X[:2])
    assert [call[0] for call in played.xm.calls] == ["all_reduce", "all_gather", "reduce_scatter"]
    assert [(issued.verb, issued.shape) for issued in played.issued] == [
        ("all_reduce", (10,)), ("all_gather", (10,)), ("reduce_scatter", (2, 4)),
    ]  # fmt: skip


def test_between_stages_a_collective_is_a_program_of_its_own(played: Any) -> None:
    synced = played.runtime.package.synced
    calls = {
        "all_reduce": lambda axis: comm.all_reduce(X, axis),
        "list": lambda axis: comm.all_gather([X], axis),
        "permute": lambda axis: comm.permute(X, axis, [(0, 1)]),
    }
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)):
        for call in calls.values():
            call("tp")
            assert synced == []
            call("pp")
            assert synced == ["sync"] * 2
            synced.clear()
            with xla.own_program():
                call("pp")
                assert synced == ["sync"]
            synced.clear()
        with pytest.raises(KeyError), xla.own_program():
            raise KeyError
        synced.clear()
        comm.all_reduce(X, "pp")
        assert synced == ["sync"] * 2


def test_the_state_of_the_devices_generator(played: Any) -> None:
    """64 bits without a sign, as a tensor that has one."""
    generator = xla.XlaBackend.generator
    for state, held in ((2**63 + 5, 5 - 2**63), (2**63, -(2**63)), (7, 7), (2**64 - 1, -1)):
        played.xm.state = state
        assert generator.get_state().tolist() == [held] and generator.get_state().dtype == torch.int64
        played.xm.state = 0
        generator.set_state(torch.tensor([held]))
        assert played.xm.state == state
    assert generator.device_type == "xla"
