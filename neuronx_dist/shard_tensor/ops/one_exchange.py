"""`one_exchange(x, layers)`: consecutive windows after one exchange of halos, in place of one exchange each.

The layers are called with a `Chain` in the place of a tensor: it records the windows that they compute, and has no
values. From these windows follow the inputs that each rank's last outputs need (`windows/chains.py`). One exchange
brings them, and each rank computes the outputs near its bounds that its neighbours compute too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.rank_selection import in_one_program
from ...spmd import S
from ..handlers import FUNCTIONS, Handler
from ..moves.exchange import planned_bytes
from ..moves.intervals import bounds_of
from ..report import note, watched
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, local_of, wrap
from ..typed import on_own_shard
from ..windows.chains import plan_chain
from ..windows.index_maps import plan_windows
from ..windows.local_windows import ShardedDim, Windows, chained, over_halo
from .pointwise import pointwise

__all__ = ["Chain", "InTurn", "one_exchange", "refusal", "takes_chains"]

_TAKE_CHAINS: set[Handler] = set()


def takes_chains(handler: Handler) -> Handler:
    """Marks a handler that computes windows: it gets a `Chain` in the place of a tensor, and returns one."""
    _TAKE_CHAINS.add(handler)
    return handler


class WindowStage(NamedTuple):
    """One window of a chain.

    Attributes:
        name: name of its function.
        spec: layout of its input.
        windows: the `op` includes the functions of each element that follow.
    """

    name: str
    spec: ShardTensorSpec
    windows: Windows


class InTurn(Exception):
    """Raised for a layout whose windows are not composed: the layers run one after the other. The text says why."""


def one_exchange(x: torch.Tensor, layers: Iterable[Callable[[Any], Any]]) -> Any:
    """Returns `layers[-1](.. layers[0](x))`, for which halos are exchanged once, not once for each window. Exact.

    A layer is an `nn.Module`, a function or a lambda. It may compute convolutions, max pooling, average pooling with
    one divisor for all windows, padding, and functions of each element with numbers. Outputs near the bounds of shards
    are computed on several ranks; `report()` says how many. Where windows cannot be composed, the layers run in turn,
    and `report()` says why: several spatial dims, channels or weights that are sharded, Partial tensors, XLA. So they
    do on a plain tensor.

    Args:
        x: `[batch, channels, ..]` or `[channels, ..]`, sharded along one spatial dim.
        layers: each takes the result of the one before. `nn.Sequential` is such a list.

    Raises:
        NotImplementedError: a layer calls a function that has no window rule, uses another tensor, or computes under
            another grad mode or autocast than the call.

    Example:
        >>> y = one_exchange(x, [conv1, F.relu, conv2])
    """
    layers = list(layers)
    if isinstance(x, ShardTensor):
        try:
            return _computed(_recorded(x, layers))
        except InTurn as reason:
            note("one_exchange", f"the layers run in turn: {reason}")
    for layer in layers:
        x = layer(x)
    return x


def _recorded(x: ShardTensor, layers: Iterable[Callable[[Any], Any]]) -> Chain:
    chain: Any = Chain(x, x._spec, _modes(x.device))
    for i, layer in enumerate(layers):
        chain = layer(chain)
        if not isinstance(chain, Chain):
            raise NotImplementedError(
                f"one_exchange: layers[{i}] returns a {type(chain).__name__}: a layer must take and return one tensor"
            )
    result: Chain = chain
    return result


def _modes(device: torch.device) -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


@dataclass(frozen=True, eq=False)
class Chain:
    """Stands for the result of windows of `x` while layers are recorded.

    Attributes:
        x: input of the first window.
        spec: layout of the result.
        modes: grad mode and autocast of the call.
        sharded: the dim that is exchanged; None before the first window.
    """

    x: ShardTensor
    spec: ShardTensorSpec
    modes: tuple[Any, ...]
    stages: tuple[WindowStage, ...] = ()
    sharded: ShardedDim | None = None

    holds_local = True  # the type checker leaves calls to `__torch_function__`

    @property
    def shape(self) -> torch.Size:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def dim(self) -> int:
        return len(self.spec.shape)

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(torch.Tensor, name)):
            raise AttributeError(str(refusal(name)))
        return partial(_called, name, self)

    @staticmethod
    def as_laid_out(result: Any) -> Any:
        """Returns the result of a handler, in which there is nothing to judge."""
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chain, *others = args or (None,)
        name = getattr(func, "__name__", str(func))
        if not isinstance(chain, Chain) or any(isinstance(x, Chain) for x in (*others, *kwargs.values())):
            raise refusal(name)
        if _modes(chain.device) != chain.modes:
            raise NotImplementedError(
                f"one_exchange: {name} is called under a grad mode or autocast that differs from that of "
                "one_exchange, for example in an autograd function: call one_exchange in the same mode, or end the "
                f"list before {name}"
            )
        handler = FUNCTIONS.get(func)
        if handler in _TAKE_CHAINS:
            return handler(func, types, args, kwargs)
        if handler is not pointwise or any(isinstance(x, torch.Tensor) for x in (*others, *kwargs.values())):
            raise refusal(name)
        if not chain.stages:
            if kwargs.get("inplace"):
                raise NotImplementedError(
                    f"one_exchange: {name}(inplace=True) would write to x: call it before one_exchange, or remove "
                    "inplace"
                )
            x = func(chain.x, *others, **kwargs)
            return replace(chain, x=x, spec=x._spec)
        last = chain.stages[-1]
        before, options = last.windows.op, {**kwargs, "inplace": False} if "inplace" in kwargs else kwargs
        windows = last.windows._replace(op=lambda local: func(before(local), *others, **options))
        return replace(chain, stages=(*chain.stages[:-1], last._replace(windows=windows)))

    def window_dim(self, count: int, weights: tuple[Any, ...] = ()) -> int:
        """Returns the dim whose windows are composed, the sharded one of the last `count` dims.

        Raises:
            InTurn: the layout, or that of the weights, is not composed.
        """
        spec, first = self.spec, self.dim() - count
        dims = [dim for _, dim in spec.sharded if dim >= first - 1]
        reason = ""
        if in_one_program(self.x):
            reason = "XLA runs one program on all ranks"
        elif spec.partial or spec.mesh.communicators is None or 0 in spec.shape or not self.dtype.is_floating_point:
            reason = f"x is a {self.dtype} tensor of shape {tuple(spec.shape)}, {list(spec.placements)}"
        elif len(dims) != 1 or dims[0] < first:
            reason = f"x is {list(spec.placements)}, and must be sharded on exactly one spatial dim"
        elif any(isinstance(x, ShardTensor) and x._spec is not x._spec.replicated() for x in weights):
            reason = "a weight is sharded"
        if reason:
            raise InTurn(reason)
        return dims[0]

    def outline(self) -> ShardTensor:
        """Returns a tensor of the chain's layout without values, from which layouts of results are planned."""
        return wrap(torch.empty(0, dtype=self.dtype, device=self.device), self.spec)

    def then(self, name: str, windows: Windows, spec: ShardTensorSpec) -> Chain:
        """Returns the chain with one more window.

        Args:
            spec: layout of the result, but for the spatial dims.

        Raises:
            ValueError: as `plan_windows`.
        """
        before = self.spec
        ((m, dim),) = [(m, dim) for m, dim in before.sharded if dim in windows.maps]
        bounds = bounds_of(before.sizes[m] or ())
        sharded = self.sharded or ShardedDim(dim, bounds, before.mesh.communicator(m))
        shape, sizes = list(spec.shape), list(before.sizes)
        for d, map_ in windows.maps.items():
            shape[d] = map_.outputs
        sizes[m] = tuple(high - low for low, high in pairwise(plan_windows(windows.maps[dim], bounds).out_bounds))
        result = make_spec(before.mesh, before.placements, shape, tuple(sizes))
        return replace(self, spec=result, stages=(*self.stages, WindowStage(name, before, windows)), sharded=sharded)


def _called(name: str, *args: Any, **kwargs: Any) -> Any:
    return Chain.__torch_function__(getattr(torch.Tensor, name), (), args, kwargs)


# Python looks these up on the class.
for _name in (
    "__abs__ __add__ __bool__ __eq__ __ge__ __getitem__ __gt__ __le__ __len__ __lt__ __matmul__ __mul__ __ne__ __neg__ \
__pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __setitem__ __sub__ __truediv__".split()
):
    setattr(Chain, _name, lambda *args, _name=_name: _called(_name, *args))


def refusal(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"one_exchange: {name} has no window rule; convolutions, max_pool, avg_pool with one divisor, pad and "
        f"elementwise functions with numbers have one: end the list before {name}, and call it on the result"
    )


def _computed(chain: Chain) -> ShardTensor:
    """Returns the result of the last window."""
    if chain.sharded is None:
        return chain.x
    dim, _, axis = sharded = chain.sharded
    windows = [stage.windows for stage in chain.stages]
    maps, ops, fills = [w.maps[dim] for w in windows], [w.op for w in windows], [w.fill for w in windows]

    def run(x: torch.Tensor) -> torch.Tensor:
        if len(ops) > 1 and watched():
            _report(chain, x, sharded)
        if len(ops) == 1 and fills[0] == 0:
            result, _ = over_halo(ops[0], x, sharded, maps[0], {dim: maps[0].extent})
        else:
            result, _ = chained(ops, x, sharded, maps, fills, ())
        return result.clone() if result is x else result

    return wrap(on_own_shard(run, {axis: S(dim)})(local_of(chain.x)), chain.spec)


def _report(chain: Chain, x: torch.Tensor, sharded: ShardedDim) -> None:
    """Reports the bytes that one exchange saves, and the positions that are computed twice."""
    dim, bounds, axis = sharded
    rank = int(comm.communicator(axis).rank)
    plan = plan_chain(tuple(stage.windows.maps[dim] for stage in chain.stages), bounds)
    once = planned_bytes(x, plan.exchange, rank, dim)
    apart = exchanges = 0
    for stage in chain.stages:
        alone = plan_windows(stage.windows.maps[dim], bounds)
        like = torch.empty(stage.spec.local_shape, dtype=x.dtype, device="meta")
        apart += planned_bytes(like, alone.plan, rank, dim)
        exchanges += not alone.plan.is_local
        bounds = alone.out_bounds
    names = ", ".join(stage.name for stage in chain.stages)
    note(
        "one_exchange",
        f"{names} after {int(not plan.exchange.is_local)} exchange of {once:,} bytes, separately {exchanges} of "
        f"{apart:,}: saves {apart - once:,} bytes, computes {plan.redundant} positions of dim {dim} twice",
    )
