"""The tensors of a GGUF file under the names of a transformers model, dequantized one at a time.

Which tensor is which, and what llama.cpp has done to it (it permutes rows of query and key), transformers says. Rows
are quantized each by itself, so a slice of rows is dequantized alone, unless they were permuted.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .sources import StateDict, WeightSource

__all__ = ["gguf_file", "open_gguf", "write_configs"]

# Of transformers: they change neither shape nor name of a tensor, and the first ones no order of rows.
_BY_ELEMENT = {"TensorProcessor", "NemotronTensorProcessor", "Gemma2TensorProcessor"}
_BY_TENSOR = {*_BY_ELEMENT, "LlamaTensorProcessor"}
_PERMUTED = {"attn_q", "attn_k"}


def gguf_file(source: str | PathLike[str]) -> Path | None:
    """Returns the GGUF file of a path: the path itself, or the only GGUF file in the folder."""
    path = Path(source)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        raise ValueError(
            f"{path} has {len(files)} GGUF files, {', '.join(file.name for file in files)}: pass the path of one"
        )
    return files[0] if files else None


def open_gguf(file: Path, model: Any) -> WeightSource:
    """The weights in a GGUF file, by the names of `model`, in float32.

    Architectures whose tensors transformers joins or reshapes (experts, GPT-2) are read whole.

    Args:
        model: a model of transformers, on meta or real, whose names and sizes are read.

    Raises:
        ValueError: it is no GGUF file, of an architecture that transformers does not read, or `model` is not of it.
    """
    import transformers.modeling_gguf_pytorch_utils as reading
    from gguf import GGUFReader

    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ValueError(f"{file} has GGUF's tensor names: pass a model of transformers, not a {type(model).__name__}")
    try:
        reader = GGUFReader(file)
        architecture = reading.read_field(reader, "general.architecture")[0]
        parsed = reading.load_gguf_checkpoint(str(file))
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} ({file.stat().st_size} bytes) cannot be read as GGUF: {error}") from error
    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=parsed["config"])
    if type(processor).__name__ not in _BY_TENSOR:
        whole = reading.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
        return StateDict(whole["tensors"], str(file))
    names = reading.get_gguf_hf_weights_map(model, processor)
    return _GgufTensors(
        str(file), {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}, processor
    )


def write_configs(file: Path, folder: Path) -> None:
    """Writes the config in a GGUF file, and its tokenizer if it has one, as files of Hugging Face's."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    if "tokenizer.ggml.tokens" in GGUFReader(file).fields:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


class _GgufTensors:
    def __init__(self, description: str, tensors: dict[str, Any], processor: Any) -> None:
        self.description = description
        self._tensors, self._processor = tensors, processor

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        tensor = self._tensors[name]
        keeps_rows = type(self._processor).__name__ in _BY_ELEMENT or _PERMUTED.isdisjoint(tensor.name.split("."))
        if dim == 0 and keeps_rows:
            return self._dequantized(tensor, tensor.data[start:stop])
        whole = self._dequantized(tensor, tensor.data)
        return whole if dim is None else whole.narrow(dim, start, stop - start)

    def _dequantized(self, tensor: Any, data: Any) -> torch.Tensor:
        from gguf import dequantize

        values = dequantize(data, tensor.tensor_type)
        values = self._processor.process(weights=values, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
        return torch.from_numpy(values.weights.astype("float32", copy=True))
