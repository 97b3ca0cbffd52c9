"""Lightning's strategy: which processes train together, on which device, and how their state is saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from .. import comm
from ..comm.backends import local_device
from ..parallel_layers import parallel_state
from .accelerator import NeuronXLAAccelerator
from .checkpoint_io import NeuronCheckpointIO
from .logger import NeuronTensorBoardLogger
from .precision_plugin import NeuronXLAPrecisionPlugin

__all__ = ["NeuronXLAStrategy"]

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size")


class NeuronXLAStrategy(ParallelStrategy):
    """Trains over a mesh of tensor, pipeline, context, expert and data parallelism.

    It joins the job that torchrun or `neuronx-dist run` started, on any device, unless the script has. Lightning
    divides samplers over the data-parallel ranks, and shuffles for training, but for those that are a
    `DistributedSampler`. Optimizers are those of `initialize_parallel_optimizer`, whose step reduces the gradients of
    all ranks.

    Args:
        nxd_config: of `neuronx_distributed_config`, whose degrees are used; None: the four sizes.
        debug, sync_module_states: as NxD has them, without effect: initial weights are equal on ranks that share them.
        checkpoint_io: a `NeuronCheckpointIO`; None: one with `save_load_xser`.

    Attributes:
        data_parallel_rank, data_parallel_size, tensor_parallel_rank, pipeline_parallel_rank: of this rank, once the
            mesh is made.

    Raises:
        NotImplementedError: another kind of checkpoint_io.
    """

    data_parallel_rank: int
    data_parallel_size: int
    tensor_parallel_rank: int
    pipeline_parallel_rank: int

    def __init__(
        self,
        nxd_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        context_parallel_size: int = 1,
        debug: bool = False,
        sync_module_states: bool = False,
        checkpoint_io: NeuronCheckpointIO | None = None,
        save_load_xser: bool = True,
    ) -> None:
        if checkpoint_io is not None and not isinstance(checkpoint_io, NeuronCheckpointIO):
            raise NotImplementedError(
                f"NeuronXLAStrategy(checkpoint_io={type(checkpoint_io).__name__}): only a NeuronCheckpointIO writes "
                "each rank's part"
            )
        super().__init__(
            accelerator=NeuronXLAAccelerator(),
            checkpoint_io=checkpoint_io or NeuronCheckpointIO(save_load_xser=save_load_xser),
        )
        sizes = (tensor_parallel_size, pipeline_parallel_size, expert_parallel_size, context_parallel_size)
        if nxd_config is not None:
            sizes = tuple(nxd_config[name] for name in _SIZES)
        for name, size in zip(_SIZES, sizes):
            setattr(self, name, size)
        self.nxd_config = nxd_config
        self.debug = debug

    # --- which processes ---

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def root_device(self) -> torch.device:
        if comm.is_initialized():
            return comm.current().backend.device
        return torch.device(local_device.device_type("auto"))

    @property
    def global_rank(self) -> int:
        return comm.current().rank if comm.is_initialized() else int(os.environ.get("RANK", 0))

    @property
    def world_size(self) -> int:
        return comm.size("world") if comm.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": comm.size("dp"), "rank": comm.rank("dp")}

    def setup_environment(self) -> None:
        self.setup_distributed()
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Joins the job and makes the mesh, as far as the script has not.

        Raises:
            RuntimeError: there is a mesh, of other sizes.
        """
        if not torch.distributed.is_initialized():
            comm.launch.init_distributed()
        sizes = {name.replace("_parallel", "_model_parallel"): getattr(self, name) for name in _SIZES[:3]}
        parallel_state.initialize_model_parallel(
            **sizes,
            context_parallel_size=getattr(self, _SIZES[3]),
            lnc_size=(self.nxd_config or {}).get("lnc_size", 1),
        )
        rank_zero_only.rank = self.global_rank
        self.data_parallel_rank, self.data_parallel_size = comm.rank("dp"), comm.size("dp")
        self.tensor_parallel_rank, self.pipeline_parallel_rank = comm.rank("tp"), comm.rank("pp")
        if self.lightning_module is not None:
            for logger in self.lightning_module.trainer.loggers:
                _ = logger.version  # counted from folders: on all ranks, before one of them makes the next
        self.barrier("setup_distributed")

    def model_to_device(self) -> None:
        """Does nothing: `initialize_parallel_model` has moved the model."""

    def on_validation_start(self) -> None:
        """Makes loggers write the metrics of validation too that starts inside of an accumulation."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for logger in trainer.loggers:
            if isinstance(logger, NeuronTensorBoardLogger):
                logger.start_validation(trainer.global_step)

    def teardown(self) -> None:
        """Leaves the model on its device, and the job running."""
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()

    # --- precision ---

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or NeuronXLAPrecisionPlugin()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if type(plugin) is Precision:  # of Trainer's default
            plugin = NeuronXLAPrecisionPlugin()
        if plugin is not None and not isinstance(plugin, NeuronXLAPrecisionPlugin):
            raise TypeError(
                f"NeuronXLAStrategy takes a NeuronXLAPrecisionPlugin, got {type(plugin).__name__}: leave out "
                "Trainer(precision=), and build the model in its dtype"
            )
        self._precision_plugin = plugin

    # --- what ranks tell one another ---

    def barrier(self, name: str | None = None) -> None:
        if comm.is_initialized():
            comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank `src`'s object; before the mesh is made, this rank's."""
        return comm.broadcast_object(obj, src=src) if comm.is_initialized() else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Returns the sum or the mean of a number or tensor over all ranks, whatever the group.

        Raises:
            ValueError: another operation.
        """
        operation = "sum" if reduce_op in (None, ReduceOp.SUM) else str(reduce_op).lower()
        if operation not in ("sum", "mean", "avg"):
            raise ValueError(f"NeuronXLAStrategy.reduce: reduce_op is 'sum', 'mean' or 'avg', got {reduce_op!r}")
        if not isinstance(tensor, torch.Tensor):
            tensor = torch.tensor(tensor)
        total = comm.all_reduce(tensor.to(self.root_device), "world")
        return total if operation == "sum" else total / self.world_size

    # --- checkpoints ---

    @property
    def _one_rank_has_all(self) -> bool:
        """Whether data-parallel ranks hold the same state; shards of ZeRO-1 are not."""
        return not (self.nxd_config or {}).get("optimizer_config", {}).get("zero_one_enabled", False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes this rank's part; all ranks call it."""
        self._io.save_checkpoint(checkpoint, filepath, storage_options, master_dp_only=self._one_rank_has_all)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._io.load_checkpoint(checkpoint_path, master_dp_only=self._one_rank_has_all)

    @property
    def _io(self) -> NeuronCheckpointIO:
        assert isinstance(self.checkpoint_io, NeuronCheckpointIO)
        return self.checkpoint_io
