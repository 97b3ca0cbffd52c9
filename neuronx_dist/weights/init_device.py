"""Building modules whose parameters take no memory, or lie on another device: `init_on_device("meta")`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..shared_context import Replacement

__all__ = ["init_on_device"]

_local = threading.local()  # .contexts: (device, parameters that were moved there) of this thread, the innermost last


@contextmanager
def init_on_device(device: str | torch.device, include_buffers: bool = False) -> Iterator[None]:
    """Inside, in this thread, modules get their parameters on `device` as they register them.

    Parameters on meta are given values later: by `materialize`, `load_pretrained`, `load_state_dict(assign=True)`,
    `to_empty`, or a pipeline model's `param_init_fn`. Buffers, such as rotary frequencies, have their values already.

    Args:
        device: "meta", or any other.
        include_buffers: buffers too, and all else that is made inside, as in `with torch.device(device):`.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return
    contexts = _local.__dict__.setdefault("contexts", [])
    with _replacement:
        contexts.append((torch.device(device), WeakIdKeyDictionary()))
        try:
            yield
        finally:
            contexts.pop()


def _register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    contexts = getattr(_local, "contexts", None)
    if contexts and param is not None and param.device != contexts[-1][0]:
        device, moved = contexts[-1]
        if param not in moved:  # a tied one is registered twice
            moved[param] = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
            moved[param].__dict__.update(param.__dict__)
        param = moved[param]
    _replacement.before["register_parameter"](module, name, param)


_replacement = Replacement(nn.Module, register_parameter=_register)
