"""Checkpoints of `Trainer`: a folder for `from_pretrained`, and beside it the run's state for any layout.

checkpoint-500/
    config.json, model.safetensors, ...    of `hf.save_pretrained`; of a `LoraModel` PEFT's files of its adapters
    state/                                 of `save_checkpoint`: model, optimizer, scheduler, random generators
    trainer_state.json                     Trainer's, written last
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ... import comm
from ...checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint
from ...checkpoint.random_state import capture, restore
from ...modules.lora import LoraConfig, LoraModel
from ...modules.lora.files import load_adapters, save_adapters
from ..swap import is_swapped
from ..weights import load_pretrained, save_pretrained

if TYPE_CHECKING:
    from transformers import Trainer as TrainerMethods
else:
    TrainerMethods = object  # `Trainer` has both as bases

__all__ = ["CheckpointsMixin"]

_TAG = "state"
_TRAINER_STATE = "trainer_state.json"


class CheckpointsMixin(TrainerMethods):
    """Saves and loads the runs of a Trainer; all ranks call each method.

    Attributes:
        lora_config: of the `LoraModel` that Trainer got, of which `model` is the model inside; None: it got another.
    """

    lora_config: LoraConfig | None = None

    def _without_adapters(self, model: Any) -> Any:
        """Returns the model inside of a `LoraModel`, which has the signature and the names that Trainer reads."""
        if not isinstance(model, LoraModel):
            return model
        self.lora_config = model.lora_config
        return model.get_base_model()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that `from_pretrained` loads, or adapters in PEFT's format."""
        folder = output_dir or self.args.output_dir
        if not isinstance(self.model, transformers.PreTrainedModel) and not is_swapped(self.model):
            super().save_model(folder, _internal_call)
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save:  # before `save_pretrained`, for which all ranks wait
            os.makedirs(folder, exist_ok=True)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.lora_config is None:
            save_pretrained(self.pipeline or self.model, folder, tokenizer)
            return
        if self.args.should_save and tokenizer is not None:
            tokenizer.save_pretrained(folder)
        save_adapters(self.pipeline or self.model, self.lora_config, folder)

    def _load_weights(self, folder: str) -> None:
        """Loads what `save_model` wrote."""
        model: Any = self.pipeline or self.model
        if self.lora_config is None:
            load_pretrained(model, folder)
        else:
            load_adapters(model, self.lora_config, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        content = {"rows": self.get_total_train_batch_size(self.args)}
        model, optimizer = self.pipeline or self.model, self.optimizer
        save_checkpoint(output_dir, _TAG, model, optimizer, self.lr_scheduler, user_content=content)

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: `save_checkpoint` saves random generators."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not has_checkpoint(resume_from_checkpoint):  # else `_load_optimizer_and_scheduler` loads the weights too
            self._load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not has_checkpoint(checkpoint):
            if comm.rank("world") == 0:
                warnings.warn(
                    f"{checkpoint} has no folder {_TAG}/, as after save_only_model=True: only weights were loaded, and "
                    "the optimizer and the scheduler start anew",
                    stacklevel=2,
                )
            return
        model, optimizer = self.pipeline or self.model, self.optimizer
        content = load_checkpoint(checkpoint, _TAG, model, optimizer, self.lr_scheduler)
        self._random_state = capture()
        rows = self.get_total_train_batch_size(self.args)
        if content["rows"] != rows and comm.rank("world") == 0 and not self.args.ignore_data_skip:
            warnings.warn(
                f"{checkpoint} counts steps of {content['rows']} rows, and this run makes steps of {rows}: it goes on "
                "at another row. Keep per_device_train_batch_size x gradient_accumulation_steps x dp, or pass "
                "ignore_data_skip=True",
                stacklevel=2,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Sets random generators again: batches that are skipped have drawn numbers."""
        if checkpoint is not None and hasattr(self, "_random_state"):
            restore(self._random_state)

    def _load_best_model(self) -> None:
        folder, model = self.state.best_model_checkpoint, self.pipeline or self.model
        if has_checkpoint(folder):
            load_checkpoint(folder, _TAG, model)
        else:
            self._load_weights(folder)
        self.optimizer.init_zero()


def _newest(folder: str) -> str:
    """Returns the checkpoint with the most steps that is complete.

    Raises:
        ValueError: there is none.
    """
    steps = {}
    for path in Path(folder).glob("checkpoint-*"):
        name = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if name and (path / _TRAINER_STATE).is_file():
            steps[int(name[1])] = str(path)
    if not steps:
        raise ValueError(f"resume_from_checkpoint=True: {folder} has no complete checkpoint-N: train without it first")
    return steps[max(steps)]
