"""What a recording changes around a module for a while: all that its forward keeps, and its cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["restored", "without_cache"]


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Takes back whatever a forward, run on fake tensors, keeps on its modules (caches, counters, buffers)."""
    tables = ("_parameters", "_buffers", "_modules")
    saved = [(m, dict(m.__dict__), {t: dict(m.__dict__[t]) for t in tables}) for m in module.modules()]
    try:
        yield
    finally:
        for m, attributes, contents in saved:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for table, content in contents.items():
                m.__dict__[table].clear()
                m.__dict__[table].update(content)


_recordings: Counter[int] = Counter()  # id of a config -> recordings at work that have switched its cache off
_lock = threading.Lock()


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Switches `config.use_cache` off, as Hugging Face's models have it: a cache is of no use to a pipeline.

    Ranks that are threads may have one config in common: the last one to leave switches it on again.
    """
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    with _lock:
        changed = {key: c for key, c in configs.items() if key in _recordings or getattr(c, "use_cache", False) is True}
        for key, config in changed.items():
            _recordings[key] += 1
            config.use_cache = False
    try:
        yield
    finally:
        with _lock:
            for key, config in changed.items():
                _recordings[key] -= 1
                if not _recordings[key]:
                    del _recordings[key]
                    config.use_cache = True
