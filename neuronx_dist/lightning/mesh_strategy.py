"""The part of a strategy that knows the mesh: which processes train together, on which device; what they exchange."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from .. import comm
from ..comm.backends import local_device
from ..gradients.gradient import DATA_AXES
from ..parallel_layers import parallel_state
from .accelerator import NeuronXLAAccelerator

__all__ = ["MeshStrategy"]


class MeshStrategy(ParallelStrategy):
    """A strategy over a mesh of tensor, pipeline, context, expert and data parallelism.

    It joins the job that torchrun or `neuronx-dist run` started, on any device, unless the script has; in a script that
    runs by itself Lightning starts the other processes of `Trainer(devices=)`. Lightning
    divides samplers over the data-parallel ranks, and shuffles for training, but for those that are a
    `DistributedSampler`.

    Args:
        tp, pp, cp, ep: degrees; the rest of the ranks is dp.
        device: as of `init_distributed`.
        lnc_size: as NxD has it.
        checkpoint_io: Lightning's plugin for files.
    """

    reduced_axes: Any = DATA_AXES

    def __init__(
        self, tp: int, pp: int, cp: int, ep: int, *, device: str = "auto", lnc_size: int = 1, checkpoint_io: Any = None
    ) -> None:
        super().__init__(accelerator=NeuronXLAAccelerator(), checkpoint_io=checkpoint_io)
        self.tp, self.pp, self.cp, self.ep = tp, pp, cp, ep
        self.device, self.lnc_size = device, lnc_size

    # --- which processes ---

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def root_device(self) -> torch.device:
        if comm.is_initialized():
            return comm.current().backend.device
        return torch.device(local_device.device_type(self.device))

    @property
    def global_rank(self) -> int:
        return (
            comm.current().rank
            if comm.is_initialized()
            else int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
        )

    @property
    def world_size(self) -> int:
        return comm.size("world") if comm.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": comm.size("dp"), "rank": comm.rank("dp")}

    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by the data-parallel rank, so that all ranks of a replica get equal augmentations."""
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=comm.rank("dp"))
        return dataloader

    @property
    def num_processes(self) -> int:
        """Processes of this host, as `Trainer(devices=)` says, or torchrun."""
        return len(self.parallel_devices or [])

    def _configure_launcher(self) -> None:
        """Starts the script again for each device but one, unless torchrun has started processes."""
        if "RANK" not in os.environ and self.num_processes > 1:
            assert self.cluster_environment is not None
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, num_nodes=1)

    def setup_environment(self) -> None:
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            os.environ.update(RANK=os.environ["LOCAL_RANK"], LOCAL_WORLD_SIZE=str(self.num_processes))
        self.setup_distributed()
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Joins the job and makes the mesh, as far as the script has not.

        Raises:
            RuntimeError: there is a mesh, of other sizes.
        """
        if not torch.distributed.is_initialized():
            comm.launch.init_distributed(self.device)
        parallel_state.initialize_model_parallel(
            self.tp,
            self.pp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            lnc_size=self.lnc_size,
        )
        rank_zero_only.rank = self.global_rank
        if self.lightning_module is not None:
            for logger in self.lightning_module.trainer.loggers:
                _ = logger.version  # counted from folders: on all ranks, before one of them makes the next
        self.barrier("setup_distributed")

    def teardown(self) -> None:
        """Leaves the model on its device, and the job running."""
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()

    # --- what ranks tell one another ---

    def barrier(self, name: str | None = None) -> None:
        if comm.is_initialized():
            comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank `src`'s object; before the mesh is made, this rank's."""
        return comm.broadcast_object(obj, src=src) if comm.is_initialized() else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Returns the mean, sum, maximum or minimum of a number or tensor over the data, whatever the group.

        Raises:
            ValueError: another operation.
        """
        operation = "sum" if reduce_op in (None, ReduceOp.SUM) else str(reduce_op).lower().replace("avg", "mean")
        if operation not in ("sum", "mean", "max", "min"):
            raise ValueError(
                f"{type(self).__name__}.reduce: reduce_op is 'sum', 'mean', 'max' or 'min', got {reduce_op!r}"
            )
        if not isinstance(tensor, torch.Tensor):
            tensor = torch.tensor(tensor)
        verb = "sum" if operation == "mean" else operation
        total = comm.all_reduce(tensor.to(self.root_device), self.reduced_axes, op=verb)
        return total / comm.size(self.reduced_axes) if operation == "mean" else total

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Returns the tensors of the data-parallel ranks, or of a process group but the world's: `[ranks, ...]`.

        `LightningModule.all_gather` passes the world's where its caller passes none.
        """
        if group in (None, torch.distributed.group.WORLD):
            group = parallel_state.get_data_parallel_group()
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all ranks of the job, or any of them, decided so."""
        agreeing = comm.all_reduce(torch.tensor(int(decision), device=self.root_device), "world")
        return bool(agreeing == comm.size("world")) if all else bool(agreeing)
