"""NxD's strategy for Lightning: for models and optimizers that `initialize_parallel_model` and `_optimizer` made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from .. import comm
from .checkpoint_io import NeuronCheckpointIO
from .logger import NeuronTensorBoardLogger
from .mesh_strategy import MeshStrategy
from .precision_plugin import NeuronXLAPrecisionPlugin

__all__ = ["NeuronXLAStrategy"]

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size")


class NeuronXLAStrategy(MeshStrategy):
    """Trains an `NeuronLTModule`, whose model and optimizer are those of NxD's trainer.

    Optimizers are those of `initialize_parallel_optimizer`, whose step reduces the gradients of
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

    reduced_axes = "world"  # stages without the loss add zeros
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
        sizes = (tensor_parallel_size, pipeline_parallel_size, expert_parallel_size, context_parallel_size)
        if nxd_config is not None:
            sizes = tuple(nxd_config[name] for name in _SIZES)
        tp, pp, ep, cp = sizes
        super().__init__(
            tp,
            pp,
            cp,
            ep,
            lnc_size=(nxd_config or {}).get("lnc_size", 1),
            checkpoint_io=checkpoint_io or NeuronCheckpointIO(save_load_xser=save_load_xser),
        )
        for name, size in zip(_SIZES, sizes):
            setattr(self, name, size)
        self.nxd_config = nxd_config
        self.debug = debug

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.data_parallel_rank, self.data_parallel_size = comm.rank("dp"), comm.size("dp")
        self.tensor_parallel_rank, self.pipeline_parallel_rank = comm.rank("tp"), comm.rank("pp")

    def model_to_device(self) -> None:
        """Does nothing: `initialize_parallel_model` has moved the model."""

    def on_validation_start(self) -> None:
        """Makes loggers write the metrics of validation too that starts inside of an accumulation."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for logger in trainer.loggers:
            if isinstance(logger, NeuronTensorBoardLogger):
                logger.start_validation(trainer.global_step)

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
