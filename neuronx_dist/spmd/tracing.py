"""`trace`: one line of the log for each call of torch and each operator, with the types of operands and results."""

from __future__ import annotations

import logging
from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name

from ..call_site import call_site
from ..torch_internals.tensors import DisableTorchFunction
from .tensor_type import TensorType, tensors_in, type_of
from .watching import HANDLERS, active

__all__ = ["trace"]

_logger = logging.getLogger(__name__)


class trace(TorchFunctionMode):
    """Logs, in the `with`, each call with typed tensors at level INFO: `model.py:42  add({dp: R}, {dp: V}) -> {dp: V}`.

    Enter it inside of the check: `with spmd.SpmdTypeMode(), spmd.trace():`. The logger is `neuronx_dist.spmd.tracing`.

    Args:
        enabled: False: nothing is logged.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.enabled or active() is None or HANDLERS.get(func, self) is None:
            return result
        with DisableTorchFunction():
            operands = [type_of(x) for x in tensors_in([*args, *(kwargs or {}).values()])]
            results = [type_of(x) for x in tensors_in(result if isinstance(result, (list, tuple)) else [result])]
        if any(type_ is not None and type_.types for type_ in (*operands, *results)):
            name = getattr(func, "__name__", None) or resolve_name(func) or str(func)
            _logger.info("%s  %s(%s) -> %s", call_site(), name, _words(operands), _words(results))
        return result


def _words(types: list[TensorType | None]) -> str:
    return ", ".join("no type" if type_ is None else str(type_) for type_ in types)
