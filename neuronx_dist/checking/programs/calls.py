"""The calls of a program, as far as they can differ by rank: functions, Python numbers, shapes, lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...call_site import DRIVER, LIBRARY, USER, call_site, frames
from ...comm.ranks.rank_values import RankValue, rank_values_in
from ...rules import RULES
from ...rules.names import CATS
from ...spmd.random import TENSOR_PARALLEL, streams
from ...spmd.tensor_type import TensorType, type_of
from ...torch_internals.autograd import in_backward
from ..types.handlers.own_rows import among_gathered
from ..types.handlers.random_numbers import draws
from ..types.handlers.seeds import Stream, generator_in, seed_of, stream
from ..types.mode import SpmdTypeMode

__all__ = ["Deadline", "Op", "OutOfTime", "OpRecorder"]

# Questions, not operators; nothing depends on how often they are asked.
_GETTERS = {
    getattr(torch.Tensor, name)
    for name in (
        "size dim stride numel nelement element_size is_contiguous is_floating_point is_complex is_inference "
        "data_ptr untyped_storage storage_offset get_device ndimension requires_grad_ register_hook retain_grad "
        "register_post_accumulate_grad_hook backward __hash__ __len__ __repr__ __format__"
    ).split()
} | {torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel, torch.autograd.backward}


# send, recv: they are events, and middle stages differ only in the peer.
_QUIET = {
    "__get__",
    "__set__",
    "_set_grad_enabled",
    "promote_types",
    "get_default_dtype",
    "result_type",
    "send",
    "recv",
}
# Functions in which a number is a value: the result's shape does not depend on it.
_VALUES = {
    name.format(stem)
    for stem in (
        "add sub rsub mul div true_divide truediv floor_divide floordiv remainder mod fmod pow eq ne lt le gt ge "
        "bitwise_and and bitwise_or or bitwise_xor xor lshift rshift clamp maximum minimum masked_fill where fill "
        "tensor scalar_tensor as_tensor lerp addcmul addcdiv"
    ).split()
    for name in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
}


class OutOfTime(Exception):
    """The check has used up its time."""


class Deadline:
    """A moment at which to stop, `seconds` from now; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.started = time.perf_counter()
        self._end = None if seconds is None else self.started + seconds

    def check(self) -> None:
        if self._end is not None and time.perf_counter() > self._end:
            raise OutOfTime

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started


class Draw(NamedTuple):
    """A draw of random numbers.

    Attributes:
        where: `file:line` of the user's code.
        seed: of the generator; of a RankValue its axes and its values on all ranks.
        stream: the source of its numbers, which decides about their types.
    """

    where: str
    seed: Any
    stream: Stream


class Op(NamedTuple):
    """A call of a torch function.

    Attributes:
        name: of the function.
        scalars: Python numbers among its arguments, and the shapes of its tensors, in order; of a RankValue its
            values on all ranks.
        site: (file, line) of the nearest frame that is neither torch's nor ours.
        inside: whether that frame called it through this package.
        types: the type of the result (of the first of several), if types are checked.
        draw: if it draws random numbers: from where.
    """

    name: str
    scalars: tuple[Any, ...]
    site: tuple[str, int]
    inside: bool
    types: TensorType | None = None
    draw: Draw | None = None

    @property
    def line(self) -> str:
        return f"{self.site[0]}:{self.site[1]}"


class OpRecorder(TorchFunctionMode):
    """Records every operator that the program calls; calls of autograd in backward follow from these.

    Hooks on gradients belong to the program: their bodies run inside `with recorder.in_backward()`.

    Args:
        types: the type checker that is active outside of the recorder; its calls are not the program's.
    """

    def __init__(self, deadline: Deadline, types: SpmdTypeMode | None = None) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._deadline = deadline
        self._types = types
        self._in_hooks = 0

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Records the calls inside the context, though a backward pass makes them."""
        self._in_hooks += 1
        try:
            with self:
                yield
        finally:
            self._in_hooks -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        checkers_own = self._types is not None and (self._types.paused or self._types.probing or self._types.unrecorded)
        if func not in _GETTERS and not checkers_own and (self._in_hooks or not in_backward()):
            name = getattr(func, "__name__", str(func))
            scalars: list[Any] = []
            if _scalars(args, scalars) | (bool(kwargs) and _scalars(kwargs.values(), scalars)):
                _read_what_decides(name, args, kwargs)
            if name not in _QUIET:
                site, inside = user_site()
                result = func(*args, **kwargs)
                type_ = _type_of(result) if self._types is not None else None
                if name in CATS and self._types is not None and among_gathered(args[0]):
                    scalars = [tuple(result.shape)]  # ranks cut the gathered rows at the place of theirs
                draw = self._draw(func, args, kwargs) if self._types is not None else None
                self.ops.append(Op(name, tuple(scalars), site, inside, type_, draw))
                if len(self.ops) % 64 == 0:
                    self._deadline.check()
                return result
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
        rule = RULES.get(func)
        if rule is None or not rule.random or not draws(rule, args, kwargs):
            return None
        assert self._types is not None
        generator = generator_in(args, kwargs)
        if generator is None and streams().drawing.startswith(TENSOR_PARALLEL):
            return None
        seed = seed_of(generator)
        value = (seed.names, seed.table) if isinstance(seed, RankValue) else seed
        return Draw(call_site(), value, stream(self._types, generator))


def _scalars(args: Iterable[Any], scalars: list[Any]) -> bool:
    """Adds the numbers and shapes in `args` to `scalars`; returns whether a RankValue is among them."""
    holds_rank_value = False
    for x in args:
        class_ = type(x)
        if isinstance(x, torch.Tensor):
            scalars.append(tuple(x.shape))
        elif class_ is RankValue:
            scalars.append(x.table)
            holds_rank_value = True
        elif class_ in (int, float, bool, complex):
            scalars.append(x)
        elif class_ in (tuple, list) or isinstance(x, tuple):
            holds_rank_value |= _scalars(x, scalars)
        elif class_ is slice:
            holds_rank_value |= _scalars((x.start, x.stop, x.step), scalars)
    return holds_rank_value


def _read_what_decides(name: str, args: Any, kwargs: Any) -> None:
    """Reads the rank values among a call's arguments that decide about shapes or about what is called."""
    if name in _VALUES:
        return
    if name in ("narrow", "select") and not kwargs:
        read = args[3:]  # the length; not the start or index
    elif name in ("full", "new_full") and not kwargs:
        read = args[:-1]
    elif name in ("__getitem__", "__setitem__"):
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        read = [x for x in indices if not isinstance(x, int) and not _moves(x)]
    else:
        read = (args, kwargs)
    for rank_value in rank_values_in(read):
        rank_value.read()


def _moves(index: Any) -> bool:
    """Returns whether a slice has equal length on all ranks, so that only its start can differ by rank."""
    if not isinstance(index, slice) or isinstance(index.step, RankValue):
        return False
    if not isinstance(index.start, int) or not isinstance(index.stop, int):
        return not isinstance(index.start, RankValue) and not isinstance(index.stop, RankValue)
    return not isinstance(index.stop - index.start, RankValue)


def _type_of(result: Any) -> TensorType | None:
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    return type_of(result) if isinstance(result, torch.Tensor) else None


def user_site() -> tuple[tuple[str, int], bool]:
    """(file, line) of the nearest frame of the user's, and whether some of this package's frames are nearer.

    For calls that the check itself starts (the gradient reduction, a default optimizer) the nearest frame of all.
    """
    first: tuple[str, int] | None = None
    inside = False
    for owner, frame in frames(skip=2):  # this function, and the mode that calls it
        line = frame.f_code.co_filename, frame.f_lineno
        first = first or line
        if owner == USER:
            return line, inside
        inside = inside or owner != LIBRARY
        if owner == DRIVER:
            break
    return first or ("an unknown line", 0), True
