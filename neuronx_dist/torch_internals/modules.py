"""Members of `nn.Module` that torch does not make public, and methods of torch's classes that ours extend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.nn.modules.module import _IncompatibleKeys

# Names that stay as they are in all files, by the class that has them: slots, which torch's own guides assign to, and
# methods that subclasses override. Without them modules cannot be replaced, moved, saved or loaded.
EXTENDED: dict[str, tuple[str, ...]] = {
    "torch.nn.Module": (
        *("_parameters", "_buffers", "_modules"),
        *("_apply", "_save_to_state_dict", "_load_from_state_dict"),
    ),
    # What `neuronx-dist run` says when it starts ranks again.
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": ("_monitor_workers",),
}

# `BackwardHookFunction`, imported above, passes a module's tensors through, to find their gradients: without it the
# checker judges it as a function of the user.

IncompatibleKeys = _IncompatibleKeys  # the result of `load_state_dict`, with the same repr


def call_with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Returns what `module(...)` calls when nothing has been put in the place of `__call__`, as the recorder does."""
    return module._call_impl


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that state dicts leave out; without it checkpoints hold too much."""
    return module._non_persistent_buffers_set


def state_dict_metadata(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by prefix that travel with a state dict: versions, and our layouts. Empty if there are none."""
    return getattr(state_dict, "_metadata", {})
