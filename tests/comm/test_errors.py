"""Errors of a backend, whenever they come, are told with verb, axis, ranks and the line that asked."""

from __future__ import annotations

import _thread
import threading
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.call_site import call_site, call_sites
from neuronx_dist.comm import CommError, CommTimeout, Communicator, RemoteRankError
from neuronx_dist.comm.base import DONE

X = torch.ones(2)
CALLS = {
    "all_reduce": lambda c, **o: comm.all_reduce(X, c, **o),
    "all_gather": lambda c, **o: comm.all_gather(X, c, **o),
    "reduce_scatter": lambda c, **o: comm.reduce_scatter(X, c, **o),
    "all_to_all": lambda c, **o: comm.all_to_all(X, c, **o),
    "permute": lambda c, **o: comm.permute(X, c, [(0, 1)], **o),
    "broadcast": lambda c, **o: comm.broadcast(X, c, **o),
    "send": lambda c, **o: comm.send(X, c, dst=1, **o),
    "recv": lambda c, **o: comm.recv(X.clone(), c, src=1, **o),
}


class Broken(Communicator):
    """Raises when a collective is started, or when it is awaited."""

    def __init__(self, at: str) -> None:
        super().__init__("tp", (0, 1), 0)
        for verb in CALLS:
            setattr(self, f"start_{verb}", self.fail if at == "start" else lambda *_: self)

    def fail(self, *_: object) -> None:
        raise RuntimeError("connection reset by peer")

    def wait(self) -> None:
        self.fail()

    def gather_objects(self, obj: object) -> list[object]:
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("at", ["start", "wait", "handle"])
def test_an_error_names_verb_axis_ranks_and_call_site(verb, at):
    communicator = Broken("wait" if at == "handle" else at)
    with pytest.raises(CommError) as error:
        if at == "handle":
            CALLS[verb](communicator, async_op=True).wait()
        else:
            CALLS[verb](communicator)
    message = str(error.value)
    for part in (f"{verb} of [2] float32 over tp", "ranks [0, 1]", "rank 0", __file__, "connection reset by peer"):
        assert part in message, message


def test_objects_too():
    for call, verb in ((comm.gather_objects, "gather_objects"), (comm.broadcast_object, "gather_objects")):
        with pytest.raises(CommError, match=f"{verb} over tp.*connection reset"):
            call(1, Broken("start"))


def test_one_family():
    assert issubclass(CommTimeout, CommError) and issubclass(RemoteRankError, CommError)
    assert issubclass(CommError, RuntimeError)
    assert RemoteRankError("text", rank=3).rank == 3


def test_an_error_of_ours_is_not_wrapped_again():
    class Failing(Communicator):
        def start_all_reduce(self, buffer, op):
            raise RemoteRankError("rank 1 failed first", rank=1)

    with pytest.raises(RemoteRankError, match="^rank 1 failed first$"):
        comm.all_reduce(X, Failing("tp", (0, 1), 0))


def test_a_backend_that_lacks_a_verb_says_so():
    with pytest.raises(CommError, match="Communicator has no all_to_all"):
        comm.all_to_all(X, Communicator("tp", (0, 1), 0))


def test_the_call_site_is_the_users_line_also_in_backward():
    class Late(Communicator):
        def start_all_reduce(self, buffer, op):
            self.site = call_site()
            return DONE

    late = Late("tp", (0, 1), 0)
    x = torch.ones(2, requires_grad=True)
    y = comm_and_back(x, late)
    y.sum().backward()
    assert late.site.startswith(__file__)


def comm_and_back(x, communicator):
    from neuronx_dist import spmd

    return spmd.convert(x, communicator, src=spmd.I, dst=spmd.R)


def test_code_without_a_file_is_named_if_no_file_asked():
    """Code without a file, as from `python -c`: here in a thread that runs nothing else."""
    lines: list[tuple[str, str]] = []
    done = threading.Event()
    code = compile("def work():\n    lines.append(call_sites())\n    done.set()", "<string>", "exec")
    names: dict[str, Any] = {"lines": lines, "call_sites": call_sites, "done": done}
    exec(code, names)
    _thread.start_new_thread(names["work"], ())
    assert done.wait(60)
    assert lines == [("<string>:2", "<string>:2")]
