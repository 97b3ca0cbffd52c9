"""A checkpoint under the names of a model: the tensors that transformers renames, splits and joins when it loads one.

Which tensor becomes which is asked of transformers: its renamings (LayerNorm's `gamma`, weight norms), its conversions
by model type (experts that are stored apart become one tensor, a fused projection several), and the prefix of the base
model, which a checkpoint may have (`bert.embeddings...`) or not.

    file          encoder.layer.0.output.LayerNorm.gamma
    model         bert.encoder.layer.0.output.LayerNorm.weight

A renamed tensor is read in slices, as before; one that is computed from others is computed from the whole ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .sources import WeightSource

__all__ = ["named_as_in"]


def named_as_in(
    model: Any, weights: WeightSource, expected: Collection[str], key_mapping: Mapping[str, str] | None = None
) -> WeightSource:
    """Returns the tensors of `weights` by their names in `model`; a tensor that `model` does not have keeps its name.

    Args:
        model: of transformers; the tensors of any other one are taken as they are.
        expected: names of the model's parameters and buffers.
        key_mapping: more renamings, by regular expression, as `from_pretrained` takes them.
    """
    if not hasattr(model, "base_model_prefix"):
        if key_mapping:
            raise ValueError(
                f"load_pretrained: key_mapping needs a model of transformers, not a {type(model).__name__}"
            )
        return weights
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(expected, True)
    prefix = model.base_model_prefix or None

    original_names: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(weights.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # a pattern that was not meant for it
            target, pattern = name, None
        if target not in known:
            original_names.setdefault(name, name)
        elif pattern is None:
            original_names.setdefault(target, name)
        else:
            conversion = conversions.setdefault(target, _Conversion(target, converter_of[pattern], model))
            conversion.sources.append((pattern, name))
    return _Renamed(weights, original_names, list(conversions.values()))


@dataclass
class _Conversion:
    """Tensors of a checkpoint, `(pattern, name)` each, that transformers computes tensors of the model from."""

    target: str
    converter: Any
    model: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)  # the converter collects the tensors passed to it
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, tensor_of(name))
        results = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


class _Renamed:
    def __init__(self, weights: WeightSource, original_names: dict[str, str], conversions: list[_Conversion]) -> None:
        self.description = weights.description
        self._weights, self._original_names = weights, original_names
        self._conversion_of: dict[str, _Conversion] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._last: tuple[_Conversion, dict[str, torch.Tensor]] | None = None
        for conversion in conversions:
            for name, result in conversion(self._meta).items():
                self._conversion_of[name] = conversion
                self._shapes[name] = tuple(result.shape)
                self._dtypes[name] = result.dtype

    def _meta(self, name: str) -> torch.Tensor:
        return torch.empty(self._weights.shape(name), dtype=self._weights.dtype(name), device="meta")

    def names(self) -> Iterable[str]:
        return self._original_names.keys() | self._conversion_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self._weights.shape(self._original_names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name] if name in self._dtypes else self._weights.dtype(self._original_names[name])

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        if name not in self._conversion_of:
            return self._weights.read(self._original_names[name], dim, start, stop)
        conversion = self._conversion_of[name]
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # before the next one is read
            self._last = conversion, conversion(self._weights.read)
        tensor = self._last[1][name].detach()
        return tensor if dim is None else tensor.narrow(dim, start, stop - start)
