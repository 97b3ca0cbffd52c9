"""`with one_exchange():`: consecutive windows after one exchange of halos, in place of one exchange each.

Inside of the block a convolution or max pooling over one sharded dim gives a `Deferred` tensor: its layout is known,
its values are computed when they are asked for. Windows of a Deferred tensor, and activations and numbers in between,
only add to what there is to compute. What the block leaves is computed at its end: each rank gets, by one exchange, all
that its last outputs need (`chains.py`), and computes the outputs near its bounds that its neighbours compute too.

Everything else asks for values, and so runs as it does outside of the block. Nothing depends on which tensors are
still alive, so all ranks exchange alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.select import in_one_program
from ...spmd import S
from ..chains import plan_chain
from ..exchange import planned_bytes
from ..intervals import bounds_of
from ..pending import Pending
from ..report import note, watched
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, in_layout, local_of, wrap
from ..typed import on_own_shard
from ..windows import plan_windows
from .local_windows import ShardedDim, Windows, chained, over_halo

__all__ = ["Deferred", "deferrable", "deferred", "mapped", "one_exchange", "outline"]


class Stage(NamedTuple):
    """One window of several.

    Attributes:
        name: of its function.
        spec: of its input.
        op: gives an output for each whole window; activations that follow are part of it.
    """

    name: str
    spec: ShardTensorSpec
    windows: Windows
    op: Callable[[torch.Tensor], torch.Tensor]


class Work(NamedTuple):
    """What there is to compute.

    Attributes:
        source: the local input of the first stage.
        sharded: how it is.
        inputs: the source and all weights, and the version of each: they must not be modified meanwhile.
    """

    source: torch.Tensor
    sharded: ShardedDim
    stages: tuple[Stage, ...]
    inputs: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    grad_enabled: bool


class Deferred(Pending):
    """A ShardTensor whose local tensor is computed when it is asked for."""

    __slots__ = ()

    _work: Work

    def _values(self) -> torch.Tensor:
        local = _computed(self._work)
        (_block.get() or {}).pop(id(self), None)
        del self._work
        return local


_block: ContextVar[dict[int, Deferred] | None] = ContextVar("one_exchange", default=None)  # what it has not computed


@contextmanager
def one_exchange() -> Iterator[None]:
    """Consecutive convolutions and max poolings in the block exchange halos once, not once each. Exact.

    What is composed: functions over windows of one sharded dim, with activations and numbers in between. All else runs
    as it does outside of the block: other functions, several sharded dims, channels that are sharded, autocast,
    inference mode, and XLA. Outputs near the bounds of shards are computed on several ranks; `report()` says how many.

    Raises:
        RuntimeError: an input or a weight was modified in place before the result was computed, at the end of the
            block or where its values are asked for.

    Example:
        >>> with one_exchange():
        ...     y = conv2(F.relu(conv1(x)))
    """
    pending: dict[int, Deferred] = {}
    token = _block.set(pending)
    try:
        yield
        for x in list(pending.values()):
            if isinstance(x, Deferred):
                local_of(x)
    finally:
        _block.reset(token)


def deferrable(x: Any, count: int) -> bool:
    """Whether a window of `x` over its last `count` dims can be composed with others here."""
    if _block.get() is None or not isinstance(x, ShardTensor) or x._spec.mesh.communicators is None:
        return False
    spec, first = x._spec, x.dim() - count
    return (
        not spec.partial
        and first in (1, 2)
        and x.is_floating_point()
        and [dim >= first for _, dim in spec.sharded].count(True) == 1
        and 0 not in spec.shape
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.is_inference_mode_enabled()
        and not in_one_program(x)
    )


def outline(x: ShardTensor) -> ShardTensor:
    """A tensor of the same layout without values, from which layouts of results are planned."""
    return wrap(torch.empty(0, dtype=x.dtype, device=x.device), x._spec) if isinstance(x, Deferred) else x


def deferred(
    name: str, x: ShardTensor, windows: Windows, out: ShardTensorSpec, weights: Sequence[torch.Tensor | None] = ()
) -> ShardTensor:
    """The result of windows of `x`, to be computed later.

    Args:
        out: its layout, but for the spatial dims.
        weights: local tensors that `windows.op` uses.

    Raises:
        ValueError: as `plan_windows`.
    """
    spec = x._spec
    ((m, dim),) = [each for each in spec.sharded if each[1] in windows.maps]
    sharded = ShardedDim(dim, bounds_of(spec.sizes[m] or ()), spec.mesh.communicator(m))
    stage = Stage(name, spec, windows, windows.op)
    bounds = plan_windows(windows.maps[dim], sharded.bounds).out_bounds
    shape, sizes = list(out.shape), list(spec.sizes)
    for d, each in windows.maps.items():
        shape[d] = each.outputs
    sizes[m] = tuple(high - low for low, high in pairwise(bounds))
    result = make_spec(spec.mesh, spec.placements, shape, tuple(sizes))
    own = tuple(w for w in weights if w is not None)
    if isinstance(x, Deferred) and x._work.grad_enabled == torch.is_grad_enabled():
        work = x._work
        inputs, stages = (*work.inputs, *own), (*work.stages, stage)
        return _new(work._replace(inputs=inputs, versions=_versions(work, own), stages=stages), result, x)
    source = local_of(x)
    inputs = (source, *own)
    versions = tuple(each._version for each in inputs)
    return _new(Work(source, sharded, (stage,), inputs, versions, torch.is_grad_enabled()), result, None)


def _versions(work: Work, own: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return (*work.versions, *(each._version for each in own))


def mapped(x: Deferred, function: Callable[[torch.Tensor], torch.Tensor]) -> ShardTensor | None:
    """`function(x)`, of each element by itself and of the same dtype, to be computed later; None: not here."""
    work = x._work
    if _block.get() is None or work.grad_enabled != torch.is_grad_enabled():
        return None
    last = work.stages[-1]
    op = last.op
    composed = last._replace(op=lambda local: function(op(local)))
    return _new(work._replace(stages=(*work.stages[:-1], composed)), x._spec, x)


def _new(work: Work, spec: ShardTensorSpec, before: Deferred | None) -> Deferred:
    block = _block.get()
    assert block is not None
    if before is not None:
        block.pop(id(before), None)  # computed with this one, or when it is asked for
    if work.grad_enabled and any(each.requires_grad for each in work.inputs):
        result = _defer(work, spec, *work.inputs)
    else:
        result = _outlined(work, spec)
    result._foreign = not work.grad_enabled
    block[id(result)] = result
    return result


def _outlined(work: Work, spec: ShardTensorSpec) -> Deferred:
    result = Deferred.outlined(work.source, spec)
    result._work = work
    return result


class _Defer(torch.autograd.Function):
    """The graph that a foreign autograd function finds before the values are computed."""

    @staticmethod
    def forward(ctx: Any, work: Work, spec: ShardTensorSpec, *inputs: torch.Tensor) -> Deferred:
        ctx.work, ctx.spec = work, spec
        ctx.set_materialize_grads(False)
        return _outlined(work, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:  # the values have been computed, and the wrapper is linked to their graph
            return (None,) * (2 + len(ctx.work.inputs))
        inputs = [each for each in ctx.work.inputs if each.requires_grad]
        double = torch.is_grad_enabled()
        with torch.enable_grad():
            local = _computed(ctx.work)
        own = in_layout(grad, ctx.spec)
        grads = iter(torch.autograd.grad(local, inputs, own, create_graph=double))
        return None, None, *(next(grads) if each.requires_grad else None for each in ctx.work.inputs)


_defer: Callable[..., Deferred] = super(torch.autograd.Function, _Defer).apply


def _computed(work: Work) -> torch.Tensor:
    """This rank's outputs of the last stage."""
    names = ", ".join(stage.name for stage in work.stages)
    if tuple(each._version for each in work.inputs) != work.versions:
        raise RuntimeError(
            f"one_exchange: {names}: an input or a weight was modified in place before the result was computed: modify "
            "it after the block"
        )
    dim, bounds, axis = work.sharded
    maps = [stage.windows.maps[dim] for stage in work.stages]
    ops = [stage.op for stage in work.stages]
    fills = [stage.windows.fill for stage in work.stages]

    def run(x: torch.Tensor) -> torch.Tensor:
        if len(ops) == 1 and fills[0] == 0:
            return over_halo(ops[0], x, work.sharded, maps[0], {dim: maps[0].extent})[0]
        if len(ops) > 1 and watched():
            _told(work, names)
        return chained(ops, x, work.sharded, maps, fills, ())[0]

    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(work.grad_enabled),
        torch.autocast(work.source.device.type, enabled=False),
    ):
        return on_own_shard(run, {axis: S(dim)})(work.source)


def _told(work: Work, names: str) -> None:
    """Tells reports what one exchange saves, and what it costs."""
    dim, bounds, axis = work.sharded
    rank = int(comm.communicator(axis).rank)
    chain = plan_chain(tuple(stage.windows.maps[dim] for stage in work.stages), bounds)
    once = planned_bytes(work.source, chain.plan, rank, dim)
    apart = exchanges = 0
    for stage in work.stages:
        plan = plan_windows(stage.windows.maps[dim], bounds)
        like = torch.empty(stage.spec.local_shape, dtype=work.source.dtype, device="meta")
        apart += planned_bytes(like, plan.plan, rank, dim)
        exchanges += not plan.plan.is_local
        bounds = plan.out_bounds
    note(
        "one_exchange",
        f"{names} after {int(not chain.plan.is_local)} exchange of {once:,} bytes, apart {exchanges} of {apart:,}: "
        f"saves {apart - once:,} bytes, computes {chain.redundant} positions of dim {dim} twice",
    )
