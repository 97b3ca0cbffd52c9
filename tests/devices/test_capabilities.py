"""Capabilities of a backend, and features that need one that it lacks: refused by name, and never "lost"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm import CommError
from neuronx_dist.comm.backends.c10d import C10dCommunicator
from neuronx_dist.comm.backends.capabilities import LACKS_VARIABLE, METHODS, Capabilities, capabilities_of
from neuronx_dist.parallelize import parallelize
from tests.parallelize.support.pipelines import config, module, samples
from tests.support.devices.groups import BACKENDS
from tests.support.llama_training import Case, train, worst_difference
from tests.support.pool import WorkerFailure, processes

# --- what is known of a backend ---------------------------------------------------------------------------------------


def capabilities() -> Capabilities:
    found = capabilities_of(dist.group.WORLD)
    assert found is capabilities_of(dist.group.WORLD)
    return found


def test_a_backend_of_torch_has_everything() -> None:
    for found in processes(2).run(capabilities, initialize=False):
        assert found == Capabilities("gloo") and found.is_whole and found.has_messages


@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_in_python_has_what_it_defines(backend: str) -> None:
    (found, _) = processes(2).run(capabilities, initialize=False, backend=backend)
    defined = {name for names in METHODS.values() for name in names if hasattr(BACKENDS[backend], name)}
    inherited = {name for name in defined if getattr(BACKENDS[backend], name) is getattr(dist.ProcessGroup, name, None)}
    assert found.backend == backend and found.methods == defined - inherited and not found.has_messages
    is_tpu = backend == "tpu_dist"
    assert (found.unequal_all_to_all, found.any_order) == (is_tpu, not is_tpu)
    assert found.gathers_objects is (backend == "neuron_single")


def without_messages() -> tuple[Capabilities, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LACKS_VARIABLE, "send recv,broadcast")
        nxd.initialize_model_parallel(pipeline_model_parallel_size=2)
        has_messages = comm.current().backend.has_messages
        x = torch.arange(3.0) + comm.rank("pp")
        assert torch.equal(comm.permute(x, "pp", [(0, 1)]), torch.arange(3.0) if comm.rank("pp") else torch.zeros(3))
        assert torch.equal(comm.broadcast(x, "pp", src=1), torch.arange(3.0) + 1)
        found = capabilities()
        nxd.destroy_model_parallel()
        patch.setenv(LACKS_VARIABLE, "sending")
        with pytest.raises(CommError, match="NEURONX_DIST_LACKS names sending: the methods that can be replaced are"):
            capabilities()
    return found, has_messages


def test_a_backend_in_cpp_lacks_what_the_environment_names() -> None:
    for found, has_messages in processes(2).run(without_messages, initialize=False):
        assert not has_messages and not found.methods & {"send", "recv", "broadcast"}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, verb, words",
    [
        ("Backend x does not support send", "send [2] float32", "NEURONX_DIST_LACKS=send,recv in the environment"),
        ("allgather is not implemented", "all_gather [2]", "NEURONX_DIST_LACKS=all_gather_single,_allgather_base in"),
        ("No backend type associated with device type cpu", "barrier", "does not have, or not for this tensor: use"),
        ("Connection closed by peer [127.0.0.1]", "send [2]", "the connection to another rank of the group was lost"),
        ("Invalid scalar type", "all_reduce [2] bool", "failed: Invalid scalar type"),
    ],
)
def test_an_error_says_what_was_wrong(monkeypatch: pytest.MonkeyPatch, text: str, verb: str, words: str) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "x")
    here = C10dCommunicator(None, "pp", (0, 1), 0, None)  # type: ignore[arg-type]
    with pytest.raises(CommError) as caught:
        here.explain(verb, RuntimeError(text))
    assert words in str(caught.value) and ("lost" in str(caught.value)) == ("Connection" in text)


def descending() -> str:
    try:
        comm.new_group([[1, 0]], "descending")
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.process
def test_ranks_in_another_order_are_refused_where_they_must_ascend() -> None:
    assert processes(2).run(descending, backend="neuron") == ["", ""]
    for text in processes(2).run(descending, backend="tpu_dist"):
        assert "backend tpu_dist takes the ranks of a group in ascending order only" in text and "[1, 0]" in text


def without_all_gather() -> str:
    with pytest.raises(CommError) as caught:
        nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    return str(caught.value)


@pytest.mark.process
def test_a_backend_that_gathers_nothing_is_refused_at_the_start() -> None:
    backend = "neuron without allgather _allgather_base"
    for text in processes(2).run(without_all_gather, initialize=False, backend=backend):
        assert "has no all_gather (none of all_gather_single, _allgather_base, allgather): tensor and sequence" in text


def stages_of_parallelize(folder: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        parallelize(module("mlp"), {"data": samples("mlp", 1)[0]}, "pp", config(2), gen_savedir=folder)
    return str(caught.value)


@pytest.mark.process
def test_stages_of_parallelize_are_refused(tmp_path: Path) -> None:
    for text in processes(2).run(stages_of_parallelize, str(tmp_path), mesh={"pp": 2}, backend="neuron"):
        assert "a pipeline of 2 stages, which needs point-to-point messages, but the backend neuron has none" in text


def failing() -> None:
    if comm.rank("world") == 1:
        raise ValueError("the parrot is dead")
    comm.all_reduce(torch.ones(2), "world")


@pytest.mark.process
def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(WorkerFailure, match="the parrot is dead"):
        processes(2).run(failing, backend="neuron")


# --- methods taken away -----------------------------------------------------------------------------------------------

TAKEN_AWAY = "broadcast alltoall_base _reduce_scatter_base allreduce allgather _allgather_base barrier".split()


@pytest.mark.slow
@pytest.mark.parametrize("missing", TAKEN_AWAY)
def test_training_without_a_method(missing: str) -> None:
    for case in (
        Case(tp=2, sequence_parallel=True),
        Case(pp=2, microbatches=2, tied=True),
        Case(dp=2, optimizer="zero1"),
    ):
        mesh = dict(tp=case.tp, pp=case.pp)
        results = processes(2).run(train, case, ("sgd",), 2, mesh=mesh, backend=f"neuron without {missing}")
        worst, what = worst_difference(case, results)
        assert worst < 1e-10, f"{case} without {missing}: {what} differs by {worst:.1e}"
