"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, with whole tensors.

Names are `base_model.model.<layer>.lora_A.weight` and `.lora_B.weight`, `.lora_embedding_A` and `_B` for embeddings. A
layer of queries, keys and values in one is saved as PEFT knows them: `q_proj`, `k_proj` and `v_proj`, with one A.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import comm
from ...weights.partial_model import partial_model
from ...weights.shard_spec import gather_full, spec_of
from .config import LoraConfig
from .layer import LoraEmbedding, LoraLayer
from .tp_layer import LoraGQAQKVParallelLinear

__all__ = ["load_adapters", "save_adapters"]

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _parameters(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yields `(names in the file, parameter)` of this rank's adapters; an A that several layers share has several."""
    for name, layer in partial_model(model).local_named_modules():
        if isinstance(layer, LoraGQAQKVParallelLinear):
            parent = name.rpartition(".")[0]
            paths = [f"{_PREFIX}{parent}{'.' if parent else ''}{letter}_proj" for letter in "qkv"]
            yield [f"{path}.lora_A.weight" for path in paths], layer.lora_A.weight  # type: ignore[misc]
            for path, weight in zip(paths, layer.get_qkv(layer.lora_B)):
                yield [f"{path}.lora_B.weight"], weight  # type: ignore[misc]
        elif isinstance(layer, LoraLayer):
            kind = (
                ("lora_embedding_A", "lora_embedding_B")
                if isinstance(layer, LoraEmbedding)
                else ("lora_A.weight", "lora_B.weight")
            )
            for text, part in zip(kind, (layer.lora_A, layer.lora_B)):
                yield [f"{_PREFIX}{name}.{text}"], part.weight  # type: ignore[misc]


def save_adapters(model: nn.Module, config: LoraConfig, folder: str | Path, tag: str | None = None) -> None:
    """Saves the adapters of a model; all ranks call it, and rank 0 writes."""
    from safetensors.torch import save_file

    place = Path(folder, tag) if tag else Path(folder)
    tensors = {}
    for names, param in _parameters(model):
        whole = gather_full(param, spec_of(param)).cpu()
        tensors.update({name: whole.clone() for name in names})
    for others in comm.gather_objects(tensors, "pp") if comm.size("pp") > 1 else ():
        tensors.update(others)
    if comm.rank("world") == 0:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / _WEIGHTS, metadata={"format": "pt"})
        (place / _CONFIG).write_text(json.dumps(_peft_config(config, tensors), indent=2) + "\n")
    comm.barrier()


def _peft_config(config: LoraConfig, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns PEFT's config; targets of fused projections are those of the file."""
    layers = sorted({name[len(_PREFIX) :].rpartition(".lora_")[0] for name in tensors})
    content = config.for_peft()
    targets = content["target_modules"]
    if not isinstance(targets, str):
        content["target_modules"] = sorted({layer.rpartition(".")[2] for layer in layers})
    return content


def load_adapters(model: nn.Module, config: LoraConfig, folder: str | Path, tag: str | None = None) -> None:
    """Loads adapters into a model that has them; each rank reads the whole file, and stores its shards."""
    from safetensors import safe_open

    place = Path(folder, tag) if tag else Path(folder)
    for file in (_CONFIG, _WEIGHTS):
        if not (place / file).is_file():
            raise ValueError(f"adapters: there is no {file} in {place}: pass a folder of save_lora, or of PEFT")
    saved = LoraConfig.of(json.loads((place / _CONFIG).read_text()))
    if (saved.lora_rank, saved.scaling) != (config.lora_rank, config.scaling):
        raise ValueError(
            f"adapters: {place} has rank {saved.lora_rank} and scaling {saved.scaling}, and the model "
            f"{config.lora_rank} and {config.scaling}: pass lora_rank={saved.lora_rank}, lora_alpha={saved.lora_alpha}"
        )
    with safe_open(place / _WEIGHTS, framework="pt") as file:
        known = set(file.keys())
        for names, param in _parameters(model):
            missing = [name for name in names if name not in known]
            if missing:
                raise ValueError(f"adapters: {place / _WEIGHTS} has no {missing[0]}")
            values = [file.get_tensor(name) for name in names]
            if any(not torch.equal(value, values[0]) for value in values[1:]):
                raise ValueError(f"adapters: {', '.join(names)} differ in {place}, and are one tensor in the model")
            spec = spec_of(param)
            if tuple(values[0].shape) != spec.unpadded_shape:
                raise ValueError(
                    f"adapters: {names[0]} is {list(values[0].shape)} in {place}, and {list(spec.unpadded_shape)} in "
                    "the model"
                )
            index = 0 if spec.axis is None else comm.rank(spec.axis)
            with torch.no_grad():
                param.copy_(spec.local_slice(values[0], index))
