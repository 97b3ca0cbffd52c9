"""Query, key and value projections as one layer, for any number of key/value heads: NxD's GQA layer.

    Q[.., q/t], K[.., kv·m/t], V[.., kv·m/t] = X[.., in] · W_qᵀ, W_kᵀ, W_vᵀ       t tensor-parallel ranks, m multiplier

With m > 1 each of the t / m shards of key and value weights is on m adjacent ranks (`ColumnParallelLinear(replicas=m)`;
upstream's order on trn2; its order on trn1, ranks at a distance of t / m, is one of files: `checkpoint.nxd.HeadOrder`
puts the heads back). Backward has one collective for the input's gradient, and one sum over the m ranks for each key
and value parameter, so that gradients are complete and equal on all m.

The three weights are three parameters, fused or not: each has one layout, which norms, ZeRO-1 and checkpoints read.
With `fuse_qkv` a state dict has them as one `weight_qkv`, as upstream's files do: this rank's rows of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import comm
from ..parallel_layers.linear import (
    ColumnParallelLinear,
    column_outputs,
    draw,
    gathered,
    sequence_dim_of,
    used_parameter,
)
from ..parallel_layers.misfits import refuse_input
from ..parallel_layers.model_groups import share_kv_heads
from ..spmd import ShardedModule, ShardSpec, set_spec, spec_of

__all__ = [
    "GQAQKVColumnParallelLinear",
    "GQAQKVLinearWithAsyncCommunication",
    "gqa_qkv_linear_with_async_allreduce",
]

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_LETTERS = ("q", "k", "v")


class GQAQKVColumnParallelLinear(ShardedModule):
    """Projections of one input to queries, keys and values: `[.., in] -> ([.., q/tp], [.., kv·m/tp], [.., kv·m/tp])`.

    Args:
        input_size: features of the input.
        output_sizes: `[q, kv]`, features of the queries and of the keys (and values), each head once.
        bias: add biases: sharded like the weights, or with `gather_output` whole on every rank.
        gather_output: return `[.., q]` and `[.., kv·m]` on every rank, the shards of keys and values m times each.
        init_method: fills each whole weight, `[q, in]` or `[kv, in]`, in place; None: as `nn.Linear`.
        sequence_parallel_enabled: the input is sharded along `sequence_dimension` (0 by default), and is gathered here.
        keep_master_weight: store the whole weights as `master_weight_qkv`, or `master_weight_q`, `_k` and `_v`.
        kv_size_multiplier: m, the number of ranks that hold each shard of keys and values: tp / key/value heads, so
            that a rank has one of these heads, and the query heads that use it. (With a larger m a rank has several,
            which its query heads share in their local order, as in upstream's order on trn1, not that of one process.)
        fuse_qkv: state dicts have one `weight_qkv` (and `bias_qkv`) instead of `weight_q`, `weight_k`, `weight_v`. Both
            are loaded, whatever this is.
        reduce_dtype: gradients are summed in `promote_types(dtype, reduce_dtype)`.

    Raises:
        ValueError: sizes do not divide by tp, or the multiplier does not divide tp; `gather_output` together with
            sequence parallelism.
    """

    weight_q: nn.Parameter
    weight_k: nn.Parameter
    weight_v: nn.Parameter
    axis = "tp"
    column_parameters = tuple(f"{kind}_{letter}" for letter in _LETTERS for kind in ("weight", "bias"))

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype | None = torch.float32,
        *,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__()
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "GQAQKVColumnParallelLinear: gather_output=True is not possible with sequence_parallel_enabled=True; "
                "pass gather_output=False"
            )
        if len(output_sizes) != 2:
            raise ValueError(f"GQAQKVColumnParallelLinear: output_sizes must be [q, kv], got {list(output_sizes)}")
        self.input_size = input_size
        self.use_bias, self.gather_output, self.fuse_qkv = bias, gather_output, fuse_qkv
        self.kv_size_multiplier = self.replicas = kv_size_multiplier
        self.reduce_dtype = reduce_dtype
        self.arg_init_method, self.keep_master_weight = init_method, keep_master_weight
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        self.async_tensor_model_parallel_allreduce = not sequence_parallel_enabled and comm.size("tp") > 1
        self._register_parameters(output_sizes, bias, dtype, device)
        if kv_size_multiplier > 1:
            share_kv_heads(kv_size_multiplier)

    def _register_parameters(self, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: Any) -> None:
        query, key = sizes
        for letter, size, replicas in zip(_LETTERS, (query, key, key), self._replicas):
            column = ColumnParallelLinear(
                self.input_size, size, bias=False, gather_output=False, dtype=dtype, device="meta", replicas=replicas
            )
            spec = spec_of(column.weight)
            self._register(f"weight_{letter}", spec, dtype, device)
            spec = ShardSpec(full_shape=(size,)) if self.gather_output else replace(spec, full_shape=(size,))
            self._register(f"bias_{letter}", spec if bias else None, dtype, device)
        if not self.weight_q.is_meta:
            self.initialize_weight_biases()
        else:
            for name in ("master_weight_qkv",) if self.fuse_qkv else (f"master_weight_{letter}" for letter in _LETTERS):
                setattr(self, name, None)

    def _register(self, name: str, spec: ShardSpec | None, dtype: torch.dtype, device: Any) -> None:
        value = None if spec is None else nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=device))
        self.register_parameter(name, value)
        if spec is not None:
            set_spec(self, name, spec)

    def initialize_weight_biases(self) -> None:
        """Draws whole weights and biases from the global CPU generator, and stores this rank's shards (NxD's name)."""
        masters = [self._draw(f"weight_{letter}") for letter in _LETTERS]
        for letter in _LETTERS if self.use_bias else ():
            self._draw(f"bias_{letter}")
        if self.fuse_qkv:
            self.master_weight_qkv = torch.cat(masters) if self.keep_master_weight else None
        else:
            whole: list[Any] = masters if self.keep_master_weight else [None] * 3
            self.master_weight_q, self.master_weight_k, self.master_weight_v = whole

    def _draw(self, name: str) -> torch.Tensor:
        param = getattr(self, name)
        axis = spec_of(param).axis
        return draw(param, partial(self._initialise, name), comm.rank(axis) if axis else 0)

    def _initialise(self, name: str, value: torch.Tensor) -> None:
        if name.startswith("weight"):
            (self.arg_init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))(value)
        else:
            bound = 1 / math.sqrt(self.input_size) if self.input_size else 0.0
            nn.init.uniform_(value, -bound, bound)

    def reset_parameters(self) -> None:
        """Initialises the parameters that are not on meta, each as a whole one, for `materialize`."""
        for name, param in self._parameters.items():
            if param is not None and not param.is_meta:
                self._initialise(name, param)

    @property
    def _replicas(self) -> tuple[int, int, int]:
        return (1, self.kv_size_multiplier, self.kv_size_multiplier)

    @property
    def output_sizes(self) -> list[int]:
        return [spec_of(weight).full_shape[0] for weight in (self.weight_q, self.weight_k)]

    @property
    def q_output_size_per_partition(self) -> int:
        return self.weight_q.shape[0]

    @property
    def kv_output_size_per_partition(self) -> int:
        return self.weight_k.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_q.dtype

    @property
    def device(self) -> torch.device:
        return self.weight_q.device

    @property
    def weight_qkv(self) -> torch.Tensor:
        """This rank's rows of the three weights, and of their gradients, one behind the other; to be read only.

        Torch refuses to write into it: write `weight_q`, `weight_k` and `weight_v`, or load a state dict.
        """
        return self._fused("weight")

    @property
    def bias_qkv(self) -> torch.Tensor | None:
        return self._fused("bias") if self.use_bias else None

    def _fused(self, kind: str) -> torch.Tensor:
        if not self.fuse_qkv:
            raise AttributeError(f"{type(self).__name__} with fuse_qkv=False has no {kind}_qkv")
        params = [getattr(self, f"{kind}_{letter}") for letter in _LETTERS]
        with torch.inference_mode():
            fused = torch.cat([param.detach() for param in params])
            if all(param.grad is not None for param in params):
                fused.grad = torch.cat([param.grad for param in params])
        return fused

    def forward(self, input: torch.Tensor) -> QKV:
        """`[.., in]`, or its shard along the sequence, `-> (q, k, v)`."""
        try:
            return self._projections(input)
        except (RuntimeError, ValueError) as error:
            refuse_input(self, input, error)
            raise

    def _projections(self, x: torch.Tensor) -> QKV:
        weights = self.used("weight")
        biases = self.used("bias") if self.use_bias and not self.gather_output else []
        dim = sequence_dim_of(self, x)
        outputs = column_outputs(x, weights, biases, self.axis, dim, self.reduce_dtype, self.weight_q)
        return self.whole_outputs(outputs)

    def whole_outputs(self, outputs: Sequence[torch.Tensor]) -> QKV:
        """Returns a rank's parts of q, k and v; with `gather_output` gathered, and with their biases."""
        if self.gather_output:
            outputs = [
                gathered(out, self.axis, self._whole_bias(letter, replicas))
                for out, letter, replicas in zip(outputs, _LETTERS, self._replicas)
            ]
        query, key, value = outputs
        return query, key, value

    def used(self, kind: str) -> list[torch.Tensor]:
        return [
            used_parameter(getattr(self, f"{kind}_{letter}"), replicas, self.reduce_dtype)
            for letter, replicas in zip(_LETTERS, self._replicas)
        ]

    def _whole_bias(self, letter: str, replicas: int) -> torch.Tensor | None:
        """Returns the bias of a gathered output, in which each shard stands `replicas` times."""
        bias: torch.Tensor | None = getattr(self, f"bias_{letter}")
        if bias is None or replicas == 1:
            return bias
        shards = bias.unflatten(0, (comm.size(f"tp/{replicas}"), -1))
        return shards.repeat_interleave(replicas, 0).flatten()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for kind in ("weight", "bias") if self.fuse_qkv else ():
            parts = [destination.pop(f"{prefix}{kind}_{letter}", None) for letter in _LETTERS]
            if parts[0] is not None:
                destination[f"{prefix}{kind}_qkv"] = torch.cat(parts)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for kind in ("weight", "bias"):
            fused = state_dict.get(f"{prefix}{kind}_qkv")
            if fused is not None and getattr(self, f"{kind}_q") is not None:
                del state_dict[f"{prefix}{kind}_qkv"]
                sizes = [param.shape[0] for param in (getattr(self, f"{kind}_{letter}") for letter in _LETTERS)]
                if fused.shape[0] != sum(sizes):
                    raise ValueError(
                        f"{prefix}{kind}_qkv of the state dict has {fused.shape[0]} rows, and this rank holds "
                        f"{' + '.join(map(str, sizes))} of q, k and v: load the state dict that this rank saved, or "
                        "save and load by neuronx_dist.save_checkpoint and load_checkpoint, for any layout"
                    )
                for letter, part in zip(_LETTERS, fused.split(sizes)):
                    state_dict[f"{prefix}{kind}_{letter}"] = part
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_sizes={self.output_sizes}, bias={self.use_bias}, "
            f"kv_size_multiplier={self.kv_size_multiplier}, fuse_qkv={self.fuse_qkv}"
        )


def gqa_qkv_linear_with_async_allreduce(
    input: torch.Tensor,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    weight_v: torch.Tensor | None,
    bias_q: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    kv_size_multiplier: int = 1,
    weight_qkv: torch.Tensor | None = None,
    bias_qkv: torch.Tensor | None = None,
    fuse_qkv: bool = False,
    output_size_q: int | None = None,
    output_size_kv: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> QKV:
    """Returns the projections of `GQAQKVColumnParallelLinear`, from this rank's shards of the weights.

    Args:
        async_grad_allreduce: sum the input's gradient over the ranks; False leaves it to the caller.
        sequence_parallel_enabled: the input is sharded on dim 0; its gradient is reduce-scattered.
        weight_qkv, bias_qkv: with `fuse_qkv`, in the place of the separate ones: `output_size_q` rows of q, and
            `output_size_kv` rows each of k and v.

    Raises:
        ValueError: `async_grad_allreduce` together with sequence parallelism.
    """
    if async_grad_allreduce and sequence_parallel_enabled:
        raise ValueError(
            "gqa_qkv_linear_with_async_allreduce: with sequence_parallel_enabled=True the gradient is "
            "reduce-scattered, not all-reduced; pass async_grad_allreduce=False"
        )
    weights: Sequence[Any] = (weight_q, weight_k, weight_v)
    biases: Sequence[Any] = (bias_q, bias_k, bias_v)
    if fuse_qkv:
        assert weight_qkv is not None and output_size_q is not None and output_size_kv is not None
        sizes = [output_size_q, output_size_kv, output_size_kv]
        weights = weight_qkv.split(sizes)
        biases = (None, None, None) if bias_qkv is None else bias_qkv.split(sizes)
    replicas = (1, kv_size_multiplier, kv_size_multiplier)
    weights = [used_parameter(weight, count, reduce_dtype) for weight, count in zip(weights, replicas)]
    biases = [used_parameter(bias, count, reduce_dtype) for bias, count in zip(biases, replicas) if bias is not None]
    if not (async_grad_allreduce or sequence_parallel_enabled):
        query, key, value = (F.linear(input, weight, bias) for weight, bias in zip(weights, biases or [None] * 3))
    else:
        dim = 0 if sequence_parallel_enabled else None
        query, key, value = column_outputs(input, weights, biases, "tp", dim, reduce_dtype)
    return query, key, value


class GQAQKVLinearWithAsyncCommunication:
    """NxD's name of the function's autograd part: `.apply` takes the arguments of the function."""

    apply = staticmethod(gqa_qkv_linear_with_async_allreduce)
