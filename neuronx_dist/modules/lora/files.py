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

__all__ = ["load_adapters", "save_adapters", "saved_config"]

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _parameters(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yields `(names in the file, parameter)` of what is trained on this rank.

    Besides adapters these are the biases and `modules_to_save` of the config. An A that several layers share has
    several names.
    """
    adapters: set[int] = set()
    for names, param in _adapters(model):
        adapters.add(id(param))
        yield names, param
    for name, param in partial_model(model).local_named_parameters():
        if param.requires_grad and id(param) not in adapters:
            yield [f"{_PREFIX}{name}"], param


def _adapters(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
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
    layers = [module for _, module in partial_model(model).local_named_modules() if isinstance(module, LoraLayer)]
    if any(layer.merged for layer in layers):
        raise ValueError("adapters: they are merged into the weights, and B is zero: call unmerge_lora() before saving")
    tensors = {}
    for names, param in _parameters(model):
        whole = gather_full(param, spec_of(param)).cpu()
        tensors.update({name: whole.clone() for name in names})
    for others in comm.gather_objects(tensors, "pp") if comm.size("pp") > 1 else ():
        tensors.update(others)
    if comm.rank("world") == 0:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / _WEIGHTS, metadata={"format": "pt"})
        content = _peft_config(partial_model(model).original_module, config, tensors)
        (place / _CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    comm.barrier()


# End of the class name of a model of transformers -> task of PEFT, by which `AutoPeftModelForCausalLM` finds its class.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def _peft_config(model: nn.Module, config: LoraConfig, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns PEFT's config, with the adapted model; targets of fused projections are those of the file."""
    layers = sorted({name[len(_PREFIX) :].rpartition(".lora_")[0] for name in tensors if ".lora_" in name})
    targets, content = config.target_modules, config.for_peft()
    is_exact = isinstance(targets, str) or any("." in target for target in targets or ())
    content["target_modules"] = layers if is_exact else sorted({layer.rpartition(".")[2] for layer in layers})
    if hasattr(model, "name_or_path"):  # of transformers
        cls = type(model)
        content["base_model_name_or_path"] = model.name_or_path or None
        content["task_type"] = next((task for end, task in _TASKS.items() if cls.__name__.endswith(end)), None)
        if content["task_type"] is None:
            content["auto_mapping"] = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    return content


def _place(folder: str | Path, tag: str | None) -> Path:
    """Returns the folder with adapters: of the tag, or the folder itself, or the newest one in it.

    Raises:
        ValueError: there are no adapters.
    """
    place = Path(folder, tag) if tag else Path(folder)
    if not tag and not (place / _CONFIG).is_file():
        tags = [file.parent for file in place.glob(f"*/{_CONFIG}")]
        place = max(tags, key=lambda path: path.stat().st_mtime, default=place)
    for file in (_CONFIG, _WEIGHTS):
        if not (place / file).is_file():
            raise ValueError(f"adapters: there is no {file} in {place}: pass a folder of save_lora, or of PEFT")
    return place


def saved_config(folder: str | Path, tag: str | None = None) -> LoraConfig:
    """Returns the config of a folder of `save_lora` or of PEFT, whose file has values: none are drawn."""
    content = json.loads((_place(folder, tag) / _CONFIG).read_text())
    return LoraConfig.of({**content, "init_lora_weights": content.get("init_lora_weights") or True})


def load_adapters(model: nn.Module, config: LoraConfig, folder: str | Path, tag: str | None = None) -> None:
    """Loads adapters into a model that has them; each rank reads the whole file, and stores its shards."""
    from safetensors import safe_open

    place = _place(folder, tag)
    saved = saved_config(folder, tag)
    if (saved.lora_rank, saved.scaling) != (config.lora_rank, config.scaling):
        raise ValueError(
            f"adapters: {place} has rank {saved.lora_rank} and scaling {saved.scaling}, and the model "
            f"{config.lora_rank} and {config.scaling}: pass lora_rank={saved.lora_rank}, lora_alpha={saved.lora_alpha}"
        )
    with safe_open(place / _WEIGHTS, framework="pt") as file:
        known, used = set(file.keys()), set()
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
            used.update(names)
    unused = sorted(known.difference(used, *(comm.gather_objects(used, "pp") if comm.size("pp") > 1 else ())))
    if unused:
        raise ValueError(
            f"adapters: {place / _WEIGHTS} has {len(unused)} tensors that the model has no place for, such as "
            f"{unused[0]}: use the target_modules and modules_to_save of its adapter_config.json"
        )
