"""Temporary changes around a recorded module: its state is restored, its caches are off, nothing is communicated."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..comm.backends.shapes import ShapesBackend
from ..comm.base import Communicator
from ..comm.errors import CommError
from ..mesh import Mesh
from ..shared_context import Replacement
from .experts import experts_of_transformers
from .python_state import PythonState

__all__ = [
    "ShapesOfStage",
    "restored",
    "without_cache",
    "without_loops_over_experts",
    "without_memos",
    "without_synchronised_norms",
]


without_synchronised_norms = Replacement(nn.SyncBatchNorm, forward=nn.BatchNorm1d.forward)
"""A context in which each `nn.SyncBatchNorm` computes what it computes in one process, also in a job, and on CPU."""


class ShapesOfStage(ShapesBackend):
    """Computes shapes only, for collectives within a pipeline stage, and refuses collectives between stages.

    Each stage runs a part of the forward, so ranks of other stages would not take part in a collective.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        return self._checked(super().communicator(label, groups, global_rank, separate))

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        return self._checked(super().wrap(group, global_rank))

    def _checked(self, communicator: Communicator) -> Communicator:
        if len({self._mesh.coordinate("pp", rank) for rank in communicator.ranks}) == 1:
            return communicator
        return _BetweenStages(communicator.axis, communicator.ranks, communicator.global_rank)


class _BetweenStages(Communicator):
    """A communicator between stages, which knows its ranks and refuses to communicate."""

    def _unsupported(self, verb: str) -> CommError:
        return CommError(
            f"{self.describe(verb)} is between pipeline stages, in the forward of a pipeline model: only the stage "
            f"that has this call would join it, and would wait forever. Use an axis within a stage (tp, dp, cp), or "
            f"make the call outside the model."
        )


@contextmanager
def restored(module: nn.Module) -> Iterator[PythonState]:
    """Restores, on exit, the state of Python that forward can reach: caches, counters, hooks, attributes of objects.

    Models of transformers, for example, write the chosen loss to their config, and register forward hooks at the first
    call that returns hidden states.

    Yields:
        The state at the beginning.
    """
    state = PythonState(module)
    try:
        yield state
    finally:
        state.restore()


_recordings: Counter[tuple[int, str]] = Counter()  # (id of a config, attribute) -> number of recordings that changed it
_before: dict[tuple[int, str], Any] = {}  # by the same key the value before the first of them
_lock = threading.Lock()


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Switches off `config.use_cache`, the key/value cache of Hugging Face models, which a pipeline cannot use."""
    with _configured(module, "use_cache", (True,), False):
        yield


@contextmanager
def without_loops_over_experts(module: nn.Module) -> Iterator[None]:
    """Makes Hugging Face's experts compute by `experts.py`, in place of a loop over the experts with tokens.

    The loop asks for values. Other implementations, which compute the same, are replaced too.
    """
    known: Any = sys.modules.get("transformers.integrations.moe")
    if hasattr(known, "ALL_EXPERTS_FUNCTIONS"):
        known.ALL_EXPERTS_FUNCTIONS.register(_RECORDED, experts_of_transformers)
    with _configured(module, "_experts_implementation", ("eager", "grouped_mm", "batched_mm"), _RECORDED):
        yield


@contextmanager
def _configured(module: nn.Module, attribute: str, old: tuple[Any, ...], new: Any) -> Iterator[None]:
    """Replaces the values `old` of an attribute in all configs of the model.

    Setting an attribute of a config may set it in the configs inside, so that theirs are restored behind it. Ranks that
    are threads may share one config: the last rank to leave restores the value.
    """
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    with _lock:
        changed = [
            c for c in configs.values() if (id(c), attribute) in _recordings or getattr(c, attribute, None) in old
        ]
        saved = {(id(c), attribute): c for outer in changed for c in _nested(outer) if hasattr(c, attribute)}
        for key, config in saved.items():
            _before.setdefault(key, getattr(config, attribute))
            _recordings[key] += 1
        for config in changed:
            setattr(config, attribute, new)
    try:
        yield
    finally:
        with _lock:
            for key, config in saved.items():
                _recordings[key] -= 1
                if not _recordings[key]:
                    del _recordings[key]
                    setattr(config, attribute, _before.pop(key))


def _nested(config: Any) -> Iterator[Any]:
    """Yields a config, and then the configs inside."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _nested(inner)


_RECORDED = "neuronx_dist"  # the name of our implementation of experts
_running: list[None] = []  # one entry for each running recording


@functools.cache
def _ask_us_too(pytorch_utils: Any) -> None:
    is_compiling = pytorch_utils.is_torchdynamo_compiling
    pytorch_utils.is_torchdynamo_compiling = lambda: is_compiling() or bool(_running)


@contextmanager
def without_memos() -> Iterator[None]:
    """Makes methods of transformers compute what an `lru_cache` has, as under torch.compile.

    Otherwise a later forward of any model would get a tensor of the recording, which has no values (BEiT's positions).
    """
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    if hasattr(pytorch_utils, "is_torchdynamo_compiling"):
        _ask_us_too(pytorch_utils)
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
