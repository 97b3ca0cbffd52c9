"""Functions that `torch.jit` compiled: a check runs the Python function of each.

A mode sees no call of TorchScript's interpreter. torch keeps the Python function of a scripted or traced function for
torch.compile, as `_torchdynamo_inline`. A compiled module has no such attribute, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....call_site import call_site
from ....spmd.errors import SpmdTypeError
from ....spmd.watching import active
from ....torch_internals.operators import python_function, script_classes, wrap_script_module

__all__ = ["install", "remove"]


def _run(function: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a scripted function or method; under a check, its Python function.

    Raises:
        SpmdTypeError: a check is active, and there is no Python function.
    """
    if active() is None:
        return original(function, *args, **kwargs)
    unscripted = python_function(function)
    if unscripted is None:
        owner = getattr(function, "owner", None)
        name = function.name if owner is None else wrap_script_module(owner).original_name
        raise SpmdTypeError(
            f"{name} at {call_site()} was compiled by torch.jit",
            "the checker sees the functions that Python calls, but not those that TorchScript calls",
            repairs=[
                f"call {name} as it was before torch.jit, which deprecates TorchScript",
                "with spmd.no_typecheck(): around the call, and spmd.assert_type(result, {...}) after it",
            ],
            rule="scripted",
        )
    return unscripted(*args, **kwargs)


_CLASSES = script_classes
_originals = {cls: cls.__call__ for cls in _CLASSES}


def install() -> None:
    """Changes the calls of scripted functions in threads that check types."""
    for cls, original in _originals.items():

        def call(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            return _run(self, original, args, kwargs)

        cls.__call__ = call  # type: ignore[method-assign]


def remove() -> None:
    """Gives the calls of scripted functions back to torch."""
    for cls, original in _originals.items():
        cls.__call__ = original  # type: ignore[method-assign]
