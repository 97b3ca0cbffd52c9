"""Process groups: a rank makes its own only, under names that never come twice, and meets nobody else."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from neuronx_dist import comm
from neuronx_dist.comm.backends import c10d
from neuronx_dist.comm.backends.message_lists import LARGE
from neuronx_dist.comm.base import DONE
from neuronx_dist.parallel_layers import parallel_state as ps
from tests.support.pool import processes

AXES = ["tp", "pp", "dp", "cp", "ep", "edp", ("dp", "cp"), ("pp", "tp"), "world"]


@pytest.fixture
def groups_made(monkeypatch) -> Iterator[list[list[int]]]:
    """The ranks of every group that is made; nothing is left of the job afterwards."""
    ranks: list[list[int]] = []
    make = dist.distributed_c10d._new_process_group_helper

    def counted(size: int, rank: int, members: list[int], *args: Any, **keywords: Any) -> Any:
        ranks.append(members)
        return make(size, rank, members, *args, **keywords)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", counted)
    yield ranks
    ps.destroy_model_parallel()
    dist.destroy_process_group()


def join(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def test_groups_of_a_destroyed_world_are_not_taken_for_new_ones(groups_made):
    join(0, 8)
    ps.initialize_model_parallel(2)
    dist.destroy_process_group()
    join(0, 8)
    with pytest.raises(RuntimeError, match=r"destroyed: call destroy_model_parallel\(\) first"):
        ps.initialize_model_parallel(2)
    ps.destroy_model_parallel()
    groups_made.clear()
    ps.initialize_model_parallel(2)
    assert groups_made == [[0, 1], [0, 2, 4, 6]]


@pytest.mark.parametrize("world_size, rank", [(64, 63), (512, 100), (4096, 0), (4096, 2077)])
def test_a_rank_makes_its_own_groups_only_at_any_size(groups_made, world_size, rank):
    join(rank, world_size)
    groups_made.clear()  # but for the world
    begin = time.process_time()
    ps.initialize_model_parallel(8, 4, 2, expert_model_parallel_size=2)
    assert time.process_time() - begin < 5  # 0.06 s
    mesh = ps.get_mesh()
    for axis in AXES:
        assert comm.communicator(axis).ranks == mesh.group_of(axis, rank)
    groups = {mesh.group_of(axis, rank) for axis in AXES if axis != "world"}
    assert sorted(map(tuple, groups_made)) == sorted(group for group in groups if len(group) > 1)
    comm.new_group(mesh.groups("pp"), "pp_forward"), comm.new_group(mesh.groups("pp"), "pp_backward")
    ps.get_next_rank_group()
    assert len(groups_made) <= 12 and all(rank in members for members in groups_made)
    neighbours = sorted(dist.get_process_group_ranks(ps.get_prev_rank_group()))
    assert neighbours == sorted((rank, ps.get_pipeline_model_parallel_prev_rank()))


def test_communicators_that_share_a_group_never_have_its_tags(groups_made, monkeypatch):
    """1023 of them are kept apart from one another, and every one from the group's own."""
    join(0, 2)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    backend = c10d.C10dBackend()
    plain = backend.communicator("pp", [[0, 1]], 0)
    tags = [backend.communicator("pp", [[0, 1]], 0, separate=True)._first_tag for _ in range(2100)]
    assert plain._first_tag == 0 < min(tags) and max(tags) + 2 * (1 << 20) <= 1 << 31
    assert len(set(tags[:1023])) == 1023 and all(tag % (2 << 20) == 0 for tag in tags)


def test_merged_axes_that_no_step_uses_are_made_when_first_used(groups_made):
    join(5, 64)
    ps.initialize_model_parallel(4, 2, 2)
    before = len(groups_made)
    for _ in range(2):
        assert comm.communicator(("cp", "tp")).ranks == ps.get_mesh().group_of(("cp", "tp"), 5)
        assert len(groups_made) == before + 1


def test_a_world_that_is_bound_to_a_device_is_split_by_all_ranks_at_once(groups_made, monkeypatch):
    """NCCL's split needs all ranks: one that is in no group takes part too."""
    join(0, 8)
    ps.initialize_model_parallel()
    monkeypatch.setattr(c10d, "_device_of_world", lambda: torch.device("cuda", 0))
    splits: list[tuple[int | None, torch.device]] = []

    def split(size: int, rank: int | None, members: list[int], *args: Any, device_id: Any, **keywords: Any) -> Any:
        splits.append((rank, device_id))
        return (dist.GroupMember.NON_GROUP_MEMBER if rank is None else dist.group.WORLD), None

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", split)
    with monkeypatch.context() as patch:
        patch.setitem(dist.distributed_c10d._world.pg_group_ranks, dist.group.WORLD, {})
        assert comm.new_group([[2, 3], [4, 5]]) is None
        member = comm.new_group([[2, 3], [0, 1]])
        comm.communicator("cp")  # groups of one: no rank splits anything
        made_here = comm.current().backend._groups
        assert splits == [(None, torch.device("cuda", 0)), (0, torch.device("cuda", 0))]
        assert member is not None and len(made_here) == 1  # what a rank is not in, it does not destroy
        made_here.clear()


def skewed(meshes: list[dict[str, int]]) -> list[float]:
    """Layout after layout, on ranks of which each has made another number of groups by itself before."""
    rank = dist.get_rank()
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    names: set[str] = set()
    totals = []
    for sizes in meshes:
        ps.initialize_model_parallel(**sizes)
        mesh = ps.get_mesh()
        asked = AXES if rank % 2 else [*reversed(AXES)]  # eager ones: in any order
        for axis in asked:
            group = ps.process_group(comm.communicator(axis))
            assert dist.get_process_group_ranks(group) == list(mesh.group_of(axis, rank))
            works = dist.all_reduce(total := torch.tensor([2.0**rank]), group=group, async_op=True)
            totals.append((sizes, axis, works, total))
        for sizes, axis, work, total in totals:
            work.wait()
            assert total.item() == sum(2.0**other for other in mesh.group_of(axis, rank)), (sizes, axis)
        totals.clear()
        only = [[0, 1], [2, 3]] if rank < 2 else [[2, 3]]  # of another's group a rank need not know
        pair = comm.new_group(only, "pair")
        assert pair is not None and comm.all_reduce(torch.tensor(1), pair).item() == 2
        again = comm.new_group(only, "pair")
        assert comm.all_reduce(torch.tensor(1), again).item() == 2
        held = {group.group_name for group in comm.current().backend._groups}
        assert not held & names, "a name came twice"
        names |= held
        ps.destroy_model_parallel()
    return sorted(names)


def test_groups_of_real_processes_after_destroying_and_starting_again():
    one, other = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2, context_parallel_size=2)
    results = processes(4).run(skewed, [one, other, one, one], initialize=False)
    assert set(results[0]) & set(results[1])  # members agree on names


def crossed() -> list[list[float]]:
    """Messages on three communicators of the same ranks, received in another order than they were sent in."""
    rank = comm.rank("world")
    channels: list[Any] = ["world", comm.new_group([[0, 1]], "one"), comm.new_group([[0, 1]], "other")]
    values = [torch.full((4,), float(index)) for index in range(3)]
    permuted = [comm.permute(value + 10, channel, [(0, 1)], async_op=True) for value, channel in zip(values, channels)]
    if rank == 0:
        sends = [comm.send(value, channel, dst=1, async_op=True) for value, channel in zip(values, channels)]
        for handle in (*sends, *permuted):
            handle.wait()
        return []
    received = [comm.recv(torch.empty(4), channel, src=0, async_op=True) for channel in reversed(channels)]
    return [[float(handle.wait().mean()) for handle in handles] for handles in (received, permuted)]


def test_messages_of_two_communicators_of_the_same_ranks_never_meet():
    """A gloo group is shared by all of them: a pipeline's activations and gradients between two ranks, for one."""
    assert processes(2).run(crossed, mesh={})[1] == [[2.0, 1.0, 0.0], [10.0, 11.0, 12.0]]


def timeouts() -> list[datetime.timedelta]:
    backend = comm.current().backend
    groups = [comm.communicator("tp").group, comm.communicator(("dp", "tp")).group]
    return [backend.timeout, *(group._get_backend(torch.device("cpu")).options._timeout for group in groups)]


def test_groups_give_up_after_what_init_process_group_was_given():
    seconds = datetime.timedelta(seconds=33)
    assert processes(4).run(timeouts, mesh=dict(tp=2), timeout=33) == [[seconds] * 3] * 4


def test_minutes_where_nothing_was_given(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert c10d.C10dBackend().timeout == datetime.timedelta(minutes=10)
        assert c10d.C10dBackend(datetime.timedelta(hours=2)).timeout == datetime.timedelta(hours=2)
    finally:
        dist.destroy_process_group()


def test_complex_numbers_have_a_sum_and_no_maximum():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        here = c10d.C10dCommunicator(dist.group.WORLD, "tp", (0,), 0, None)
        x = torch.tensor([1 + 2j])
        here.start_all_reduce(x, "sum").wait()
        assert x.item() == 1 + 2j
        with pytest.raises(ValueError, match="does not support .*complex"):
            here.start_all_reduce(x, "max")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend, megabytes, started", [
    ("gloo", 0, ["all_to_all"]), ("gloo", 1, ["recv 2", "send 1"]), ("nccl", 0, ["single"]),
    ("nccl", 1, ["single"]),
])  # fmt: skip
def test_which_collective_gathers(monkeypatch, backend, megabytes, started):
    """gloo's own is slow: small ones are an exchange, those above a mebibyte are messages."""
    seen: list[str] = []
    group = SimpleNamespace(
        send=lambda xs, dst, tag: seen.append(f"send {dst}") or DONE,
        recv=lambda xs, src, tag: seen.append(f"recv {src}") or DONE,
        alltoall_base=lambda *args: seen.append("all_to_all") or DONE,
    )
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(c10d, "_all_gather_single", lambda *args, **options: seen.append("single") or DONE)
    here = c10d.C10dCommunicator(group, "tp", (4, 5, 6), 4, None)
    x = torch.ones((megabytes << 18) // 3 + 1)
    gathered = torch.zeros(3, *x.shape)
    here.start_all_gather(gathered, x).wait()
    assert seen[: len(started)] == started and len(seen) == (4 if "send 1" in started else 1)
    if megabytes and backend == "gloo":
        assert seen == ["recv 2", "send 1", "recv 1", "send 2"] and torch.equal(gathered[0], x)


@pytest.mark.parametrize(
    "verb, numel, dtype, is_alone",
    [
        ("all_reduce", LARGE["all_reduce"] // 4, torch.float32, True),
        ("all_reduce", LARGE["all_reduce"] // 4 - 1, torch.float32, False),
        ("all_reduce", LARGE["all_reduce"], torch.int16, False),
        ("all_gather", LARGE["all_gather"] // 4, torch.float32, True),
        ("all_gather", LARGE["all_gather"] // 4 - 1, torch.float32, False),
    ],
)
def test_which_tensors_of_a_list_travel_alone(monkeypatch, verb, numel, dtype, is_alone):
    """Large tensors of gloo's dtypes travel alone; the others as bytes in a buffer. An all_reduce costs more time."""
    alone: list[int] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(c10d, "start_alone", lambda comm, verb, x, *_: alone.append(x.numel()) or (DONE, x))
    monkeypatch.setattr(c10d.C10dCommunicator, "start_all_reduce", lambda *args: DONE)
    monkeypatch.setattr(c10d.C10dCommunicator, "start_all_gather", lambda *args: DONE)
    here = c10d.C10dCommunicator(SimpleNamespace(), "tp", (0, 1), 0, None)
    here.start_coalesced(verb, [torch.ones(4, dtype=dtype), torch.ones(numel, dtype=dtype)], "sum", [None, None])
    assert alone == [numel] * is_alone
