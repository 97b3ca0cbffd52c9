"""Installs the import name `spmd_types`: `import spmd_types as spmd` imports `neuronx_dist.spmd` from then on.

    import neuronx_dist.compat.spmd_types  # before the first import of spmd_types

`docs/type-system.md` has the table of differences from the published package. Private modules of the package
(`spmd_types._checker`) are not there; of its public ones `checker`, `rules`, `runtime` and `types` are.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .. import spmd
from ..spmd import type_rules

__all__ = ["install"]


def install() -> None:
    """Makes `spmd_types` this package's `spmd` in this process.

    Raises:
        RuntimeError: the published package is imported already: two checkers would follow the same tensors.
    """
    present = sys.modules.get("spmd_types")
    if present is not None and present is not spmd:
        raise RuntimeError(
            f"spmd_types is imported already, from {getattr(present, '__file__', None)}: import "
            "neuronx_dist.compat.spmd_types before anything that imports spmd_types"
        )
    modules: dict[str, ModuleType] = {
        "spmd_types": spmd,
        "spmd_types.checker": spmd.checker,
        "spmd_types.rules": type_rules,
        "spmd_types.runtime": spmd,
        "spmd_types.types": spmd,
    }
    sys.modules.update(modules)


install()
