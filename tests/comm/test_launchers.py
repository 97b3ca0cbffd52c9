"""Places of a rank by the variables of torchrun, SLURM and Open MPI, and jobs of one rank that are joined by them."""

from __future__ import annotations

import os
import re
import socket

import pytest
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm.launchers import METHOD, Place, environment_of, export_place, place_of
from neuronx_dist.shard_tensor import DistributedManager
from tests.support.pool import processes

ENV = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "hosta", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NPROCS": "8", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
OMPI = "OMPI_COMM_WORLD"
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
ALL = {*ENV, *SLURM, *OPENMPI, METHOD}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variables, arguments, expected",
    [
        ({}, {}, None),
        (ENV, {}, Place("env", 3, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, Place("env", 0, 1, 0)),
        (SLURM, {}, Place("slurm", 5, 8, 1, "10.0.0.7", "12355")),
        (SLURM, {"port": 4000}, Place("slurm", 5, 8, 1, "10.0.0.7", "4000")),
        (OPENMPI, {}, Place("openmpi", 2, 6, 0, "localhost", "12355")),
        ({**OPENMPI, "MASTER_ADDR": "h", "MASTER_PORT": "7"}, {}, Place("openmpi", 2, 6, 0, "h", "7")),
        ({**OPENMPI, "MASTER_ADDR": "h"}, {"address": "g", "port": "8"}, Place("openmpi", 2, 6, 0, "g", "8")),
        ({**SLURM, **OPENMPI, **ENV}, {}, Place("env", 3, 4, 1)),
        ({**SLURM, **OPENMPI}, {}, Place("slurm", 5, 8, 1, "10.0.0.7", "12355")),
        ({**SLURM, **ENV, METHOD: "SLURM"}, {}, Place("slurm", 5, 8, 1, "10.0.0.7", "29500")),
        ({**SLURM, **OPENMPI, **ENV, METHOD: "OPENMPI"}, {}, Place("openmpi", 2, 6, 0, "hosta", "29500")),
        ({**SLURM, **ENV}, {"method": "SLURM"}, Place("slurm", 5, 8, 1, "10.0.0.7", "29500")),
    ],
)
def test_a_place_by_variables(monkeypatch, variables, arguments, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place_of(**arguments) == expected


@pytest.mark.parametrize(
    "variables, words",
    [
        ({METHOD: "MPICH"}, f"{METHOD}='MPICH' is not one of ENV, SLURM, OPENMPI"),
        ({METHOD: "SLURM"}, f"start by SLURM: SLURM_PROCID, SLURM_NPROCS is not set; {METHOD} selects another"),
        ({"RANK": "0"}, "start by ENV: WORLD_SIZE is not set"),
    ],
)
def test_variables_that_are_no_place(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(words)):
        DistributedManager.initialize()
    assert not DistributedManager.is_initialized()


def test_torchrun_s_variables_are_set_while_a_job_is_joined_alone(monkeypatch):
    monkeypatch.setenv("RANK", "9")
    with environment_of(Place("slurm", 5, 8, 1, "10.0.0.7", "12355")):
        expected = {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "12355",
        }
        assert {name: os.environ[name] for name in expected} == expected
    assert os.environ["RANK"] == "9" and "WORLD_SIZE" not in os.environ and "MASTER_ADDR" not in os.environ


def join(how: str, variables: dict[str, str], port: str) -> tuple[object, ...]:
    """Leaves the worker's job, joins another one by `variables`, leaves that one, and joins one of this rank alone."""
    rank = dist.get_rank()
    dist.barrier()  # a rank that leaves closes connections which others may still be making
    dist.destroy_process_group()
    for name in ALL:
        os.environ.pop(name, None)
    os.environ.update({name: value.replace("%", str(rank)) for name, value in variables.items()})
    if how == "setup":
        DistributedManager.setup(rank, 2, addr="localhost", port=port, backend="gloo", method="by hand")
    elif how == "open_mpi":
        DistributedManager.initialize_open_mpi("localhost", port)
    else:
        getattr(DistributedManager, how)(*[port] * (how == "initialize_slurm"))
    manager = DistributedManager()
    ranks = comm.gather_objects(manager.rank)
    place = manager.rank, manager.world_size, manager.local_rank, manager.distributed, str(manager)
    DistributedManager.cleanup(barrier=True)
    DistributedManager.cleanup()
    assert not DistributedManager.is_initialized() and not dist.is_initialized()
    for name in variables:
        os.environ.pop(name)
    DistributedManager.initialize("cpu")
    alone = DistributedManager()
    last = alone.world_size, alone.distributed, str(alone)
    DistributedManager.cleanup()
    return ranks, place, last


@pytest.mark.process
@pytest.mark.parametrize(
    "how, word, variables",
    [
        ("initialize", "slurm", {"SLURM_PROCID": "%", "SLURM_NPROCS": "2", "SLURM_LOCALID": "%"}),
        ("initialize_slurm", "slurm", {"SLURM_PROCID": "%", "SLURM_NPROCS": "2", "SLURM_LOCALID": "%"}),
        ("open_mpi", "openmpi", {f"{OMPI}_RANK": "%", f"{OMPI}_SIZE": "2", f"{OMPI}_LOCAL_RANK": "%"}),
        ("initialize_env", "env", {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "%", "MASTER_ADDR": "localhost"}),
        ("setup", "by hand", {}),
    ],
)
def test_a_job_of_two_ranks_is_joined_and_left(how, word, variables):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = variables if how == "setup" else {**variables, "MASTER_PORT": port}
    results = processes(2).run(join, how, variables, port, initialize=False)
    for rank, (ranks, place, last) in enumerate(results):
        assert ranks == [0, 1]
        assert place == (rank, 2, rank, True, f"rank {rank} of 2, started by {word}, on cpu")
        assert last == (1, False, "rank 0 of 1, started by None, on cpu")


SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
}
MPIRUN = {**OPENMPI, f"{OMPI}_LOCAL_SIZE": "6"}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({**SRUN, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}, ["5", "8", "1", "10.0.0.7", "20043"]),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, ["5", "8", "1", "127.0.0.1", "20043"]),
        ({**SRUN, "MASTER_ADDR": "hosta", "MASTER_PORT": "7"}, ["5", "8", "1", "hosta", "7"]),
        (MPIRUN, ["2", "6", "0", "127.0.0.1", "29500"]),
        ({**MPIRUN, "PMIX_NAMESPACE": "prterun-a-7@1"}, ["2", "6", "0", "127.0.0.1", "26875"]),
        ({**MPIRUN, "PMIX_NAMESPACE": "prterun-a-8@1"}, ["2", "6", "0", "127.0.0.1", "29574"]),
        ({**OPENMPI, f"{OMPI}_LOCAL_SIZE": "3", "MASTER_ADDR": "h"}, ["2", "6", "0", "h", "29500"]),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, None),  # a batch script
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({**SRUN, METHOD: "SLURM"}, None),  # of DistributedManager
        ({}, None),
    ],
)
def test_torchrun_s_variables_of_a_started_rank(monkeypatch, variables, expected):
    monkeypatch.setattr(os, "environ", dict(variables))
    export_place()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if expected is None:
        assert os.environ == variables
    else:
        assert [os.environ[name] for name in names] == expected


def test_ranks_of_several_hosts_need_an_address(monkeypatch):
    monkeypatch.setattr(os, "environ", {**OPENMPI, f"{OMPI}_LOCAL_SIZE": "3"})
    with pytest.raises(ValueError, match="rank 2 of 6 .* MASTER_ADDR is not set"):
        export_place()
