"""Lightning's checkpoints: a folder with a file for each rank, in the place of one file.

epoch=0-step=100.ckpt/tp_rank_00_pp_rank_00/checkpoint.pt
"""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from ..parallel_layers.checkpointing import load, save

__all__ = ["NeuronCheckpointIO"]


class NeuronCheckpointIO(TorchCheckpointIO):
    """Writes and reads the checkpoints of `Trainer`; all ranks call each method.

    A checkpoint loads into the layout that it was saved in. `neuronx_dist.save_checkpoint(model=lightning_module)`
    writes one that loads into any layout.

    Args:
        save_load_xser, weights_only: as NxD has them, without effect: there is one format, and files are read without
            running code in them.
    """

    def __init__(self, save_load_xser: bool = True, weights_only: bool = False, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_load_xser = save_load_xser
        self.weights_only = weights_only

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
        master_dp_only: bool = True,
    ) -> None:
        """Writes this rank's part.

        Args:
            master_dp_only: only data-parallel rank 0 writes; False: each does, as ZeRO-1 needs it.

        Raises:
            TypeError: `storage_options` are passed.
        """
        if storage_options is not None:
            raise TypeError(
                "NeuronCheckpointIO has no storage_options: Trainer.save_checkpoint takes a folder that all ranks reach"
            )
        save(checkpoint=checkpoint, output_dir=path, save_xser=self.save_load_xser, master_dp_only=master_dp_only)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], master_dp_only: bool = True) -> dict[str, Any]:
        """Returns this rank's part."""
        content: dict[str, Any] = load(
            chkpt_path=checkpoint_path,
            load_xser=self.save_load_xser,
            master_dp_only=master_dp_only,
            weights_only=self.weights_only,
        )
        return content
