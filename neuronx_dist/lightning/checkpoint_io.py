"""Lightning's checkpoints: a folder with a file for each rank, in the place of one file.

epoch=0-step=100.ckpt/tp_rank_00_pp_rank_00/checkpoint.pt
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from ..parallel_layers.checkpointing import load, save

__all__ = ["NeuronCheckpointIO", "plain_hyperparameters"]

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")  # entries of `save_hyperparameters`


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
        """Writes this rank's part; hyperparameters that are no data, as classes, are left out with a warning.

        Args:
            master_dp_only: only data-parallel rank 0 writes; False: each does, as ZeRO-1 needs it.

        Raises:
            TypeError: `storage_options` are passed.
        """
        if storage_options is not None:
            raise TypeError(
                "NeuronCheckpointIO has no storage_options: Trainer.save_checkpoint takes a folder that all ranks reach"
            )
        checkpoint = plain_hyperparameters(checkpoint)
        save(checkpoint=checkpoint, output_dir=path, save_xser=self.save_load_xser, master_dp_only=master_dp_only)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], master_dp_only: bool = True) -> dict[str, Any]:
        """Returns this rank's part.

        Raises:
            FileNotFoundError: there is none: another layout, another folder, or ZeRO-1 is switched on or off since.
        """
        names = [path.name for path in Path(checkpoint_path).glob("tp_rank_*")]
        is_of_data_ranks = any("_dp_rank_" in name for name in names)
        if names and is_of_data_ranks == master_dp_only:
            was, now = ("with", "False") if is_of_data_ranks else ("without", "True")
            raise FileNotFoundError(
                f"NeuronCheckpointIO: {checkpoint_path} was saved {was} ZeRO-1, and the optimizer's state is not "
                f"converted: resume with the same optimizer_config (zero_one_enabled is {now} here), or load the "
                "weights alone: parallel_layers.checkpointing.load(path, module, model_key='state_dict', "
                f"master_dp_only={not is_of_data_ranks})"
            )
        content: dict[str, Any] = load(
            chkpt_path=checkpoint_path,
            load_xser=self.save_load_xser,
            master_dp_only=master_dp_only,
            weights_only=self.weights_only,
        )
        return content


def plain_hyperparameters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint without the hyperparameters that are no data, as classes; a warning names them."""
    return {key: _loadable(value) if key in _HYPERPARAMETERS else value for key, value in checkpoint.items()}


def _loadable(hyperparameters: Any) -> dict[str, Any]:
    """Returns the hyperparameters that a file can be read with without running code in it."""
    result = {}
    for name, value in hyperparameters.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # pickle's are of several classes
            warnings.warn(
                f"a checkpoint leaves out the hyperparameter {name!r}, a {type(value).__name__} that is no data "
                f"({type(error).__name__}): pass save_hyperparameters(ignore=[{name!r}]), or save its name",
                stacklevel=3,
            )
        else:
            result[name] = value
    return result
