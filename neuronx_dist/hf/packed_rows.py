"""Rows of packed documents in a swapped model: a token sees its document only, or the rows are refused.

transformers finds documents by `position_ids` that restart, where its masks get them, and where there is no cache.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import comm

__all__ = ["separate_documents"]

# Words of `config.layer_types` whose layers see the mask, or one token at a time.
_SEPARATED = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp"}
_IMPLEMENTATION = "_attn_implementation"  # attribute of configs
_MASK = re.compile(r"create_\w*mask\w*\([^)]*\)")


def separate_documents(model: nn.Module) -> None:
    """Adds the hook of the model that switches its cache off, or refuses rows which it takes for one document."""
    names = list(inspect.signature(model.forward).parameters)
    hook = partial(_without_cache, names, "" if comm.size("cp") > 1 else _reason(model))
    model.register_forward_pre_hook(hook, with_kwargs=True)


def _reason(model: Any) -> str:
    """Returns why the model's tokens see other documents of a row; "" if they do not, or if nothing is known."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return ""
    others = {*(getattr(config.get_text_config(), "layer_types", None) or ())} - _SEPARATED
    if others or getattr(model, "_is_stateful", False):
        return f"has layers that mix all tokens of a row ({', '.join(sorted(others)) or 'with a state'})"
    classes = {one.__module__ for module in model.modules() for one in type(module).__mro__}
    modules = [sys.modules[name] for name in classes if name.startswith("transformers.models.")]
    source = "".join(map(inspect.getsource, modules)).replace("text_position_ids", "")  # of `[4, b, s]` alone
    calls = _MASK.findall(source)
    named = '"position_ids": position_ids' in source  # of create_causal_mask(**arguments)
    if calls and not named and not any("position_ids=position_ids" in call for call in calls):
        return "makes masks without position_ids"
    of_transformers = {type(module) for module in model.modules() if sys.modules[type(module).__module__] in modules}
    forwards = [inspect.getsource(one.forward) for one in of_transformers]
    if any("DynamicCache(" in forward and "use_cache" not in forward for forward in forwards):
        return "always has a cache"
    return ""


def _without_cache(names: list[str], reason: str, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward pre-hook of the model: calls with `position_ids`, in training or for a loss, get `use_cache=False`.

    With a cache, the default of most configs, transformers takes a row of packed documents for one document.

    Raises:
        ValueError: several rows of packed documents for flash attention, which transformers separates in one row only.
    """
    inputs = {**kwargs, **dict(zip(names, args))}
    positions: Any = inputs.get("position_ids")
    if positions is None or inputs.get("past_key_values") is not None:
        return None
    kernel = str(getattr(getattr(model, "config", None), _IMPLEMENTATION, None))
    if reason and inputs.get("attention_mask") is None and _restart(positions):
        raise ValueError(
            f"{type(model).__name__} {reason}, and got rows of packed documents, by position_ids that restart: their "
            "tokens would see other documents; pad documents to rows of their own"
        )
    if "flash" in kernel and inputs.get("attention_mask") is None and len(positions) > 1 and _restart(positions):
        raise ValueError(
            f"{type(model).__name__} with {kernel} got {len(positions)} rows of packed documents, whose tokens would "
            "see other documents: transformers separates them in batches of one row; take more microbatches, or "
            'attn_implementation="sdpa"'
        )
    if "use_cache" not in names or "use_cache" in inputs or not (model.training or inputs.get("labels") is not None):
        return None
    return args, {**kwargs, "use_cache": False}


def _restart(positions: Any) -> bool:
    """Returns whether positions restart inside of a row; False without values, and of images and text `[3, b, s]`."""
    has_values = type(positions) is torch.Tensor and not positions.is_meta and positions.ndim == 2
    return has_values and bool((positions.diff(dim=-1) != 1).any())
