"""Shared parts of the model programs: parameters marked as NxD's scripts mark them, sizes and inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers.utils import set_tensor_model_parallel_attributes
from tests.checking.user_programs.support import integers, normal, programs

__all__ = ["BATCH", "HEADS", "HIDDEN", "INNER", "SEQ", "TOKENS", "TP", "VOCAB", "X", "Model", "experts", "model",
           "sharded", "whole"]  # fmt: skip

BATCH, SEQ, HIDDEN, INNER, HEADS, VOCAB = 4, 8, 8, 16, 4, 16
TP = {"tp": 2}
X = {"x": normal(BATCH, SEQ, HIDDEN)}
TOKENS = {"ids": integers(VOCAB, BATCH, SEQ), "labels": integers(VOCAB, BATCH, SEQ)}


class Model(nn.Module):
    """A model that has one bug, or none; with its loss."""

    def __init__(self, bug: str | None = None) -> None:
        super().__init__()
        self.bug = bug
        self.build()

    def build(self) -> None:
        raise NotImplementedError


def model(**options: Any) -> Callable[[type[Model]], type[Model]]:
    """Registers a class as programs, under its name: `options` are those of `programs`."""

    def register(cls: type[Model]) -> type[Model]:
        def make(bug: str | None) -> dict[str, Any]:
            return dict(model_fn=lambda: cls(bug).to(torch.get_default_dtype()))

        make.__name__ = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        programs(**options)(make)
        return cls

    return register


def whole(*shape: int) -> nn.Parameter:
    """A parameter that all ranks hold."""
    return nn.Parameter(torch.empty(shape))


def sharded(dim: int, *shape: int, stride: int = 1) -> nn.Parameter:
    """The tensor-parallel rank's part of a parameter of this shape, cut along `dim`."""
    local, tp = list(shape), comm.size("tp")
    local[dim] //= tp
    param = nn.Parameter(torch.empty(local))
    set_tensor_model_parallel_attributes(param, True, dim, stride, tp)
    return param


def experts(module: nn.Module, name: str, *shape: int) -> None:
    """Sets a parameter of `module`, the first dim of which is that of the experts, cut over ep."""
    ep = comm.size("ep")
    param: Any = nn.Parameter(torch.empty(shape[0] // ep, *shape[1:]))
    setattr(module, name, param)
    spmd.set_spec(module, name, spmd.ShardSpec("ep", 0, 1, ep, shape))
    param.expert_model_parallel = True
