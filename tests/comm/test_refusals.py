"""Error messages and descriptions of `comm`, in full: `expected_refusals.txt`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from neuronx_dist import comm
from neuronx_dist.comm import context, generators, launch
from neuronx_dist.comm.backends import c10d, call_agreement, threads
from neuronx_dist.comm.backends.observed import CheckBackend, CheckCommunicator
from neuronx_dist.comm.base import Backend, Communicator
from neuronx_dist.comm.health import places, waiting
from neuronx_dist.comm.ranks.rank_tables import RankTable
from neuronx_dist.mesh import Mesh
from tests.support.reviewed import assert_reviewed, with_code_for_lines

X = torch.ones(2, 4)


class Bare(Communicator):
    """Has no verb at all."""

    def __init__(self) -> None:
        super().__init__("tp", (2, 3), 3)


def with_tangent() -> None:
    with forward_ad.dual_level():
        comm.all_reduce(forward_ad.make_dual(X, X), "tp")


def in_a_device_of_its_own(state: list[torch.Tensor], xla: bool) -> None:
    generator = SimpleNamespace(get_state=lambda: torch.tensor([1]), set_state=lambda state: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "_device_generator", lambda: generator if xla else None)
        generators.set_state(state)


def of_thread(words: str, seconds: str = "1") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURONX_DIST_DEBUG", words)
        patch.setenv("NEURONX_DIST_DEBUG_TIMEOUT", seconds)
        patch.setattr(dist, "get_world_size", lambda: 2)
        call_agreement.agreement_store()


REFUSED: dict[str, Callable[[], Any]] = {
    "all_reduce op": lambda: comm.all_reduce(X, "tp", op="avg"),
    "all_reduce out": lambda: comm.all_reduce(X, "tp", out=X[0]),
    "all_reduce axis": lambda: comm.all_reduce(X, "tq"),
    "all_reduce with a tangent": with_tangent,
    "all_reduce under vmap": lambda: torch.vmap(lambda x: comm.all_reduce(x, "tp"))(X),
    "all_reduce under jvp": lambda: torch.func.jvp(lambda x: comm.all_reduce(x, "tp"), (X,), (X,)),
    "all_reduce of lists": lambda: comm.all_reduce([X, X], "tp", out=[X]),
    "all_gather dim": lambda: comm.all_gather(X, "tp", dim=2),
    "all_gather out": lambda: comm.all_gather(X, "tp", out=X),
    "all_gather list out": lambda: comm.all_gather([X], "tp", out=[X]),
    "all_gather list dim": lambda: comm.all_gather([X], "tp", dim=2),
    "reduce_scatter dim": lambda: comm.reduce_scatter(X, "tp", dim=-3),
    "reduce_scatter piece": lambda: comm.reduce_scatter(X[:1], "tp"),
    "reduce_scatter out": lambda: comm.reduce_scatter(X, "tp", out=X),
    "reduce_scatter list out": lambda: comm.reduce_scatter([X], "tp", out=[X]),
    "reduce_scatter op": lambda: comm.reduce_scatter(X, "tp", op="prod"),
    "all_to_all split": lambda: comm.all_to_all(X, ("pp", "dp", "tp"), split_dim=0),
    "all_to_all concat": lambda: comm.all_to_all(X, "tp", concat_dim=2),
    "all_to_all out": lambda: comm.all_to_all(X, "tp", out=X[0]),
    "permute twice to one": lambda: comm.permute(X, "tp", [(0, 1), (1, 1)]),
    "permute twice from one": lambda: comm.permute(X, "tp", [(0, 1), (0, 0)]),
    "permute to nobody": lambda: comm.permute(X, "tp", [(0, 2)]),
    "permute from nobody": lambda: comm.permute(X, "tp", [(-1, 0)]),
    "permute out": lambda: comm.permute(X, "tp", [(0, 1)], out=X[0]),
    "broadcast source": lambda: comm.broadcast(X, "tp", src=2),
    "broadcast out": lambda: comm.broadcast(X, "tp", out=X[0]),
    "broadcast source of one": lambda: comm.broadcast(X, "cp", src=1),
    "broadcast_object source": lambda: comm.broadcast_object(1, "tp", src=-1),
    "send to itself": lambda: comm.send(X, "tp", dst=1),
    "send to nobody": lambda: comm.send(X, "tp", dst=2),
    "send tag": lambda: comm.send(X, "tp", dst=0, tag=-1),
    "recv from itself": lambda: comm.recv(X, "tp", src=1),
    "recv strides": lambda: comm.recv(X.t(), "tp", src=0),
    "recv tag": lambda: comm.recv(X, "tp", src=0, tag=1 << 20),
    "groups with a rank twice": lambda: comm.new_group([[0, 1], [1, 2]], "mine"),
    "groups with a rank too many": lambda: comm.new_group([[0, 4]], "mine"),
    "groups with a negative rank": lambda: comm.new_group([[0, -1]]),
    "no group of torch": lambda: comm.size(7),
    "no group of torch in a check": lambda: in_a_check(lambda: comm.size(7)),
    "no group of torch on threads": lambda: threads.run(Mesh(1), lambda: comm.size(7)),
    "a rank outside": lambda: comm.as_rank(Mesh(4), 4).__enter__(),
    "no backend": lambda: Backend().communicator("tp", [[0]], 0),
    **{
        f"{verb} is not there": lambda verb=verb, args=args: getattr(Bare(), verb)(*args)
        for verb, args in {
            "start_all_reduce": (X, "sum"), "start_all_gather": (X, X), "start_reduce_scatter": (X, X, "sum"),
            "start_all_to_all": (X, X), "start_permute": (X, X, []), "start_broadcast": (X, 0),
            "start_send": (X, 0, 0), "start_recv": (X, 0, 0), "gather_objects": (X,),
        }.items()
    },
    "no job": launch.world,
    "a process group for nothing": lambda: c10d.C10dBackend(),
    "a state of XLA on the CPU": lambda: in_a_device_of_its_own([X, torch.tensor([1])], False),
    "a state of the CPU on XLA": lambda: in_a_device_of_its_own([torch.get_rng_state()], True),
    "unknown words": lambda: of_thread("collective, all,collectives"),
    "seconds that are none": lambda: of_thread("collectives", "-1"),
    "an index outside of some group": lambda: observed_index(),
}  # fmt: skip


def in_a_check(call: Callable[[], Any]) -> None:
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()):
        call()


def observed_index() -> None:
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()):
        ranks = comm.communicator("tp").ranks
        ranks[comm.rank("tp") * 2]


def described() -> dict[str, str]:
    with comm.as_rank(Mesh(8, tp=2, pp=2), 5, CheckBackend()):
        group = comm.communicator(("dp", "tp"))
        assert isinstance(group, CheckCommunicator)
        observed = {"repr of an observed group": repr(group), "an observed group": group.describe("all_reduce", "here")}
        observed["an observed line"] = group.describe("recv")
    assert waiting.waits == {}
    with waiting.noted("creating the group"):
        (waits,) = places.descriptions()
    bare = Bare()
    long = RankTable.of_values(("dp", "tp"), (3, 3), tuple(range(8, -1, -1)))
    listed = RankTable.of_values(("dp", "tp"), (3, 3), (1, 5, 2, 8, 8, 7, 0, 0, "x"))
    return observed | {
        "repr": repr(bare),
        "at a line": bare.describe("all_reduce", "here"),
        "a wait": waits,
        "a table": str(RankTable.of_steps(("tp",), 1, [range(3)])),
        "a long sum": str(long),
        "a long list": str(listed),
        "eight": str(RankTable.of_values(("dp", "tp"), (2, 4), (0, 1, 3, 2, 5, 7, 7, 9))),
        "one for all": str(RankTable.of_values(("dp",), (2,), (4, 4))),
        "attributes of backends": str([(Backend.name, Backend.has_messages, Backend.generator)]),
    }


def test_texts_in_full() -> None:
    texts = {}
    for name, call in REFUSED.items():
        with comm.as_rank(Mesh(4, tp=2, pp=2), 1), pytest.raises(Exception) as error:
            call()
        texts[name] = f"{type(error.value).__name__}: {error.value}"
    with pytest.raises(RuntimeError) as nowhere:
        context.current()
    texts["no mesh"] = str(nowhere.value)
    texts |= described()
    texts = {name: re.sub(r"at 0x\w+", "at 0x", with_code_for_lines(text, __file__)) for name, text in texts.items()}
    assert_reviewed(Path(__file__).with_name("expected_refusals.txt"), texts)


def test_ranks_as_threads_that_disagree() -> None:
    def message_of(mine: Callable[[], Any], other: Callable[[], Any]) -> str:
        def work() -> str:
            try:
                return f"{(other if comm.rank('tp') == 0 else mine)()}"
            except comm.CommError as error:
                return f"{type(error).__name__}: {error}"

        return "\n".join(threads.run(Mesh(2, tp=2), work))

    def raises() -> None:
        raise ValueError("lost")

    heard: list[str] = []

    def hears() -> None:
        try:
            comm.all_reduce(X, "tp")
        except comm.RemoteRankError as error:
            heard.append(f"{error.rank}: {error}")
            raise

    with pytest.raises(ValueError, match="^lost") as first:
        threads.run(Mesh(2, tp=2), lambda: raises() if comm.rank("tp") else hears())
    with pytest.raises(comm.CommDeadlock) as stuck:
        threads.run(Mesh(2, tp=2), lambda: comm.barrier("tp") if comm.rank("tp") else None)
    texts = {
        "another verb": message_of(lambda: comm.all_reduce(X, "tp"), lambda: comm.all_gather(X, "tp")),
        "another shape": message_of(lambda: comm.all_reduce(X[0], "tp"), lambda: comm.all_reduce(X, "tp", op="max")),
        "a message": message_of(lambda: comm.recv(X[0], "tp", src=0), lambda: comm.send(X, "tp", dst=1).shape),
        "a barrier": message_of(lambda: comm.gather_objects(1, "tp"), lambda: comm.barrier("tp")),
        "nobody comes": str(stuck.value),
        "a note": "".join(getattr(first.value, "__notes__", ["raised on rank 1 of " + str(Mesh(2, tp=2))])),
        "another rank failed": heard[0],
    }
    texts = {name: with_code_for_lines(text, __file__) for name, text in texts.items()}
    assert_reviewed(Path(__file__).with_name("expected_partings.txt"), texts)
