"""Adapters on layers that every rank holds whole: `y = base(x) + scaling · B(A(dropout(x)))`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel_layers.linear_cross_entropy import note_adapter
from ...spmd import ShardedModule, ShardSpec, set_spec, spec_of
from ...torch_internals.tensors import version_of
from ...weights.partial_model import install_parameter
from .config import LoraConfig

__all__ = ["LoraConv2d", "LoraEmbedding", "LoraLayer", "LoraLinear", "WholeLinear"]

Initialiser = Callable[[torch.Tensor], Any]


class WholeLinear(ShardedModule):
    """A linear layer `[.., in] -> [.., out]` without bias that every tp rank holds whole.

    Args:
        is_partial: the layer sees a part of what it is the gradient of, on each rank: gradients are summed over tp by
            the reduction of gradients, as those of norms under sequence parallelism.
    """

    weight: nn.Parameter

    def __init__(
        self, input_size: int, output_size: int, initialise: Initialiser, is_partial: bool, like: torch.Tensor
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=like.dtype, device=like.device))
        set_spec(self, "weight", ShardSpec(full_shape=(output_size, input_size), sequence_parallel=is_partial))
        self._initialise = initialise
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the global CPU generator, whatever the device, unless it is on meta."""
        if not self.weight.is_meta:
            value = torch.empty(self.weight.shape, dtype=torch.promote_types(self.weight.dtype, torch.float32))
            with torch.no_grad():
                self._initialise(value)
                self.weight.copy_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LoraLayer(nn.Module):
    """A layer with an adapter; attributes that it does not have are the layer's.

    Attributes:
        base_layer: the layer, whose parameters are frozen.
        lora_A, lora_B: the adapter.
        scaling: factor of the adapter's output.
        name: the layer's name in the model; is_tied: whether its weight has other names too.
    """

    name = ""
    is_tied = False

    lora_A: nn.Module
    lora_B: nn.Module

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_config = lora_config
        self.lora_rank, self.lora_alpha, self.scaling = (
            lora_config.lora_rank,
            lora_config.lora_alpha,
            lora_config.scaling,
        )
        self.lora_dropout = nn.Dropout(lora_config.lora_dropout)
        self._merged: tuple[list[torch.Tensor], list[int]] | None = None  # B, and its version when it became zero
        note_adapter(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        note_adapter(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    @property
    def initialise_a(self) -> Initialiser:
        if self.lora_config.init_lora_weights == "gaussian":
            return partial(nn.init.normal_, std=1 / self.lora_rank)
        return partial(nn.init.kaiming_uniform_, a=math.sqrt(5))

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields `(weight of the layer, what the adapter adds to it)`, of this rank."""
        raise NotImplementedError

    @property
    def merged(self) -> bool:
        """Whether the layer's weight contains the adapter; no longer so once B was trained or loaded."""
        return self._merged is not None and [version_of(param) for param in self._zeros()] == self._merged[1]

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the adapter to the layer's weight, and sets B to zero until `unmerge`; a second call changes nothing.

        Outputs stay the same, and so does a state dict's meaning: the weight has the adapter, and B is zero.

        Raises:
            ValueError: the weight is tied to another layer's, which would change too.
        """
        if self.merged:
            return
        if self.is_tied:
            raise ValueError(f"adapters: {self.name} cannot be merged, because its weight is tied to another layer's")
        for weight, delta in self.deltas():
            weight.add_(delta.to(weight.dtype))
        values = [param.clone() for param in self._zeros()]
        for param in self._zeros():
            param.zero_()
        self._merged = values, [version_of(param) for param in self._zeros()]

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtracts the adapter from the layer's weight, and sets B back; without effect where it is not merged."""
        if self._merged is not None and self.merged:
            for param, value in zip(self._zeros(), self._merged[0]):
                param.copy_(value)
            for weight, delta in self.deltas():
                weight.sub_(delta.to(weight.dtype))
        self._merged = None

    def _zeros(self) -> list[nn.Parameter]:
        """Returns the parameters that are zero in an adapter without effect: those of B."""
        return list(self.lora_B.parameters())

    def base_alone(self) -> bool:
        """Returns whether the layer computes without the adapter, which is merged; in training it is unmerged first."""
        if self._merged is None or not self.merged:
            return False
        if self.training and torch.is_grad_enabled():
            self.unmerge()
            return False
        return True

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Takes a state dict of the model without adapters too: `X.weight` is `X.base_layer.weight`."""
        for name in self.base_layer.state_dict():
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}base_layer.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def reset_adapter_on(self, device: torch.device) -> None:
        """Gives the adapter its initial values: of parameters on meta, which get memory on a device."""
        for layer in (self.lora_A, self.lora_B):
            for param in layer.parameters():
                if param.is_meta:
                    install_parameter(param, torch.empty_like(param, device=device))
            draw = getattr(layer, "init_weight_cpu", None) or getattr(layer, "initialize_weight_biases", None)
            (draw or layer.reset_parameters)()  # type: ignore[operator]


def is_partial(weight: torch.Tensor) -> bool:
    """Returns whether a parameter sees a shard of the sequence, so that its gradients are summed over tp."""
    return spec_of(weight).sequence_parallel


class LoraLinear(LoraLayer):
    """An adapter on `nn.Linear`, or with `is_conv_1d_layer` on transformers' `Conv1D`, whose weight is `[in, out]`."""

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig, is_conv_1d_layer: bool = False) -> None:
        super().__init__(base_layer, lora_config)
        weight: torch.Tensor = base_layer.weight  # type: ignore[assignment]
        self.is_conv_1d_layer = is_conv_1d_layer
        output_size, input_size = reversed(weight.shape) if is_conv_1d_layer else weight.shape
        partly = is_partial(weight)
        self.lora_A = WholeLinear(input_size, self.lora_rank, self.initialise_a, partly, weight)
        self.lora_B = WholeLinear(self.lora_rank, output_size, nn.init.zeros_, partly, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.base_alone()
        out: torch.Tensor = self.base_layer(x)
        return out if alone else out + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        delta = self.lora_B.weight @ self.lora_A.weight * self.scaling  # type: ignore[operator]
        yield self.base_layer.weight, delta.t() if self.is_conv_1d_layer else delta  # type: ignore[misc]


class LoraEmbedding(LoraLayer):
    """An adapter on `nn.Embedding`: A is a table of r features, drawn as zeros, and B is drawn, as in PEFT."""

    def __init__(self, base_layer: nn.Embedding, lora_config: LoraConfig) -> None:
        super().__init__(base_layer, lora_config)
        weight = base_layer.weight
        rows, features = weight.shape
        self.lora_A = WholeLinear(rows, self.lora_rank, nn.init.zeros_, is_partial(weight), weight)
        self.lora_B = WholeLinear(self.lora_rank, features, nn.init.normal_, is_partial(weight), weight)

    def _zeros(self) -> list[nn.Parameter]:
        return list(self.lora_A.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.base_alone()
        out: torch.Tensor = self.base_layer(x)
        if alone:
            return out
        rows = F.embedding(x, self.lora_A.weight.t(), self.base_layer.padding_idx)  # type: ignore[operator, arg-type]
        return out + self.lora_B(rows) * self.scaling

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.base_layer.weight, (self.lora_B.weight @ self.lora_A.weight).t() * self.scaling  # type: ignore


class LoraConv2d(LoraLayer):
    """An adapter on `nn.Conv2d`: A is a convolution of the layer's kernel to r channels, B one of kernel 1."""

    lora_A: nn.Conv2d
    lora_B: nn.Conv2d

    def __init__(self, base_layer: nn.Conv2d, lora_config: LoraConfig) -> None:
        super().__init__(base_layer, lora_config)
        if base_layer.groups != 1:
            raise ValueError(f"LoraConv2d: {base_layer} has groups; adapters are possible for groups=1")
        like: dict[str, Any] = dict(bias=False, dtype=base_layer.weight.dtype, device=base_layer.weight.device)
        self.lora_A = nn.Conv2d(
            base_layer.in_channels,
            self.lora_rank,
            base_layer.kernel_size,  # type: ignore[arg-type]
            base_layer.stride,  # type: ignore[arg-type]
            base_layer.padding,  # type: ignore[arg-type]
            base_layer.dilation,  # type: ignore[arg-type]
            padding_mode=base_layer.padding_mode,
            **like,
        )
        self.lora_B = nn.Conv2d(self.lora_rank, base_layer.out_channels, 1, **like)
        if not self.lora_A.weight.is_meta:
            self._draw()

    def _draw(self) -> None:
        self.initialise_a(self.lora_A.weight)
        nn.init.zeros_(self.lora_B.weight)

    def reset_adapter_on(self, device: torch.device) -> None:
        super().reset_adapter_on(device)
        self._draw()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.base_alone()
        out: torch.Tensor = self.base_layer(x)
        return out if alone else out + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        delta = torch.einsum("or,rikl->oikl", self.lora_B.weight[:, :, 0, 0], self.lora_A.weight)
        yield self.base_layer.weight, delta * self.scaling  # type: ignore[misc]
