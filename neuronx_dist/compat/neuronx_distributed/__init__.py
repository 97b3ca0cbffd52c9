"""The import name `neuronx_distributed`; attributes are `neuronx_dist`'s, and NxD's modules.

utils/      NxD's small modules; kernels/: its attention kernels, as torch's functions; overrides/: rotary embeddings
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_package: Any = sys.modules[__name__.partition(".")[0]]
__version__ = _package.__version__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'neuronx_distributed' has no attribute {name!r}")
    try:
        return importlib.import_module(f"neuronx_distributed.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"neuronx_distributed.{name}":
            raise
        return getattr(_package, name)


def __dir__() -> list[str]:
    return dir(_package)
