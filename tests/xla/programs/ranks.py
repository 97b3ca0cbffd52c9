"""A process that takes itself for one of many, over the real process groups of torch_xla. Nothing is executed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import neuronx_dist as nxd
from neuronx_dist import ColumnParallelLinear, comm, parallel_state
from neuronx_dist.comm import launch
from neuronx_dist.comm.errors import CommError


@contextlib.contextmanager
def one_of(size: int, rank: int) -> Iterator[None]:
    """Sets what torchrun and the runtime of `size` devices set for a process; the store needs no other rank."""
    import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend
    import torch_xla.runtime as xr
    from torch.testing._internal.distributed.fake_pg import FakeStore

    nxd.destroy_model_parallel()
    environment = {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with mock.patch.dict(os.environ, environment), mock.patch.multiple(xr, _WORLD_SIZE=size, _ORDINAL=rank):
        dist.init_process_group("xla", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            nxd.destroy_model_parallel()
            dist.destroy_process_group()
    nxd.initialize_model_parallel()


def lowered(*results: torch.Tensor) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(list(results))


def group_of(groups: list[list[int]], rank: int) -> list[int]:
    return next(group for group in groups if rank in group)


def groups(size: int, rank: int) -> dict[str, Any]:
    """The getters, and groups that a script makes for itself as NxD's users do."""
    with one_of(size, rank):
        device = nxd.init_distributed("xla")
        nxd.initialize_model_parallel(tensor_model_parallel_size=2)
        tp, dp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
        lists = parallel_state.get_data_parallel_group(as_list=True)
        mine = dist.new_group(group_of(lists, rank), pg_options={"xla_pg_options": {"mesh": lists}})
        found: dict[str, Any] = dict(
            classes={type(group).__name__ for group in (tp, dp, mine)},
            device=device.type,
            sizes=(tp.size(), dp.size(), dist.get_world_size(tp), dist.get_rank(dp)),
            meshes=(tp._mesh, dp._mesh, mine._mesh),
            again=parallel_state.get_tensor_model_parallel_group() is tp,
            pipeline=parallel_state.get_pipeline_model_parallel_group()._mesh,
            axes=(comm.communicator(tp).axis, comm.communicator(dp).axis, comm.communicator(mine).axis),
            ranks=(comm.communicator(tp).ranks, comm.communicator(mine).ranks, comm.rank(mine)),
            whole=comm.communicator(dist.group.WORLD).groups,
            lists=lists,
        )
        x = torch.ones(2, 4).to(device)
        layers = {}
        for name, group in (("getter", dp), ("script", mine)):
            torch.manual_seed(0)
            layer = ColumnParallelLinear(4, 8, gather_output=True, tensor_model_parallel_group=group)
            layers[name] = lowered(nxd.move_model_to_device(layer, device)(x))
        total = x * 2
        dist.all_reduce(total, group=dp)  # torch's own function, over the group that the getter gives
        return {**found, "layers": layers, "all_reduce": lowered(total)}


def refused(size: int, rank: int) -> dict[str, str]:
    """Messages for groups and worlds that cannot be."""
    found = {}
    with one_of(size, rank):
        nxd.initialize_model_parallel(tensor_model_parallel_size=2)
        mine = group_of(parallel_state.get_tensor_model_parallel_group(as_list=True), rank)
        others = [other for other in range(size) if other not in mine]
        for name, group in (
            ("own ranks only", dist.new_group(mine)),
            ("not a member", dist.new_group(others)),
            ("not of XLA", object()),
        ):
            try:
                comm.communicator(group)
            except TypeError as error:
                found[name] = str(error)
    nxd.destroy_model_parallel()
    with mock.patch.dict(os.environ, WORLD_SIZE=str(size)):  # torchrun's processes, each alone with its device
        try:
            launch.world()
        except CommError as error:
            found["alone"] = str(error)
    nxd.initialize_model_parallel()
    return found


def world_of_one() -> dict[str, Any]:
    """torchrun's environment of one process, and torch_xla's own rendezvous: nothing is faked."""
    nxd.destroy_model_parallel()
    with mock.patch.dict(os.environ, WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"):
        nxd.init_distributed("xla")
        nxd.initialize_model_parallel()
        group = parallel_state.get_tensor_model_parallel_group()
        layer = ColumnParallelLinear(4, 4, tensor_model_parallel_group=group).to("xla")
        out = layer(torch.ones(2, 4, device="xla"))
        found = dict(
            dist=(dist.get_backend(), dist.get_world_size(), dist.get_rank()),
            group=(type(group).__name__, group._mesh),
            out=out.detach().cpu().isfinite().all().item(),
        )
        nxd.destroy_model_parallel()
        dist.destroy_process_group()
    nxd.initialize_model_parallel()
    return found
