"""Copies of the tensors that a rank writes, in memory that all saves use, most of them copied beside the run.

Parameters and the optimizer's state do not change between two steps, so they are copied in the background, and the next
step waits for the copies that are missing (CheckFreq: Mohan, Phanishayee and Chidambaram, FAST 2021); so does a
`load_state_dict`. All else is copied at once. Version counters of tensors show if other code changed a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import accelerator
from ...torch_internals.tensors import version_of
from ..errors import CheckpointError

__all__ = ["StagedCopy", "Staging", "changes_in_step_only"]


class StagedCopy(NamedTuple):
    """A tensor, and a tensor of equal shape that it is copied to."""

    target: torch.Tensor
    source: torch.Tensor


def changes_in_step_only(source: torch.Tensor, storages: Collection[int]) -> bool:
    """Returns whether a tensor lies in one of these storages (by address), and a thread can copy it."""
    if source.is_inference() or not accelerator.is_copied_aside(source.device.type):
        return False
    return source.untyped_storage().data_ptr() in storages


class _Wait:
    """A hook that waits for an event. In a copy of the hooked module it does not wait."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self._event = event

    def __call__(self, *_: Any) -> None:
        if self._event is not None:
            self._event.wait()

    def __reduce__(self) -> tuple[type[_Wait], tuple[()]]:
        return _Wait, ()


class Staging:
    """Copies made by a background thread; the optimizer's next step, or `load_state_dict`, waits for them.

    Args:
        buffer: the memory of all copies.
        copies: to be made in the background.
        optimizer: changes the sources in its step.
        model: has the sources among its parameters.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        copies: Sequence[StagedCopy],
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module | None = None,
    ) -> None:
        self.buffer = buffer
        self._copies = [(copy, version_of(copy.source)) for copy in copies]
        self._copied = threading.Event()
        self._streams: list[tuple[Any, Any]] = []  # modules of accelerators, with an event on the current stream
        self._hooks: list[Any] = []
        wait = _Wait(self._copied)
        if optimizer is not None and copies:
            self._hooks.append(optimizer.register_step_pre_hook(wait))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(wait))
        if model is not None and copies:
            self._hooks += [module.register_load_state_dict_pre_hook(wait) for module in model.modules()]
        for device_type in {copy.source.device.type for copy in copies} - {"cpu"}:
            module = accelerator.module_of(device_type)
            event = module.Event()  # the copies start after the computation of their sources
            event.record()
            self._streams.append((module, event))
        if not copies:
            self._copied.set()

    def finish(self) -> None:
        """Makes the copies; called in the background.

        Raises:
            CheckpointError: a tensor was changed before it was copied.
        """
        try:
            with ExitStack() as stack:
                for module, event in self._streams:
                    stream = module.Stream()
                    stream.wait_event(event)
                    stack.enter_context(module.stream(stream))
                self._copy()
        finally:
            self._copies = []
            self._copied.set()

    def close(self) -> None:
        """Removes the hooks that make the optimizer and the model wait."""
        self._copied.set()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _copy(self) -> None:
        changed = []
        for (target, source), version in self._copies:
            target.copy_(source, non_blocking=True)
            if source.device.type != "cpu":
                accelerator.module_of(source.device.type).current_stream().synchronize()
            if version_of(source) != version:
                changed.append(tuple(source.shape))
        if changed:
            raise CheckpointError(
                f"{len(changed)} tensors of the model or the optimizer were modified while they were copied, by "
                f"something other than optimizer.step() and load_state_dict(); the first has shape {changed[0]}: "
                "call finalize_checkpoint() before modifying them, or save with async_save=False"
            )
