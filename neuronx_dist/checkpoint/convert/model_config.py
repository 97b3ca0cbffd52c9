"""A model on meta by its `config.json`, which somebody else may have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ... import comm
from ...hf.swap import swap
from ...mesh import Mesh

__all__ = ["model_of"]

MAX_MODULES = 10_000  # layers, and experts, of a config


def model_of(config: str | os.PathLike[str], tp: int) -> Any:
    """The model of a `config.json` on meta, with parallel layers, which say how each parameter is divided.

    Raises:
        ValueError: the config is damaged, or too large.
    """
    from transformers import AutoModelForCausalLM

    read = _config(config)
    _check_limits(config, read)
    with comm.as_rank(Mesh(tp, tp=tp), 0), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(read)
        except Exception as error:  # values of any type
            raise ValueError(f"{config}: no model can be built of this config: {_line(error)}") from error
        return swap(model, pad_vocab=True)


def _config(path: str | os.PathLike[str]) -> Any:
    """The config in a folder, or in a GGUF file."""
    from transformers import AutoConfig

    source = Path(path)
    try:
        if source.is_file():
            return AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # transformers checks types by errors of its own class, or not at all
        raise ValueError(f"{path}: its config cannot be read: {_line(error)}") from error


def _check_limits(path: str | os.PathLike[str], config: Any) -> None:
    """Raises a ValueError if a config has more layers or experts than a model that fits into memory as objects."""
    for name, value in config.to_dict().items():
        is_number_of_modules = any(word in name for word in ("layer", "expert"))
        if is_number_of_modules and isinstance(value, (int, float)) and value > MAX_MODULES:
            raise ValueError(f"{path}: its config has {name}={value}, more than {MAX_MODULES} (MAX_MODULES)")
        if isinstance(value, dict) and hasattr(getattr(config, name, None), "to_dict"):
            _check_limits(path, getattr(config, name))


def _line(error: Exception) -> str:
    """The type and text of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
