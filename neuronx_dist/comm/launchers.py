"""Starts of a job by the environment variables of its launcher: torchrun's, SLURM's, Open MPI's."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

__all__ = ["METHOD", "Place", "device_with", "environment_of", "export_place", "place_of"]

METHOD = "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"  # names the launcher; without it the first that is found
_PORT = "12355"  # where MASTER_PORT is not set


class Place(NamedTuple):
    """A rank's place in a job, in the words of its launcher. None: torchrun's variables, which are there already."""

    method: str
    rank: int
    world_size: int
    local_rank: int
    address: str | None = None
    port: str | None = None


class _Launcher(NamedTuple):
    """The variables of a launcher: rank, number of ranks, rank on its host, and the address of rank 0's host."""

    rank: str
    world_size: str
    local_rank: str
    address: str


_LAUNCHERS = {
    "ENV": _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"),
    "SLURM": _Launcher("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_LAUNCH_NODE_IPADDR"),
    "OPENMPI": _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "MASTER_ADDR"),
}


def place_of(method: str | None = None, *, address: str | None = None, port: str | int | None = None) -> Place | None:
    """Returns this process's place by a launcher's variables; None where no launcher has started it.

    Args:
        method: "ENV", "SLURM" or "OPENMPI"; None: that of the variable `METHOD`, else the first with its variables set.
        address, port: of rank 0; None: by the launcher's variables, else MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: there is no such method; a variable of the chosen one is not set.
    """
    chosen = method or os.environ.get(METHOD)
    if chosen is None:
        chosen = next((name for name, its in _LAUNCHERS.items() if its.rank in os.environ), None)
        if chosen is None:
            return None
    if chosen not in _LAUNCHERS:
        raise ValueError(f"{METHOD}={chosen!r} is not one of {', '.join(_LAUNCHERS)}")
    names = _LAUNCHERS[chosen]
    missing = [name for name in (names.rank, names.world_size) if name not in os.environ]
    if missing:
        raise ValueError(f"start by {chosen}: {', '.join(missing)} is not set; {METHOD} selects another launcher")
    rank, world_size, local_rank = (int(os.environ.get(name, "0")) for name in names[:3])
    if chosen == "ENV":
        return Place("env", rank, world_size, local_rank)
    host = address or os.environ.get(names.address) or os.environ.get("MASTER_ADDR", "localhost")
    return Place(chosen.lower(), rank, world_size, local_rank, host, str(port or os.environ.get("MASTER_PORT", _PORT)))


def export_place() -> None:
    """Sets torchrun's variables in a process that SLURM's srun or Open MPI's mpirun started as one of several ranks.

    Without it each of the processes would train by itself. A batch script of SLURM, which has the variables of a rank
    and is none, and a process with RANK are left as they are.

    Raises:
        ValueError: mpirun started ranks on several hosts, and MASTER_ADDR does not say where rank 0 is.
    """
    variables = os.environ
    if "RANK" in variables or METHOD in variables:  # torchrun, or DistributedManager
        return
    # another port for each job, so that two jobs on a host do not meet
    if "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
        size = next((variables[name] for name in names if name in variables), "1")
        is_one_host = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES")) == "1"
        host = "127.0.0.1" if is_one_host else variables.get("SLURM_LAUNCH_NODE_IPADDR", "")
        port = 20000 + (int(variables.get("SLURM_JOB_ID", "0")) + int(variables["SLURM_STEP_ID"])) % 10000
        rank, local_rank = variables["SLURM_PROCID"], variables.get("SLURM_LOCALID", "0")
    elif "OMPI_COMM_WORLD_RANK" in variables:
        rank, size = variables["OMPI_COMM_WORLD_RANK"], variables.get("OMPI_COMM_WORLD_SIZE", "1")
        local_rank = variables.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
        host = "127.0.0.1" if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size else ""
        job = variables.get("PMIX_NAMESPACE")
        port = 29500 if job is None else 20000 + zlib.crc32(job.encode()) % 10000
    else:
        return
    if int(size) == 1:
        return
    address = variables.get("MASTER_ADDR", host)
    if not address:
        raise ValueError(
            f"rank {rank} of {size} was started on one of several hosts, and MASTER_ADDR is not set: set it to the "
            "address of rank 0's host, for example with mpirun -x MASTER_ADDR=10.0.0.1"
        )
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "MASTER_ADDR": address}
    variables.update({**place, "MASTER_PORT": variables.get("MASTER_PORT", str(port))})


@contextmanager
def environment_of(place: Place | None) -> Iterator[None]:
    """Sets torchrun's variables for a place in the `with`; afterwards they are as before."""
    if place is None or place.address is None:
        yield
        return
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_with(backend: str) -> str:
    """Returns the device type whose backend of torch.distributed has this name.

    Raises:
        ValueError: there is none.
    """
    backends = dist.Backend.default_device_backend_map
    for device, name in backends.items():
        if name == backend:
            return str(device)
    raise ValueError(f"backend {backend!r} is not one of {', '.join(sorted({*backends.values()}))}")
