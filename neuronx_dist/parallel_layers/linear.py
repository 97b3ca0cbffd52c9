"""Column- and row-parallel linear layers, by NxD Core's names (the formulas: `autograd_linear.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import comm, spmd
from ..comm.context import AxisLike
from ..lazy_names import lazy_names
from ..spmd import I, P, R, S, ShardSpec, V, set_spec
from ..spmd.gathered_tensors import carry_note
from .attributes import LinearAttributes
from .autograd_linear import ColumnLinear, RowLinear, ZerosStay, call, linear_alone
from .first_batch import compare_noted, note_first
from .signatures import accepts

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "column_shards"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
InitMethod = Callable[[torch.Tensor], Any]
_late = lazy_names(__name__, dict.fromkeys(("refuse_input", "refuse_sequence"), "parallel_layers.misfits"))


class _ParallelLinear(LinearAttributes):
    """The base of column and row layers: sizes, parameters, and initial weights that do not depend on the layout."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
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
        replicas: int,
        shard_dim: int,
        bias_is_sharded: bool,
        bias_is_partial: bool,
        pad: bool = False,
        alignment: int = 1,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.pad = pad
        self.axis: AxisLike = tensor_model_parallel_group or "tp"
        self.stride = stride
        self.init_method = init_method
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add = skip_bias_add
        self.reduce_dtype = reduce_dtype
        self.replicas = replicas
        size = comm.communicator(self.axis).size
        if replicas != 1 and (self.axis != "tp" or replicas < 1 or size % replicas):
            raise ValueError(
                f"{type(self).__name__}: {replicas} replicas of each shard over {self.axis} of size {size}: the number "
                "must divide the size, and the axis must be 'tp'"
            )
        size //= replicas
        unpadded = (output_size, input_size)[shard_dim]
        self.pad_size = -unpadded % (size * stride * alignment) if pad else 0
        full = (
            (output_size + self.pad_size, input_size) if shard_dim == 0 else (output_size, input_size + self.pad_size)
        )
        if full[shard_dim] % (size * stride):
            side = "output" if shard_dim == 0 else "input"
            raise ValueError(
                f"{type(self).__name__}: {side}_size {full[shard_dim]} is not divisible by the tensor parallel size "
                f"{size * replicas}"
                + (f" / {replicas} replicas" if replicas > 1 else "")
                + (f" times {stride} fused blocks" if stride > 1 else "")
                + "; pad it (see pad_model, or pad=True) or choose another degree"
            )
        layout_axis = self.axis if isinstance(self.axis, str) else "tp"
        if replicas > 1:
            layout_axis = f"tp/{replicas}"
            for part in (layout_axis, f"tp%{replicas}"):  # while all ranks are here: a checkpoint is saved by some
                comm.communicator(part)
        real = unpadded if self.pad_size else None
        spec = ShardSpec(layout_axis, shard_dim, stride, size, full, real)
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.weight = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=target))
        set_spec(self, "weight", spec)
        if bias:
            if bias_is_sharded:
                bias_spec = ShardSpec(layout_axis, 0, stride, size, full[:1], real)
            else:
                is_partial = bias_is_partial and (size > 1 or self.axis == "tp")  # at tp 1 too, as in NxD
                bias_spec = ShardSpec(full_shape=(output_size,), sequence_parallel=is_partial)
            self.bias = nn.Parameter(torch.empty(bias_spec.local_shape, dtype=dtype, device=target))
            set_spec(self, "bias", bias_spec)
        else:
            self.register_parameter("bias", None)
        self.keep_master_weight = keep_master_weight
        self.master_weight: torch.Tensor | None = None
        if target.type != "meta":
            self.init_weight_cpu()
            if bias:
                bound = 1 / math.sqrt(input_size) if input_size else 0.0
                self._draw("bias", partial(nn.init.uniform_, a=-bound, b=bound))

    def full_module(self, device: Any = "meta") -> nn.Linear:
        """The unsharded layer: same class of layer, whole (unpadded) shapes; for initialisers."""
        out_features, in_features = spmd.spec_of(self.weight).unpadded_shape
        full = nn.Linear(in_features, out_features, bias=self.bias is not None, device="meta", dtype=self.weight.dtype)
        return full if torch.device(device).type == "meta" else full.to_empty(device=device)

    def init_weight_cpu(self) -> None:
        """Draws the unsharded weight from the global CPU generator, and stores this rank's slice.

        So the weight is equal at any degree. With `keep_master_weight` the whole weight is stored too.
        """
        whole = self._draw("weight", self.init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        if self.keep_master_weight:
            self.master_weight = whole

    def _draw(self, name: str, init_method: InitMethod) -> torch.Tensor:
        """Draws an unsharded parameter, and stores this rank's slice; returns the unsharded parameter."""
        param = self._parameters[name]
        assert param is not None
        return draw(param, init_method, comm.communicator(self.axis).rank // self.replicas)

    def added_bias(self) -> torch.Tensor | None:
        return None if self.skip_bias_add else self.bias

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"local_weight={list(self.weight.shape)}"
            + (f", sequence_parallel(dim={self.sequence_dimension})" if self.sequence_parallel_enabled else "")
            + (f", replicas={self.replicas}" if self.replicas > 1 else "")
        )


def sequence_dim_of(layer: Any, x: torch.Tensor) -> int | None:
    """The sequence dim of a layer's input and output, if it is sharded; else None."""
    if not layer.sequence_parallel_enabled or comm.communicator(layer.axis).size == 1:
        return None
    dim: int = layer.sequence_dimension
    if not -x.dim() <= dim < x.dim() - 1 or dim == -1:  # the last dim is that of the features
        _late("refuse_sequence")(layer, x)
    return dim


@torch.no_grad()
def draw(param: torch.Tensor, init_method: InitMethod, index: int) -> torch.Tensor:
    """Draws a whole parameter from the global CPU generator, stores shard number `index`, and returns the whole."""
    spec = spmd.spec_of(param)
    whole = torch.empty(spec.unpadded_shape, dtype=torch.promote_types(param.dtype, torch.float32), device="cpu")
    init_method(whole)
    param.copy_(spec.local_slice(whole, index))
    return whole


class ColumnParallelLinear(_ParallelLinear):
    """`Y = X · Aᵀ + b` with A sharded along the output features: `[.., in] -> [.., out/tp]`.

    Args:
        input_size, output_size: features of the whole layer.
        bias: add a bias: sharded, or with `gather_output` whole on every rank.
        gather_output: return `[.., out]` on every rank instead of this rank's shard.
        stride: number of fused blocks of the output (gate and up: 2), each sharded separately.
        init_method: fills the whole weight `[out, in]` in place; None: as `nn.Linear`.
        sequence_parallel_enabled: the input is sharded along `sequence_dimension` (0 by default), and is gathered here.
        skip_bias_add: return `(output, bias)` and leave adding to the caller.
        pad: add outputs of zeros until tp (times `pad_alignment_size_per_rank`) divides them. A gathered output has
            none of them, but for `keep_padded_output`; for logits see `vocab_size` of `parallel_cross_entropy`.
        tensor_model_parallel_group: an axis or a group other than "tp".
        reduce_dtype: input gradients are summed in `promote_types(dtype, reduce_dtype)`.
        input_is_replicated: the input's gradient is summed elsewhere (the input is R, not I): no collective in
            backward.
        replicas: number of adjacent ranks that hold each of the tp / replicas shards, for fewer key/value heads than
            ranks. The weight's gradient is summed over them in backward (upstream: kv_size_multiplier).
        device: "meta" builds without memory; `materialize` then draws the weights.

    NxD's other arguments, and the positional orders of its release and its API guide: `signatures.py`.

    Raises:
        ValueError: `output_size` does not divide by tp / replicas * stride; `gather_output` together with sequence
            parallelism or with replicas.
    """

    column_parameters = ("weight", "bias")
    deferring: Any = None  # of hf/deferred_logits.py: returns the output of a model's head, or None

    @accepts("ColumnParallelLinear")
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
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        *,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        input_is_replicated: bool = False,
        replicas: int = 1,
    ) -> None:
        if gather_output and replicas != 1:
            raise ValueError(
                f"ColumnParallelLinear: gather_output=True is not possible with replicas={replicas}; pass "
                "gather_output=False"
            )
        if gather_output and sequence_parallel_enabled:
            raise ValueError(
                "ColumnParallelLinear: gather_output=True is not possible with sequence_parallel_enabled=True; "
                "pass gather_output=False"
            )
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            skip_bias_add=skip_bias_add,
            tensor_model_parallel_group=tensor_model_parallel_group,
            reduce_dtype=reduce_dtype,
            keep_master_weight=keep_master_weight,
            replicas=replicas,
            shard_dim=0,
            bias_is_sharded=not gather_output,
            bias_is_partial=False,
            pad=pad,
            alignment=pad_alignment_size_per_rank,
        )
        if keep_padded_output and stride > 1 and self.pad_size:
            raise ValueError(f"ColumnParallelLinear: keep_padded_output=True is not possible with stride={stride}")
        self.keep_padded_output = keep_padded_output
        self.gather_output = gather_output
        self.input_is_replicated = input_is_replicated
        self.output_size_per_partition = self.weight.shape[0]
        self._siblings: Any = None  # of fused_columns.py

    def forward(self, input: torch.Tensor) -> Output:
        """`[.., in] -> [.., out/tp]`, or `[.., out]` with gather_output; `(output, bias)` with skip_bias_add."""
        if self.deferring is not None and (deferred := self.deferring(self, input)) is not None:
            return deferred
        try:
            if self._siblings is not None:
                out = self._siblings.output_of(self, input)
            else:
                (out,) = column_shards([self], input)
                if self.gather_output:
                    out = self.gathered_output(out)
        except (RuntimeError, ValueError) as error:
            _late("refuse_input")(self, input, error)
            raise
        return (out, self.used(self.bias)) if self.skip_bias_add else out

    def used(self, param: torch.Tensor | None) -> torch.Tensor | None:
        return None if param is None else used_parameter(param, self.replicas, self.reduce_dtype)

    def separate(self) -> None:
        """Takes the layer out of those that `fuse_columns` computes together; the others stay."""
        siblings, self._siblings = self._siblings, None
        if siblings is not None:
            siblings.layers.remove(self)

    def gathered_output(self, out: torch.Tensor) -> torch.Tensor:
        return gathered(out, self.axis, self.added_bias(), self.stride, 0 if self.keep_padded_output else self.pad_size)


def used_parameter(param: torch.Tensor, replicas: int, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a parameter for use: backward sums the gradients of all ranks with the same shard."""
    if replicas == 1:
        return param
    axis = f"tp%{replicas}"
    copy = spmd.reinterpret(param, axis, src=I, dst=V, reduce_dtype=reduce_dtype)
    return spmd.trust(copy, axis, S(0), "copies of a shard are the shards of the parameter with its rows repeated")


def gathered(
    out: torch.Tensor, axis: AxisLike, bias: torch.Tensor | None, stride: int = 1, padding: int = 0
) -> torch.Tensor:
    """Gathers an output's features, `[.., out/tp] -> [.., out]`, drops padding, and adds a bias `[out]`."""
    if stride > 1:  # each block is gathered by itself
        out = spmd.all_gather(out.unflatten(-1, (stride, -1)), axis, src=S(-1), dst=I).flatten(-2)
    else:
        out = spmd.all_gather(out, axis, src=S(-1), dst=I)
    if padding:
        blocks = out.unflatten(-1, (stride, -1))
        out = blocks.narrow(-1, 0, blocks.shape[-1] - padding // stride).flatten(-2)
    if bias is None:
        return out
    if bias.shape[0] < out.shape[-1]:
        bias = F.pad(bias, (0, out.shape[-1] - bias.shape[0]))
    result = out + bias
    carry_note(out, result)
    return result


def column_shards(layers: Sequence[ColumnParallelLinear], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """This rank's shards of the outputs of layers of one kind on `x`; without a bias, which comes after a gather."""
    first = layers[0]
    weights: list[Any] = [layer.used(layer.weight) for layer in layers]
    biases = [] if first.gather_output or first.added_bias() is None else [layer.used(layer.bias) for layer in layers]
    if first.input_is_replicated and comm.communicator(first.axis).size > 1:
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases or repeat(None))]
    shard = weights[0] if first.replicas == 1 else None
    return column_outputs(x, weights, biases, first.axis, sequence_dim_of(first, x), first.reduce_dtype, shard)


def column_outputs(
    x: torch.Tensor,
    weights: Sequence[Any],
    biases: Sequence[Any],
    axis: AxisLike,
    sequence_dim: int | None,
    reduce_dtype: torch.dtype | None,
    shard: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:
    """Outputs `x · weightᵀ + bias` of several column weights on one input, whose gradient is one sum.

    `shard`: a weight whose values no other rank has.
    """
    communicator = comm.communicator(axis)
    if communicator.size == 1:
        return [linear_alone(x, weight, bias, communicator) for weight, bias in zip(weights, biases or repeat(None))]
    if sequence_dim is None:
        note_first(x, communicator, "inputs of linear layers", shard)
    return call(ColumnLinear, x, communicator, sequence_dim, reduce_dtype, len(weights), *weights, *biases)


class RowParallelLinear(_ParallelLinear):
    """`Y = X · Aᵀ + b` with A sharded along the input features: `[.., in/tp] -> [.., out]`.

    Args:
        input_size, output_size: features of the whole layer.
        bias: add a bias, whole on every rank, once, after the sum.
        input_is_parallel: the input is this rank's shard `[.., in/tp]`; otherwise it is whole and is split here.
        pad: add inputs of zeros until tp divides them; an input that is not parallel has none of them.
        reduce_output: False returns the partial sum (bias on the first rank only).
        sequence_parallel_enabled: the output is sharded along `sequence_dimension` (0 by default): reduce-scattered.
        reduce_dtype: outputs are summed in `promote_types(dtype, reduce_dtype)`.
        (others as in ColumnParallelLinear)

    Raises:
        ValueError: `input_size` does not divide by tp; sequence parallelism without `input_is_parallel`.
    """

    @accepts("RowParallelLinear")
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
        pad: bool = False,
        *,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("RowParallelLinear: sequence_parallel_enabled=True needs input_is_parallel=True")
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            skip_bias_add=skip_bias_add,
            tensor_model_parallel_group=tensor_model_parallel_group,
            reduce_dtype=reduce_dtype,
            keep_master_weight=keep_master_weight,
            replicas=1,
            shard_dim=1,
            bias_is_sharded=False,
            bias_is_partial=sequence_parallel_enabled or not reduce_output,
            pad=pad,
        )
        self.input_is_parallel = input_is_parallel
        self.reduce_output = reduce_output
        self.input_size_per_partition = self.weight.shape[1]

    def forward(self, input_: torch.Tensor) -> Output:
        """`[.., in/tp]` (or `[.., in]`) `-> [.., out]`; `(output, bias)` with skip_bias_add."""
        communicator = comm.communicator(self.axis)
        compare_noted(communicator)
        weight, bias, shard = self.used_weight(), self.added_bias(), input_
        try:
            if communicator.size == 1:
                out = linear_alone(input_, weight, bias, communicator)
            else:
                if not self.input_is_parallel:
                    if self.stride > 1:  # of each block its piece, as the weight is sharded
                        shard = input_.unflatten(-1, (self.stride, -1))
                    if self.pad_size:
                        shard = F.pad(shard, (0, self.pad_size // self.stride))
                    shard = spmd.convert(shard, communicator, src=I, dst=S(-1))
                    shard = shard.flatten(-2) if self.stride > 1 else shard
                if self.reduce_output:
                    dim = sequence_dim_of(self, input_)
                    out = call(RowLinear, shard, weight, bias, communicator, dim, self.reduce_dtype)
                else:
                    out = spmd.trust(F.linear(shard, weight), communicator, P)
                    if bias is not None:
                        out = out + spmd.convert(bias, communicator, src=R, dst=P).to(out.dtype)
        except (RuntimeError, ValueError) as error:
            _late("refuse_input")(self, input_, error)
            raise
        return (out, self.bias) if self.skip_bias_add else out

    def used_weight(self) -> torch.Tensor:
        """The weight; padded query heads in the group of a real key/value head have values, and must not train it."""
        spec = spmd.spec_of(self.weight)
        if spec.group is None:
            return self.weight
        real, padded = spec.group
        mask = torch.arange(spec.full_shape[1], device=self.weight.device) % padded < real
        return call(ZerosStay, self.weight, spmd.convert(mask, self.axis, src=R, dst=S(0)))
