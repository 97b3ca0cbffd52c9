"""Evaluation of a recorded call: it runs on fake tensors, or on values where fake tensors do not suffice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..torch_internals.fake_tensors import LOGGER, DataDependentOutputException, DynamicOutputShapeException
from ..torch_internals.modules import call_with_hooks
from .effects import Effects
from .fake_mode import QuietFakeMode
from .on_values import run_on_values
from .recording import TracingError

__all__ = ["Evaluation", "name_of"]

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_READS_VALUES = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.tolist}

_LOG = logging.getLogger(LOGGER)  # torch logs a failure on fake tensors as an error


def _silent(record: logging.LogRecord) -> bool:
    return False


class Evaluation:
    """Runs the calls of one recording.

    Attributes:
        device: the device that the model will run on.
        leaves: layers are recorded as one call.
        fake_mode: the mode of all fake tensors of this recording.
        originals: each real parameter or buffer, by the id of the fake tensor in its place.
    """

    def __init__(self, device: torch.device, leaves: bool) -> None:
        self.device = device
        self.leaves = leaves
        self.fake_mode = QuietFakeMode()
        self.originals: dict[int, torch.Tensor] = {}
        self._needs_values: set[Any] = set()  # classes of leaves, and functions, that cannot run on fake tensors

    def fake(self, x: torch.Tensor, requires_grad: bool, device: torch.device) -> torch.Tensor:
        """Returns a fake tensor like `x`, which is a leaf of autograd."""
        with self.fake_mode:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return fake.requires_grad_(requires_grad)

    def _evaluate(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool, where: str, target: Any
    ) -> tuple[Any, Effects]:
        """Runs one call on fake tensors, or on real ones if all values are known; returns the result and effects."""
        effects = Effects()
        if func in _READS_VALUES:
            if not known:
                raise _reads_values(func, where)
            return func(*args, **kwargs), effects
        try:
            with self.fake_mode, effects:
                result = func(*args, **kwargs)
        except _DATA_DEPENDENT as error:
            if not known:
                raise _reads_values(target, where) from error
        if known and not effects.random:
            result = func(*args, **kwargs)
        return result, effects

    def layer(
        self, layer: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
    ) -> tuple[Any, Effects]:
        """Runs a leaf module on fake tensors; a module with parameters for which that fails is run on values."""
        refused = Exception if next(layer.parameters(), None) is None else ()

        def run() -> tuple[Any, Effects]:
            return self._evaluate(call_with_hooks(layer), args, kwargs, False, where, name)

        return self._evaluate_or_on_values(run, type(layer), layer, args, kwargs, refused)

    def function(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool, where: str, target: Any
    ) -> tuple[Any, Effects]:
        """Runs a function on fake tensors; one that fails on them is run on values, unless it is torch's."""

        def run() -> tuple[Any, Effects]:
            return self._evaluate(func, args, kwargs, known, where, target)

        of_torch = getattr(getattr(func, "__self__", func), "__module__", None) or "torch"
        if known or self.leaves or func in _READS_VALUES:
            return run()
        refused = TracingError if of_torch.split(".")[0] == "torch" else ()
        return self._evaluate_or_on_values(run, func, func, args, kwargs, refused)

    def _evaluate_or_on_values(
        self,
        run: Callable[[], tuple[Any, Effects]],
        key: Any,
        layer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refused: Any = (),
    ) -> tuple[Any, Effects]:
        """Returns `run()`; if that fails, but for `refused` errors, runs `layer` on values, for `key` always."""
        failure: Exception | None = None
        if key not in self._needs_values:
            _LOG.addFilter(_silent)
            try:
                return run()
            except refused:
                raise
            except Exception as error:
                failure = error
            finally:
                _LOG.removeFilter(_silent)
        try:
            result = run_on_values(layer, args, kwargs, self.originals, self.device, self._like)
        except Exception:
            if failure is None:
                raise
            raise failure from None
        self._needs_values.add(key)
        return result

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor in the place of a result with values; like any result, it is no leaf of autograd."""
        fake = self.fake(x, x.requires_grad, self.device)
        with self.fake_mode:
            return fake.clone() if x.requires_grad else fake


def _reads_values(target: Callable[..., Any] | str, where: str) -> TracingError:
    if isinstance(target, str):
        return TracingError(
            f"{where}: layer {target} needs the values of a tensor, and is recorded as one call, in which no values "
            f"are known. If leaf_module_cls names its class, leave it out: what does not depend on the model's inputs "
            f"is then computed, and the forward may branch on it. Otherwise use torch.where or a mask."
        )
    if target is torch.nn.functional.ctc_loss:
        return TracingError(
            f"{where}: ctc_loss needs the values of its lengths, which a recording has not: call it in a function of "
            f"yours at the top level of a module, with reduction='none', and register that, as register_op('t^ n c^, "
            f"n s^, n, n -> n')(function), with targets [n, s] and the lengths as tensors that forward takes."
        )
    experts = name_of(target) in ("where", "nonzero", "unique", "argwhere")  # which tokens an expert has
    loop = ", or, for experts, to_experts, expert_product and to_tokens of neuronx_dist.program.experts"
    return TracingError(
        f"{where}: {name_of(target)} needs the values of a tensor that depends on the model's inputs. The forward is "
        f"recorded once for all batches of a shape, so it cannot branch on values: use torch.where(condition, a, b) or "
        f"a mask{loop if experts else ''}."
    )


def name_of(target: Callable[..., Any] | str) -> str:
    """Returns the name of a call's target, for messages."""
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))
