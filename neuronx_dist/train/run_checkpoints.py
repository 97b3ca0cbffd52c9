"""Checkpoints of `neuronx-dist train`: `--save-every`, `--keep`, `--async-save`, `--resume`."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import comm
from ..checkpoint import api
from ..checkpoint.errors import CheckpointError, CheckpointMismatch
from .causal_lm import TrainingState

__all__ = ["RunCheckpoints", "folder_of"]

# What a resumed run computes depends on these. Another layout, or another way to save, changes nothing.
_FLAGS = "steps lr min_lr warmup weight_decay grad_clip dtype seed global_batch seq_len".split()
_NO_PART_OF_THE_MODEL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


class RunCheckpoints:
    """The checkpoints of one run, in the folder `checkpoints` of its `--out`. All ranks call its methods.

    Args:
        args: the flags of the run.
        config: of the model; a checkpoint of another one is refused.
        text: what identifies the text, in a few characters.
        say: prints a line on rank 0.
    """

    def __init__(self, args: Namespace, config: Any, text: str, say: Callable[[str], None]) -> None:
        self.folder = folder_of(args)
        self._args, self.say = args, say
        whole = json.loads(config.to_json_string(use_diff=False))
        self._record: dict[str, Any] = {
            "config": {name: value for name, value in whole.items() if name not in _NO_PART_OF_THE_MODEL},
            "flags": {name: getattr(args, name) for name in _FLAGS},
            "text": text,
        }
        self._saved = -1  # the last step whose checkpoint was begun and has not failed
        self._complete = -1  # the last step whose checkpoint is complete

    def after_step(self, step: int, state: TrainingState) -> None:
        """Saves when `--save-every` says so, and after the last step. When that fails, the training goes on."""
        every = self._args.save_every
        if every and (step % every == 0 or step == self._args.steps):
            start = time.perf_counter()
            if not (error := self.save(step, state)):
                seconds = f"{time.perf_counter() - start:.2f} s"
                written = f"copied in {seconds}, written in the background" if self._args.async_save else seconds
                self.say(f"checkpoint step_{step}: {written}")
            else:
                self.say(f"warning: training goes on without a checkpoint of step {step}: {error}")

    def save(self, step: int, state: TrainingState, finish: bool = False) -> str:
        """Saves a step, once; says why it could not.

        Args:
            finish: return when the checkpoint is complete, also with `--async-save`.
        """
        error = self._settle()
        if error:
            self.say(f"warning: {error}")
        if self._saved == step and not error:
            return ""
        try:
            api.save_checkpoint(
                self.folder,
                f"step_{step}",
                model=state.model,
                optimizer=state.optimizer,
                scheduler=state.schedule,
                user_content={"step": step, **self._record},
                num_kept_ckpts=self._args.keep or None,
                async_save=self._args.async_save and not finish,
            )
        except CheckpointError as failure:
            return str(failure)
        self._saved = step
        if finish or not self._args.async_save:
            self._complete = step
        return ""

    def finish(self) -> None:
        """Returns when nothing is being written any more."""
        if error := self._settle():
            self.say(f"warning: {error}")

    def left(self) -> str:
        """Returns the checkpoints to resume from."""
        if self._complete <= 0:
            return "there is no checkpoint (--save-every)"
        return f"step_{self._complete} is saved; go on with --resume --out {self._args.out}"

    def resume(self, state: TrainingState) -> int:
        """Loads what `--resume` names; returns the step that it was saved after, 0 for a new run.

        Raises:
            CheckpointError: there is none, or it is damaged, or of another model.
        """
        wanted = self._args.resume
        if wanted is None or (wanted == "auto" and not comm.broadcast_object(api.has_checkpoint(self.folder))):
            return 0
        options = [
            {name: group[name] for name in ("initial_lr", "weight_decay")} for group in state.optimizer.param_groups
        ]
        tag = None if wanted in ("", "auto") else wanted
        content = api.load_checkpoint(self.folder, tag, state.model, state.optimizer, state.schedule)
        step: int = content["step"]
        differences = _differences(content["config"], self._record["config"])
        if differences:
            raise CheckpointMismatch(
                f"checkpoint step_{step} in {self.folder} is of another model: {'; '.join(differences[:4])}"
            )
        self._apply(options, state)
        changed = [
            f"--{difference}".replace("_", "-") for difference in _differences(content["flags"], self._record["flags"])
        ]
        changed += ["the text"] * (content["text"] != self._record["text"])
        self.say(f"resumed after step {step}" + (f"; changed since then: {', '.join(changed)}" if changed else ""))
        self._saved = self._complete = step
        if tag is not None:  # the newest from now on, which a restart takes, and not one of the steps that are undone
            self._saved = -1
            self.save(step, state, finish=True)
        return step

    def _apply(self, options: list[dict[str, Any]], state: TrainingState) -> None:
        """Learning rate and weight decay of the flags, in the place of those that were saved."""
        state.schedule.base_lrs = [option["initial_lr"] for option in options]
        factors = [function(state.schedule.last_epoch) for function in state.schedule.lr_lambdas]
        for group, new_options, factor in zip(state.optimizer.param_groups, options, factors, strict=True):
            group.update(new_options, lr=new_options["initial_lr"] * factor)

    def _settle(self) -> str:
        """Waits for the save in the background; says what went wrong."""
        try:
            api.finalize_checkpoint()
        except CheckpointError as error:
            self._saved = self._complete
            return str(error)
        self._complete = self._saved
        return ""


def folder_of(args: Namespace) -> Path:
    return Path(args.out) / "checkpoints"


def _differences(saved: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`name 4 -> 8` for each value that differs."""
    names = sorted({*saved, *new})
    return [f"{name} {saved.get(name)} -> {new.get(name)}" for name in names if saved.get(name) != new.get(name)]
