"""Joining a job: torch.distributed on the right backend for a device, and this rank's context in a mesh."""

from __future__ import annotations

import atexit
import datetime
import importlib.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import Axis, Mesh
from . import backends, context, launchers, local_store
from .rank_selection import XLA

__all__ = ["connect", "disconnect", "end_step", "init_distributed", "world"]

# Axes that training steps use. Their groups are made at once, in this order on every rank: a wrong network fails here
# and not inside a step, and ranks may use them in any order. Groups of other axes are made at their first use.
_EAGER_AXES: tuple[Axis, ...] = ("tp", "pp", "dp", "cp", ("dp", "cp"), ("pp", "tp"), "ep", "edp", "world")

backend_names = ["gloo", "nccl"]  # that the message for a missing process group names


def init_distributed(device: str = "auto", timeout: float | None = None) -> torch.device:
    """Joins the job that torchrun, srun or mpirun started, or makes a world of one, and returns this rank's device.

    Args:
        device: "auto": this machine's accelerator (`torch.accelerator`), or the CPU where there is none; or a device
            type: "cpu" (gloo), "cuda" (NCCL), "xla" (torch_xla: Neuron, TPU, CPU), "neuron", "xpu" or any other for
            which torch.distributed has a backend. The index of the device is LOCAL_RANK.
        timeout: seconds before a rendezvous or a collective gives up, which is the longest that ranks may wait for a
            slow one (that reads a checkpoint, or compiles); None: 10 minutes, and torch's default on XLA.

    Raises:
        ValueError: this machine has no such device, torch.distributed has no backend for it, LOCAL_RANK is beyond the
            number of devices, another process uses the device, which takes one process, or mpirun started ranks on
            several hosts without MASTER_ADDR.
    """
    launchers.export_place()
    device_type = backends.local_device.device_type(device)
    if device_type == XLA:
        if importlib.util.find_spec("torch_xla") is None:
            raise ValueError(
                "device 'xla' needs torch_xla, which is not installed: pip install torch==2.9.0 torch_xla==2.9.0"
            )
        return backends.xla.join(timeout)
    backend = backends.local_device.backend_of(device_type)
    selected = backends.local_device.select_early(device_type)
    if not dist.is_initialized():
        limit = backends.c10d.DEFAULT_TIMEOUT if timeout is None else datetime.timedelta(seconds=timeout)
        options: dict[str, Any] = {"timeout": limit}
        if "RANK" not in os.environ:
            options.update(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            options.update(local_store.of_environment(limit))
        dist.init_process_group(backend, **options)
    if selected is None:
        selected = backends.local_device.select(device_type)
    backends.local_device.claim(selected)
    return selected


@atexit.register  # at import: runs after functions that scripts register, which may end torch.distributed
def _end_gloo() -> None:
    """Ends gloo's threads while they can still run Python, whatever groups the script has destroyed.

    A thread that drops the last reference to a collective's tensors after that aborts the process: "terminate called".
    After an uncaught exception the threads are left alone: a running collective may wait for other ranks.
    """
    has_failed = hasattr(sys, "last_value")
    if has_failed or backends.xla.in_use() or (dist.is_initialized() and dist.get_backend() != "gloo"):
        return
    disconnect()
    if dist.is_initialized():
        dist.destroy_process_group()
    backends.c10d.let_go_of_groups()


def world() -> tuple[int, int]:
    """Returns the number of ranks of the job, and the number of this rank.

    Raises:
        RuntimeError: the job has not been joined; the message says what to call.
    """
    if backends.xla.in_use():
        return backends.xla.world()
    if not dist.is_initialized():
        raise RuntimeError(
            "initialize_model_parallel needs torch.distributed: call torch.distributed.init_process_group(backend="
            f"{' or '.join(map(repr, backend_names))}), or neuronx_dist.init_distributed(), first"
        )
    return dist.get_world_size(), dist.get_rank()


def end_step() -> None:
    """Runs the program that was built since the last call, on XLA; does nothing elsewhere.

    Called after every optimizer step: otherwise each program would contain all steps before it and be compiled anew.
    """
    if backends.xla.in_use():
        backends.xla.run_program()


def connect(mesh: Mesh, *, timeout: float | None = None, lazy: bool = False) -> None:
    """Makes this process a rank of `mesh`: its communicators, and the watch for other ranks' failures.

    Args:
        timeout: seconds after which a collective gives up on a silent rank; None: the timeout of
            init_process_group if there is one, or 10 minutes.
        lazy: make each process group at its first use, which all members reach in the same order.
    """
    if backends.xla.in_use():
        backends.xla.connect(mesh)
        return
    backend = backends.torch_job.connect(timeout)
    job_context = context.Context(mesh, dist.get_rank(), backend)
    try:
        for axis in () if lazy else _EAGER_AXES:
            job_context.communicator(axis)
    except BaseException:
        if backend.monitor is not None:
            backend.monitor.stop()
        raise
    context.set_default(job_context)


def disconnect() -> None:
    """Destroys the process groups that `connect` made, ends the watch, and forgets the mesh. May be called twice."""
    job_context = context.default()
    if job_context is not None and isinstance(job_context.backend, backends.xla.XlaBackend):
        backends.xla.disconnect()
        return
    context.set_default(None)
    if job_context is not None:
        job_context.backend.close()
