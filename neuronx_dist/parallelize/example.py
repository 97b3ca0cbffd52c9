"""A module and example arguments of its forward, which every step of `parallelize` works on."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..program.decompose import decomposed
from ..program.program import Program
from ..program.record import record_program
from ..program.recording import TracingError, describe
from ..torch_internals.tensors import pytree

__all__ = ["Example", "synchronised_norms"]


def synchronised_norms(module: nn.Module) -> set[str]:
    """Returns the paths of all `nn.SyncBatchNorm`, whose statistics in training are over all units."""
    return {path for path, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)}


@dataclass(frozen=True)
class Example:
    """A module and the arguments of one call of its forward.

    Attributes:
        arguments: by name. Of a tensor, shape, dtype and `requires_grad` are used, and values only where a program is
            run.
        origin: the parameter of `parallelize` that the arguments come from, for messages.
    """

    module: nn.Module
    arguments: dict[str, Any]
    origin: str = "dummy_forward_args"

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @cached_property
    def flat(self) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of the arguments, and their structure."""
        return pytree.tree_flatten(self.arguments)

    @property
    def is_on_meta(self) -> bool:
        """Returns whether a parameter or buffer of the module is on meta."""
        return any(x.is_meta for x in (*self.module.parameters(), *self.module.buffers()))

    def program(self, *, training: bool) -> Program:
        """Records forward in a mode.

        Raises:
            TracingError: forward branches on values of tensors, or writes a tensor that it may not write.
            ValueError: forward fails on these arguments.
        """
        try:
            return decomposed(record_program(self.module, self.arguments, training=training))
        except TracingError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception, direction: str = "forward") -> ValueError:
        """Returns an error that says where forward (or backward) failed, and on which arguments."""
        frames = traceback.extract_tb(error.__traceback__)
        libraries = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
        lines = [f" at {frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(libraries)]
        advice = ""
        if "can only change requires_grad" in str(error):
            advice = (
                " Floating-point arguments have a gradient here, since other modules may stand before this one: freeze "
                "the part that sets requires_grad (freeze_feature_encoder() of transformers), or pass use_end2end=True."
            )
        return ValueError(
            f"{self.name}.{direction} fails on {self.origin} {describe(self.arguments)}{lines[-1] if lines else ''}: "
            f"{type(error).__name__}: {error}{advice}"
        )
