"""Named random streams: numbers that agree across ranks, and numbers that differ.

The *default* stream is torch's generator: seeded equally on all ranks, it gives replicated activations the same
dropout mask on every tensor-parallel rank. The *tensor-parallel* stream differs by tp rank, for activations that are
sharded. Seeds are NxD's (and Megatron's): default `seed`, tensor-parallel `seed + 2718 + tp_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..comm import context
from ..comm.generators import State, as_they_were, autocast, device_has_own_program, get_state, set_state
from ..comm.generators import seed as set_seed
from ..comm.ranks.rank_numbers import concrete

__all__ = ["RNGStreams", "TENSOR_PARALLEL", "checkpoint", "manual_seed", "streams"]

#: The name of the random stream that differs between the ranks of tp.
TENSOR_PARALLEL = "model-parallel-rng"


class RNGStreams:
    """Random streams by name; `fork(name)` draws from one of them inside a `with`. NxD's `XLARNGStatesTracker`."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self.drawing = ""  # the stream of the innermost `fork`
        self._entered: Any = None  # the `fork` of `enter`

    def reset(self) -> None:
        self._states.clear()

    def get_states(self) -> dict[str, State]:
        return dict(self._states)

    def set_states(self, states: dict[str, State]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a stream.

        Raises:
            ValueError: a stream of that name exists.
        """
        if name in self._states:
            raise ValueError(f"random stream {name!r} already exists; reset() removes all streams")
        before = get_state()
        set_seed(seed)
        self._states[name] = get_state()
        set_state(before)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Draws random numbers inside the `with` from stream `name`, which remembers its position.

        The stream outside keeps its position.
        """
        if name not in self._states:
            raise ValueError(
                f"random stream {name!r} does not exist: call model_parallel_manual_seed(seed) first; existing "
                f"streams: {sorted(self._states)}"
            )
        before, outside = get_state(), self.drawing
        set_state(self._states[name])
        self.drawing = name
        try:
            yield
        finally:
            self._states[name] = get_state()
            set_state(before)
            self.drawing = outside

    def enter(self) -> None:
        """Draws from the tensor-parallel stream until `leave`; a second call before it changes nothing."""
        if self._entered is None:
            self._entered = self.fork()
            self._entered.__enter__()

    def leave(self) -> None:
        """Ends `enter`, if that was called."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


def streams() -> RNGStreams:
    """Returns the streams of the current rank."""
    return context.current().extras.setdefault("random", RNGStreams())


def manual_seed(seed: int) -> None:
    """Seeds the default stream with `seed`, the tensor-parallel one with `seed + 2718 + tp_rank`; drops all others."""
    rank = context.current()
    all_streams = streams()
    all_streams.reset()
    all_streams.add(TENSOR_PARALLEL, seed + 2718 + concrete(rank.mesh.coordinate("tp", rank.rank)))
    set_seed(seed)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function with activation checkpointing whose recomputation redraws the same numbers from every stream."""
    # Compiled code saves its random numbers. Without a mesh there is one stream.
    if is_compiling() or not context.is_initialized():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    all_streams = streams()
    has_own_program, rank = device_has_own_program(), context.current()

    def contexts() -> tuple[Any, Any]:
        before: dict[str, State] = {}
        default: State = []

        @contextmanager
        def forward() -> Iterator[None]:
            before.update(all_streams.get_states())
            if has_own_program:
                default.extend(get_state())
            yield

        @contextmanager
        def recompute() -> Iterator[None]:
            now = all_streams.get_states()
            all_streams.set_states(before)
            try:
                # On XLA backward runs in another thread, and torch does not know the device's generator and autocast.
                with context.use(rank), as_they_were(default, cast) if has_own_program else nullcontext():
                    yield
            finally:
                all_streams.set_states(now)

        return forward(), recompute()

    if not has_own_program:
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    cast = autocast()
    # Without tensors among the arguments torch does not look for `torch.xla`, which does not exist.
    return torch_checkpoint(lambda: function(*args, **kwargs), use_reentrant=False, context_fn=contexts)
