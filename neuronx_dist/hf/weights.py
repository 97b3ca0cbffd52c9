"""Unsharded weights into any layout, and back: Hugging Face folders and state dicts.

Reading, a rank holds its shard and one more tensor at most, and of a file it reads its slices only. Writing, the tp
ranks of one data-parallel replica gather one parameter at a time, and tp rank 0 of each pipeline stage writes one
file: no rank holds more than the weights of its stage. Padding is added and stripped by the layout of each parameter;
tied weights are read and written once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.generators import device_has_own_program
from ..comm.host import on_host
from ..modules.lora.layer import LoraLayer
from ..torch_internals.modules import non_persistent_buffers
from ..weights.materialize import materialize
from ..weights.partial_model import (
    Slot,
    buffer_slots,
    install_parameter,
    parameter_names,
    parameter_slots,
    partial_model,
)
from ..weights.shard_spec import ShardSpec, gather_full, spec_of
from ..weights.sums_file import SUMS
from ..weights.wrappers import wrapper_of
from .conversion import named_as_in
from .gguf_file import gguf_file, open_gguf
from .mismatch import check_fit
from .sources import WeightSource, has_weights, open_source

__all__ = ["full_state_dict", "load_pretrained", "save_pretrained"]


def load_pretrained(
    model: Any,
    source: str | PathLike[str] | Mapping[str, torch.Tensor],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    subfolder: str = "",
    variant: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Any:
    """Fills a model, swapped or not, in any layout, from an unsharded checkpoint, in place. Returns the model.

    It takes what `from_pretrained` of transformers takes from a local folder: safetensors and `.bin`, one file or
    several with an index, a GGUF file (dequantized a tensor at a time), checkpoints of the base model alone, or of
    another head; old names. Of what is left over, and of a head that is newly initialised, world rank 0 warns. A
    `generation_config.json` is read too. Of a folder with `SHA256SUMS`, which `neuronx-dist convert` writes, each rank
    compares a share of the files.

    Args:
        model: on meta (then its buffers get their values too) or real; of a pipeline model the local stage is filled.
        source: a folder in Hugging Face's layout, or with a GGUF file; a weight file; or a state dict with whole
            tensors.
        device, dtype: of parameters that are on meta; None keeps the dtype that they were built with. Real parameters
            keep theirs.
        subfolder, variant: of the weight files: `variant="fp16"` reads `model.fp16.safetensors`.
        key_mapping: regular expressions of names in the checkpoint, and what replaces them.
        seed: of parameters on meta that the checkpoint has not: a head (outside of the model's base model) or a
            pooler. `materialize` gives them the same values in any layout. Real ones keep their values.
        strict: refuse what world rank 0 would warn of: tensors that are left over, or newly initialised.

    Raises:
        ValueError: other names are missing from the source, or a shape is another one: all are listed, nothing is
            changed; parameters are DTensors of `fully_shard`; a tied weight has two values there; a file is damaged, or
            differs from its checksum.
        FileNotFoundError: the folder has no weights, or lacks a file that its index lists.
    """
    whole = partial_model(model).original_module
    if sharded := _distributed(whole):
        raise ValueError(
            f"load_pretrained: {sharded} of this {type(whole).__name__} is a DTensor, a part of this rank's shard: "
            "load the weights first, and call fully_shard then"
        )
    weights = _opened(source, whole, subfolder, variant)
    aliases = parameter_names(model)
    expected = _expected(whole, aliases)
    weights = named_as_in(whole, weights, [name for names, _ in expected for name in names], key_mapping)
    check_fit(whole, expected, weights, strict=strict)
    present = set(weights.names())
    _check_tied(model, aliases, weights)
    if not isinstance(source, Mapping):
        _read_generation_config(whole, Path(source) / subfolder)
    filled: set[int] = set()
    for slot in parameter_slots(model):
        param = slot.tensor
        name = next((alias for alias in aliases[id(param)] if alias in present), None)
        if id(param) in filled or name is None:
            continue
        filled.add(id(param))
        local = _read_slice(weights, name, spec_of(param))
        if param.is_meta:
            # `copy` also where nothing changes: a view would keep the whole tensor, or share the source's memory.
            install_parameter(param, local.to(device=device, dtype=dtype or param.dtype, copy=True).contiguous())
        else:
            with torch.no_grad():
                param.copy_(local)
    for name, module, key, buffer in _persistent_buffers(model):
        if name in present:
            target = device if buffer.is_meta else buffer.device
            module._buffers[key] = weights.read(name).to(device=target, dtype=buffer.dtype, copy=True)
    if isinstance(source, (str, PathLike)) and getattr(whole, "name_or_path", None) == "" and Path(source).is_dir():
        whole.__dict__["name_or_path"] = str(source)  # as after `from_pretrained`: adapters are saved with it
    return materialize(model, seed, device, dtype)


def save_pretrained(model: Any, folder: str | PathLike[str], tokenizer: Any = None) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads; all ranks call it.

    Values are bit-equal to the parameters.

    One file per pipeline stage (`model-0000k-of-0000n.safetensors` and an index; `model.safetensors` without a
    pipeline); weight files that an earlier save left in the folder are removed. The folder is to be one file system
    for all ranks that write.

    Layers with merged adapters are written under the names that they have without; parameters of `fully_shard` are
    gathered over its mesh.

    Raises:
        OSError: on all ranks: one of them could not write.
        ValueError: the model has adapters that are not merged.
    """
    from safetensors.torch import save_file

    path, adapters = Path(folder), _merged_adapters(partial_model(model).original_module)
    stage, stages = comm.rank("pp"), comm.size("pp")
    in_first_replica = comm.rank("edp") == 0  # one rank of dp and cp, or with experts over ep as many as ep
    writes = comm.rank(("dp", "cp", "tp")) == 0
    with _written_together(path):
        if comm.rank("world") == 0:
            path.mkdir(parents=True, exist_ok=True)
            for old in [
                *path.glob("model-*-of-*.safetensors"),
                path / "model.safetensors",
                path / "model.safetensors.index.json",
                path / SUMS,  # of these files
            ]:
                old.unlink(missing_ok=True)

    tensors: dict[str, torch.Tensor] = {}
    # On XLA a gather is in a program of all ranks, and it runs when the result is fetched: so all ranks do both. Of
    # `fully_shard` each data-parallel rank has a part.
    all_take_part = device_has_own_program() or bool(_distributed(partial_model(model).original_module))
    if in_first_replica or all_take_part:
        for name, full in _full_tensors(model):
            written = _without_adapter(name, adapters)
            if writes and written:
                tensors[written] = full.to("cpu").contiguous()
            elif all_take_part:
                full.to("cpu")
    file = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors" if stages > 1 else "model.safetensors"
    with _written_together(path):
        if writes:
            save_file(tensors, str(path / file), metadata={"format": "pt"})
    sizes = {name: (file, tensor.numel() * tensor.element_size(), tensor.numel()) for name, tensor in tensors.items()}
    everywhere: dict[str, tuple[str, int, int]] = {}
    for part in comm.gather_objects(sizes, "pp"):
        everywhere.update(part)
    with _written_together(path):
        if comm.rank("world") == 0:
            if stages > 1:
                index = {
                    "metadata": {
                        "total_size": sum(size for _, size, _ in everywhere.values()),
                        "total_parameters": sum(count for _, _, count in everywhere.values()),
                    },
                    "weight_map": {name: entry[0] for name, entry in everywhere.items()},
                }
                (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            _write_configs(partial_model(model).original_module, path, tokenizer)


def _merged_adapters(model: nn.Module) -> list[str]:
    """Returns the names of the layers with adapters.

    Raises:
        ValueError: one is not merged.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if left := [name for name, layer in layers.items() if not layer.merged]:
        raise ValueError(
            f"save_pretrained: {len(left)} layers have adapters that are not merged, {left[0]} the first: call "
            "merge_lora() for a folder of the whole model, or save_lora(folder) for the adapters alone"
        )
    return [*layers]


def _without_adapter(name: str, adapters: list[str]) -> str:
    """Returns the name that a tensor has in a model without adapters; "" of a tensor of an adapter."""
    for layer in adapters:
        if name.startswith(f"{layer}."):
            base = f"{layer}.base_layer."
            return f"{layer}.{name.removeprefix(base)}" if name.startswith(base) else ""
    return name


def full_state_dict(model: nn.Module, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Returns all weights of the model on every rank, unpadded, tied ones once; all ranks call it.

    For tests and small models.

    With `gradients=True` the gradients of the parameters that have one, by the same names and laid out the same.
    """
    mine = {name: full.to("cpu", copy=True) for name, full in _full_tensors(model, gradients)}
    whole: dict[str, torch.Tensor] = {}
    for part in comm.gather_objects(mine, "pp"):
        whole.update(part)
    return whole


def _opened(source: Any, whole: Any, subfolder: str, variant: str | None) -> WeightSource:
    if not isinstance(source, Mapping) and not has_weights(source, subfolder=subfolder, variant=variant):
        file = gguf_file(Path(source) / subfolder)
        if file is not None:
            return open_gguf(file, whole)
    shares = comm.size("world") if comm.is_initialized() else 1
    share = comm.rank("world") if shares > 1 else 0
    return open_source(source, subfolder=subfolder, variant=variant, share=share, shares=shares)


def _full_tensors(model: nn.Module, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `(name, full tensor)` of this stage, gathered over tp, one by one; a tied weight at its first name."""
    aliases = parameter_names(model)
    tensors = [param.grad if gradients else param for param in partial_model(model).original_module.parameters()]
    on_host([tensor for tensor in tensors if tensor is not None], copy=False)  # what is still to be computed, at once
    for name, _, _, param in parameter_slots(model):
        tensor = param.grad if gradients else param
        if tensor is not None and aliases[id(param)][0] == name:
            local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, gather_full(local, spec_of(param))
    if not gradients:
        for slot in _persistent_buffers(model):
            yield slot.name, slot.tensor


def _distributed(model: nn.Module) -> str:
    """Returns the name of the first parameter that `fully_shard` has made a DTensor; "": there is none."""
    return next((name for name, param in model.named_parameters() if hasattr(param, "full_tensor")), "")


def _persistent_buffers(model: nn.Module) -> Iterator[Slot]:
    """The buffers that a state dict holds."""
    return (slot for slot in buffer_slots(model) if slot.key not in non_persistent_buffers(slot.module))


def _read_slice(weights: WeightSource, name: str, spec: ShardSpec) -> torch.Tensor:
    """This rank's shard of tensor `name`, with zeros for padding."""
    if spec.experts:
        count = spec.unpadded_shape[0]
        start = comm.rank("ep") * count
        full = weights.read(name, 0, start, start + count)
        return full if spec.axis is None else spec.local_slice(full, comm.rank(spec.axis))
    if spec.axis is None or spec.dim is None:
        return weights.read(name)
    index = comm.rank(spec.axis)
    start, stop = spec.positions(index)
    size, local_size = (shape[spec.dim] // spec.stride for shape in (spec.unpadded_shape, spec.local_shape))
    local = None
    for block in range(spec.stride):  # of fused ones a rank has a piece of each
        piece = weights.read(name, spec.dim, block * size + start, block * size + stop)
        if spec.stride == 1 and stop - start == local_size:
            return piece
        local = piece.new_zeros(spec.local_shape) if local is None else local
        local.narrow(spec.dim, block * local_size, stop - start).copy_(piece)
    assert local is not None
    return local


def _expected(whole: nn.Module, aliases: dict[int, list[str]]) -> list[tuple[list[str], tuple[int, ...]]]:
    """`(names, unsharded shape)` of each tensor in a checkpoint of the model."""
    parameters = {id(param): param for param in whole.parameters()}
    tensors = [(names, spec_of(parameters[identity]).whole_shape) for identity, names in aliases.items()]
    return tensors + [([slot.name], tuple(slot.tensor.shape)) for slot in _persistent_buffers(whole)]


def _check_tied(model: Any, aliases: dict[int, list[str]], weights: WeightSource) -> None:
    """Refuses a checkpoint with two values for one tied parameter of the model; a rank compares its slices."""
    present = set(weights.names())
    for param in {id(slot.tensor): slot.tensor for slot in parameter_slots(model)}.values():
        names = [name for name in aliases[id(param)] if name in present]
        slices = (_read_slice(weights, name, spec_of(param)) for name in names) if len(names) > 1 else iter(())
        first = next(slices, None)
        if not all(first is not None and torch.equal(first, other) for other in slices):
            raise ValueError(
                f"load_pretrained: {weights.description} holds {' and '.join(names)} with different values, and this "
                f"{type(partial_model(model).original_module).__name__} has one parameter for them: build it with "
                f"tie_word_embeddings=False in its config"
            )


def _read_generation_config(model: Any, folder: Path) -> None:
    """Reads the generation config of a model that can generate, as `from_pretrained` does."""
    file = folder / "generation_config.json"
    if getattr(model, "generation_config", None) is not None and file.is_file():
        try:
            if not isinstance(json.loads(file.read_text()), dict):
                raise ValueError("it is no JSON object")
            model.generation_config = type(model.generation_config).from_pretrained(folder)
        except Exception as error:  # transformers checks no types
            text = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read, repair or remove it: {type(error).__name__}: {text}") from error


@contextmanager
def _written_together(folder: Path) -> Iterator[None]:
    """Makes all ranks continue, or all raise, after some of them wrote files inside."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # safetensors has errors of its own
        failure = error
    texts = comm.gather_objects("" if failure is None else f"{type(failure).__name__}: {failure}")
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    if failed is not None:
        raise OSError(f"{folder} could not be written: rank {failed}: {texts[failed]}") from failure


def _write_configs(model: Any, path: Path, tokenizer: Any) -> None:
    config = copy.deepcopy(model.config)
    # `fully_shard` has made a class of the model's class.
    config.architectures = [next(cls.__name__ for cls in type(model).__mro__ if wrapper_of(cls) is None)]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(path)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
