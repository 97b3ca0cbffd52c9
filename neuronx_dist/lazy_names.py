"""Names of a package that are imported at their first use: `spmd.check`, `neuronx_dist.NxDPPModel`.

They keep `import neuronx_dist` light, and they are the only way in which a lower room names a higher one. The test of
the package's structure lists all such names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package.

    Args:
        package: its `__name__`.
        modules: name -> the module or package that holds it, relative to `neuronx_dist` ("" is `neuronx_dist`);
            `module:attribute` if the name differs there. A name may be a module of that package.

    Example:
        __getattr__ = lazy_names(__name__, {"check": "checking.api"})
    """
    root = __name__.partition(".")[0]

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, _, attribute = modules[name].partition(":")
        attribute = attribute or name
        holder = importlib.import_module(f"{root}.{path}") if path else None
        if holder is not None and holder.__name__ != package and hasattr(holder, attribute):
            value = getattr(holder, attribute)
        else:  # a module of the package
            value = importlib.import_module(".".join(filter(None, [root, path, attribute])))
        setattr(sys.modules[package], name, value)
        return value

    return resolve
