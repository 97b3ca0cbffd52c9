"""Column- and row-parallel linear layers.

Names (b tokens, in/out features, t ranks; `[b, in]` stands for any leading dims):

    column   Y[b, out/t] = X[b, in] · W[out/t, in]ᵀ       X is R on tp, W and Y are sharded on out
             dX[b, in]   = dY[b, out/t] · W               partial on tp: all-reduced, while dW is computed
             dW          = dYᵀ · X
    row      Y[b, out]   = X[b, in/t] · W[out, in/t]ᵀ     partial on tp: all-reduced
             dX[b, in/t] = dY[b, out] · W,   dW = dYᵀ · X  no communication

With sequence parallelism X (column) and Y (row) are sharded on the sequence: the all-reduces become an all-gather
forward and a reduce-scatter backward (column), and the other way round (row); only the shard of X is kept for backward,
and gathered again there. Source: Megatron-LM (arXiv:1909.08053, arXiv:2205.05198); API: NxD Core's
`ColumnParallelLinear` and `RowParallelLinear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import comm, spmd
from ..comm import Communicator
from ..comm.context import AxisLike
from ..spmd import I, P, R, S, ShardedModule, ShardSpec, set_spec
from ..spmd.random import checkpoint
from .utils import cast_if_autocast_enabled

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "fuse_columns", "linear_with_async_allreduce"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
InitMethod = Callable[[torch.Tensor], Any]


class _ColumnLinear(torch.autograd.Function):
    """n linear layers on one input, one input-gradient collective: started before the weight gradients, awaited after
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> Any:
        x, *params = cast_if_autocast_enabled(x, *weights_and_biases)  # type: ignore[assignment]
        weights, biases = params[:count], params[count:] or [None] * count
        ctx.save_for_backward(x, *weights)
        ctx.communicator, ctx.sequence_dim, ctx.reduce_dtype = communicator, sequence_dim, reduce_dtype
        ctx.has_bias = len(params) > count
        full = x if sequence_dim is None else comm.all_gather(x, communicator, dim=sequence_dim)
        outputs = tuple(F.linear(full, weight, bias) for weight, bias in zip(weights, biases))  # type: ignore[arg-type]
        return outputs[0] if count == 1 else outputs

    @staticmethod
    def composition(
        x: torch.Tensor,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> Any:
        """What the type checker compares this function with."""

        def linears(x: torch.Tensor, *params: torch.Tensor) -> Any:
            if sequence_dim is None:
                full = spmd.convert(x, communicator, src=I, dst=R, reduce_dtype=reduce_dtype)
            else:
                full = spmd.all_gather(x, communicator, src=S(sequence_dim), dst=R, reduce_dtype=reduce_dtype)
            biases = params[count:] or [None] * count
            return tuple(F.linear(full, weight, bias) for weight, bias in zip(params, biases))

        if sequence_dim is None:
            return linears(x, *weights_and_biases)
        return checkpoint(linears, x, *weights_and_biases)  # what was gathered is not kept

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        communicator, dim = ctx.communicator, ctx.sequence_dim
        count = len(weights)
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        need_weights = any(need[:count])
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [tokens, out/t]
        gathering = None
        if dim is not None and need_weights:
            gathering = comm.all_gather(x, communicator, dim=dim, async_op=True)
        reducing = None
        if need_x:
            grad_x = flat[0].mm(weights[0])
            for grad, weight in zip(flat[1:], weights[1:]):
                grad_x.addmm_(grad, weight)
            grad_x = grad_x.view(*grads[0].shape[:-1], grad_x.shape[-1])
            if dim is None:
                reducing = comm.all_reduce(
                    grad_x, communicator, reduce_dtype=ctx.reduce_dtype, out=grad_x, async_op=True
                )
            else:
                reducing = comm.reduce_scatter(
                    grad_x, communicator, dim=dim, reduce_dtype=ctx.reduce_dtype, async_op=True
                )
        if gathering is not None:
            x = gathering.wait()
        grad_params = _parameter_grads(x, flat, need, count, ctx.has_bias)
        return (reducing.wait() if reducing is not None else None, None, None, None, None, *grad_params)


class _RowLinear(torch.autograd.Function):
    """A linear layer whose output is partial, the reduction done in the output's own memory, and the bias added to the
    sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        x, weight, bias = cast_if_autocast_enabled(x, weight, bias)  # type: ignore[assignment]
        ctx.save_for_backward(x, weight)
        ctx.communicator, ctx.sequence_dim = communicator, sequence_dim
        out = F.linear(x, weight)
        if sequence_dim is None:
            out = comm.all_reduce(out, communicator, reduce_dtype=reduce_dtype, out=out)
        else:
            out = comm.reduce_scatter(out, communicator, dim=sequence_dim, reduce_dtype=reduce_dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def composition(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """What the type checker compares this function with."""
        out = F.linear(x, weight)
        if sequence_dim is None:
            out = spmd.all_reduce(out, communicator, src=P, dst=I, reduce_dtype=reduce_dtype)
        else:
            out = spmd.reduce_scatter(out, communicator, src=P, dst=S(sequence_dim), reduce_dtype=reduce_dtype)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if need[2] else None
        if ctx.sequence_dim is not None:
            grad = comm.all_gather(grad, ctx.communicator, dim=ctx.sequence_dim)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = flat.mm(weight).view(*grad.shape[:-1], weight.shape[1]) if need[0] else None
        (grad_weight,) = _parameter_grads(x, (flat,), (need[1],), 1, False)
        return grad_x, grad_weight, grad_bias, None, None, None


def _parameter_grads(
    x: torch.Tensor, flat: Sequence[torch.Tensor], need: Sequence[bool], count: int, has_bias: bool
) -> list[torch.Tensor | None]:
    """dW = dYᵀ · X and db = Σ dY, for those that are needed; `flat` holds each layer's dY as `[tokens, out/t]`."""
    flat_x = x.reshape(-1, x.shape[-1])
    found: list[torch.Tensor | None] = [g.t().mm(flat_x) if need[i] else None for i, g in enumerate(flat)]
    if has_bias:
        found += [g.sum(0) if need[count + i] else None for i, g in enumerate(flat)]
    return found


def linear_with_async_allreduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    axis: AxisLike = "tp",
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`x · weightᵀ + bias` for a weight sharded on its rows: the functional form of `ColumnParallelLinear`.

    `x` is `[.., in]`, the same on all ranks, or with `sequence_dimension` sharded along that dim.
    """
    communicator = comm.communicator(axis)
    if communicator.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(
        x, communicator, sequence_dimension, reduce_dtype, 1, weight, *([] if bias is None else [bias])
    )


class _ParallelLinear(ShardedModule):
    """What column and row share: sizes, parameters, and weights that do not depend on the layout."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        dtype: torch.dtype,
        device: Any,
        stride: int,
        init_method: InitMethod | None,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        skip_bias_add: bool,
        tensor_model_parallel_group: Any,
        reduce_dtype: torch.dtype | None,
        keep_master_weight: bool,
        shard_dim: int,
        bias_is_sharded: bool,
        bias_is_partial: bool,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.axis: AxisLike = tensor_model_parallel_group or "tp"
        self.stride = stride
        self.init_method = init_method
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add = skip_bias_add
        self.reduce_dtype = reduce_dtype
        size = comm.communicator(self.axis).size
        full = (output_size, input_size)
        kind = type(self).__name__
        if full[shard_dim] % (size * stride):
            raise ValueError(
                f"{kind}: {'output' if shard_dim == 0 else 'input'}_size {full[shard_dim]} is not divisible by "
                f"the tensor parallel size {size}"
                + (f" times {stride} fused blocks" if stride > 1 else "")
                + "; pad it (see pad_model) or choose another degree"
            )
        layout_axis = self.axis if isinstance(self.axis, str) else "tp"
        spec = ShardSpec(layout_axis, shard_dim, stride, size, full)
        place = torch.device(device) if device is not None else torch.get_default_device()
        self.weight = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=place))
        set_spec(self, "weight", spec)
        if bias:
            bias_spec = (
                ShardSpec(layout_axis, 0, stride, size, (output_size,))
                if bias_is_sharded
                else ShardSpec(full_shape=(output_size,))
            )
            if bias_is_partial and size > 1:
                bias_spec = ShardSpec(full_shape=(output_size,), sequence_parallel=True)
            self.bias = nn.Parameter(torch.empty(bias_spec.local_shape, dtype=dtype, device=place))
            set_spec(self, "bias", bias_spec)
        else:
            self.register_parameter("bias", None)
        self.master_weight: torch.Tensor | None = None
        if place.type != "meta":
            self._draw(keep_master_weight)

    def full_module(self, device: Any = "meta") -> nn.Linear:
        """The unsharded layer: same class of layer, whole (unpadded) shapes; for initialisers."""
        out_features, in_features = spmd.spec_of(self.weight).unpadded_shape
        full = nn.Linear(in_features, out_features, bias=self.bias is not None, device="meta", dtype=self.weight.dtype)
        return full if torch.device(device).type == "meta" else full.to_empty(device=device)

    @torch.no_grad()
    def _draw(self, keep_master_weight: bool) -> None:
        """Draws the whole parameters from the global CPU generator, and keeps this rank's slices: equal at any
        degree.
        """
        rank = comm.communicator(self.axis).rank
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        for name, param in (("weight", self.weight), ("bias", self.bias)):
            if param is None:
                continue
            spec = spmd.spec_of(param)
            whole = torch.empty(spec.full_shape, dtype=dtype, device="cpu")
            if name == "bias":
                bound = 1 / math.sqrt(self.input_size) if self.input_size else 0.0
                nn.init.uniform_(whole, -bound, bound)
            elif self.init_method is not None:
                self.init_method(whole)
            else:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            param.copy_(spec.local_slice(whole, rank))
            if name == "weight" and keep_master_weight:
                self.master_weight = whole

    def _bias(self) -> torch.Tensor | None:
        return None if self.skip_bias_add else self.bias

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"local_weight={list(self.weight.shape)}"
            + (f", sequence_parallel(dim={self.sequence_dimension})" if self.sequence_parallel_enabled else "")
        )


class ColumnParallelLinear(_ParallelLinear):
    """`Y = X · Aᵀ + b` with A sharded along the output features: `[.., in] -> [.., out/tp]`.

    Args:
        input_size, output_size: features of the whole layer.
        bias: add a bias: sharded, or with `gather_output` whole on every rank.
        gather_output: return `[.., out]` on every rank instead of this rank's shard.
        stride: the output is made of `stride` fused blocks (gate and up: 2), each sharded by itself.
        init_method: fills the whole weight `[out, in]` in place; None: as `nn.Linear`.
        sequence_parallel_enabled: the input is sharded along `sequence_dimension` (0 by default), and is gathered here.
        skip_bias_add: return `(output, bias)` and leave adding to the caller.
        tensor_model_parallel_group: an axis or a group other than "tp".
        reduce_dtype: input gradients are summed in `promote_types(dtype, reduce_dtype)`.
        input_is_replicated: the input's gradient is summed elsewhere (the input is R, not I): no collective in
            backward.
        device: "meta" builds without memory; `materialize` then draws the weights.

    Raises:
        ValueError: `output_size` does not divide by tp * stride; `gather_output` together with sequence parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        *,
        input_is_replicated: bool = False,
    ) -> None:
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "ColumnParallelLinear: gather_output=True is not possible with sequence_parallel_enabled=True; "
                "pass gather_output=False"
            )
        super().__init__(
            input_size,
            output_size,
            bias,
            dtype,
            device,
            stride,
            init_method,
            sequence_parallel_enabled,
            sequence_dimension,
            skip_bias_add,
            tensor_model_parallel_group,
            reduce_dtype,
            keep_master_weight,
            shard_dim=0,
            bias_is_sharded=not gather_output,
            bias_is_partial=False,
        )
        self.gather_output = gather_output
        self.input_is_replicated = input_is_replicated
        self.output_size_per_partition = self.weight.shape[0]
        self._siblings: _FusedColumns | None = None

    def forward(self, x: torch.Tensor) -> Output:
        """`[.., in] -> [.., out/tp]`, or `[.., out]` with gather_output; `(output, bias)` with skip_bias_add."""
        if self._siblings is not None:
            out = self._siblings.output_of(self, x)
        elif self.gather_output:
            out = self._gathered(self._linear(x, None))
        else:
            out = self._linear(x, self._bias())
        return (out, self.bias) if self.skip_bias_add else out

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        communicator = comm.communicator(self.axis)
        if communicator.size == 1 or self.input_is_replicated:
            return F.linear(x, self.weight, bias)
        dim = self.sequence_dimension if self.sequence_parallel_enabled else None
        if bias is None:
            return _ColumnLinear.apply(x, communicator, dim, self.reduce_dtype, 1, self.weight)
        return _ColumnLinear.apply(x, communicator, dim, self.reduce_dtype, 1, self.weight, bias)

    def _gathered(self, out: torch.Tensor) -> torch.Tensor:
        if self.stride > 1:  # each block is gathered by itself
            out = spmd.all_gather(out.unflatten(-1, (self.stride, -1)), self.axis, src=S(-1), dst=I).flatten(-2)
        else:
            out = spmd.all_gather(out, self.axis, src=S(-1), dst=I)
        bias = self._bias()
        return out if bias is None else out + bias


class _FusedColumns:
    """Column layers on one input, computed together when the first of them is called.

    The parameters stay apart, so a state dict has a model's own names and nothing is copied; what is fused is the input
    gradient, which is one sum and one collective instead of one for each layer.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        self._input: torch.Tensor | None = None
        self._outputs: dict[ColumnParallelLinear, torch.Tensor] = {}  # of those not yet called

    def output_of(self, layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x or layer not in self._outputs:
            self._input, self._outputs = x, dict(zip(self.layers, self._compute(x)))
        out = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None
        return out

    def _compute(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        first = self.layers[0]
        communicator = comm.communicator(first.axis)
        if communicator.size == 1 or first.input_is_replicated:
            return [F.linear(x, layer.weight, layer._bias()) for layer in self.layers]
        biases = [] if first._bias() is None else [layer.bias for layer in self.layers]
        dim = first.sequence_dimension if first.sequence_parallel_enabled else None
        weights = [layer.weight for layer in self.layers]
        return _ColumnLinear.apply(x, communicator, dim, first.reduce_dtype, len(weights), *weights, *biases)


def fuse_columns(layers: Sequence[ColumnParallelLinear]) -> None:
    """Makes column layers that are always called on the same tensor (q/k/v, gate/up) share one input-gradient
    collective.

    Raises:
        ValueError: they differ in input, group, sequence parallelism or bias, or gather their output.
    """
    kinds = {
        (
            layer.input_size,
            layer.axis,
            layer.sequence_parallel_enabled,
            layer.sequence_dimension,
            layer.input_is_replicated,
            layer.reduce_dtype,
            layer._bias() is not None,
            layer.gather_output,
        )
        for layer in layers
    }
    if len(layers) < 2 or len(kinds) != 1 or next(iter(kinds))[-1]:
        raise ValueError(
            "fuse_columns needs at least two layers with equal input size, group, sequence parallelism, reduce "
            "dtype and bias, and "
            f"gather_output=False; got {[repr(layer) for layer in layers]}"
        )
    fused = _FusedColumns(layers)
    for layer in layers:
        layer._siblings = fused


class RowParallelLinear(_ParallelLinear):
    """`Y = X · Aᵀ + b` with A sharded along the input features: `[.., in/tp] -> [.., out]`.

    Args:
        input_size, output_size: features of the whole layer.
        bias: add a bias, whole on every rank, once, after the sum.
        input_is_parallel: the input is this rank's shard `[.., in/tp]`; otherwise it is whole and is split here.
        reduce_output: False returns the partial sum (bias on the first rank only).
        sequence_parallel_enabled: the output is sharded along `sequence_dimension` (0 by default): reduce-scattered.
        reduce_dtype: outputs are summed in `promote_types(dtype, reduce_dtype)`.
        (others as in ColumnParallelLinear)

    Raises:
        ValueError: `input_size` does not divide by tp; sequence parallelism without `input_is_parallel`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("RowParallelLinear: sequence_parallel_enabled=True needs input_is_parallel=True")
        super().__init__(
            input_size,
            output_size,
            bias,
            dtype,
            device,
            stride,
            init_method,
            sequence_parallel_enabled,
            sequence_dimension,
            skip_bias_add,
            tensor_model_parallel_group,
            reduce_dtype,
            keep_master_weight,
            shard_dim=1,
            bias_is_sharded=False,
            bias_is_partial=sequence_parallel_enabled or not reduce_output,
        )
        self.input_is_parallel = input_is_parallel
        self.reduce_output = reduce_output
        self.input_size_per_partition = self.weight.shape[1]

    def forward(self, x: torch.Tensor) -> Output:
        """`[.., in/tp]` (or `[.., in]`) `-> [.., out]`; `(output, bias)` with skip_bias_add."""
        communicator = comm.communicator(self.axis)
        bias = self._bias()
        if communicator.size == 1:
            out = F.linear(x, self.weight, bias)
        else:
            if not self.input_is_parallel:
                if self.stride > 1:  # of each block its piece, as the weight is sharded
                    x = x.unflatten(-1, (self.stride, -1))
                x = spmd.convert(x, communicator, src=I, dst=S(-1))
                x = x.flatten(-2) if self.stride > 1 else x
            if self.reduce_output:
                dim = self.sequence_dimension if self.sequence_parallel_enabled else None
                out = _RowLinear.apply(x, self.weight, bias, communicator, dim, self.reduce_dtype)
            else:
                out = F.linear(
                    x, self.weight, spmd.convert(bias, communicator, src=R, dst=P) if bias is not None else None
                )
        return (out, self.bias) if self.skip_bias_add else out
