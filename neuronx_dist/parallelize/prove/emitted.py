"""Imports emitted source without a file, for a check before anything is written."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from types import ModuleType

import torch

from ..config import ComputeConfig
from ..train.loaded_class import parallel_class
from ..train.parallel_module import ParallelModule

__all__ = ["imported"]


@contextmanager
def imported(
    source: str,
    size: int,
    weights: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    config: ComputeConfig | None = None,
) -> Iterator[type[ParallelModule]]:
    """Imports the class of an emitted source while the context lasts. Messages and tracebacks show its lines.

    Args:
        weights, constants: values of the tensors that the class stores.
        config: None: one unit of `size` ranks, not end2end; each rank holds all stages of a pipeline.
    """
    name = f"parallel_modules.checked_{sha256(source.encode()).hexdigest()[:16]}_{id(object()):x}"
    file = f"<{name}>"
    module = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
        emitted = parallel_class(module, config or ComputeConfig(size, size), lambda: weights or {}, constants or {})
        if config is None:
            emitted.RANKS = 1
        yield emitted
    finally:
        sys.modules.pop(name, None)
        linecache.cache.pop(file, None)
