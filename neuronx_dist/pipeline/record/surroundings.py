"""What a recording changes around a module for a while: all that its forward keeps, and its cache."""

from __future__ import annotations

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


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Switches `config.use_cache` off, as Hugging Face's models have it: a cache is of no use to a pipeline."""
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    changed = [c for c in configs.values() if getattr(c, "use_cache", False) is True]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
