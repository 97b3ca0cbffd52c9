"""A call run in pieces, one rank after another in one process, and put together: values and gradients of the whole?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize import composites
from neuronx_dist.parallelize.choose.strategies import candidates
from neuronx_dist.program.program import Call, Strategy, Value, operands_of
from neuronx_dist.rules.containers import substituted
from neuronx_dist.spmd import P, R, SpmdTypeError, assert_type, get_local_type, no_typecheck, typecheck
from neuronx_dist.spmd.types import Shard, SpmdType
from tests.rules.verify_rule import results_of

__all__ = ["Case", "cut", "put_together", "summands", "wrong_pieces", "wrong_types"]

DIGITS = {torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5}  # of calls that round; else 1e-10


def cut(x: Tensor, shard: Shard, size: int, rank: int) -> Tensor:
    """The shard of a rank."""
    blocks = x.unflatten(shard.dim, (shard.stride, size, -1))
    return blocks.select(shard.dim + 1, rank).flatten(shard.dim, shard.dim + 1)


def joined(pieces: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole of the shards of all ranks."""
    blocks = [piece.unflatten(shard.dim, (shard.stride, -1)) for piece in pieces]
    return torch.cat(blocks, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def summands(x: Tensor, size: int) -> list[Tensor]:
    """Values of the ranks whose sum is `x`."""
    counts = not (x.is_floating_point() or x.is_complex())
    parts = [x // size if counts else torch.rand_like(x) for _ in range(size - 1)]
    return [*parts, x - sum(parts)]


def divided(x: Tensor, spmd_type: SpmdType, size: int) -> list[Tensor]:
    """Returns the parts of `x` by rank."""
    if isinstance(spmd_type, Shard):
        return [cut(x, spmd_type, size, rank) for rank in range(size)]
    if spmd_type.letter == "P":
        return [part * size if spmd_type == P("avg") else part for part in summands(x, size)]
    return [x] * size


def put_together(pieces: Sequence[Tensor], spmd_type: SpmdType) -> Tensor:
    """The whole that the ranks have; of values that ought to be equal, NaN if they are not."""
    if isinstance(spmd_type, Shard):
        return joined(pieces, spmd_type)
    if spmd_type.letter == "P":
        return sum(pieces) / (len(pieces) if spmd_type == P("avg") else 1)
    equal = all(x.shape == pieces[0].shape and torch.allclose(x, pieces[0], equal_nan=True) for x in pieces)
    return pieces[0] if equal else torch.full_like(pieces[0], torch.nan, dtype=torch.float64)


class Case:
    """A call on real tensors, and the same call on `Value`s."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: dict[Value, Tensor] = {}

        def value(x: Tensor) -> Value:
            graded = x.is_floating_point() or x.is_complex()
            new = Value(f"x{len(self.tensors)}", "input", tuple(x.shape), x.dtype, graded)
            self.tensors[new] = x.detach()
            return new

        args, kwargs = substituted((args, kwargs), Tensor, value)
        self.call = Call(function, args, kwargs)
        for graded in (len(self.tensors), 1, 0):  # functions that are not differentiable in all operands
            for number, tensor in enumerate(self.tensors):
                tensor.requires_grad = tensor.requires_grad and number < graded
            try:
                self.run_whole()
                break
            except (RuntimeError, NotImplementedError):
                continue
        dtypes = {x.dtype for x in (*self.tensors.values(), *self.whole)}
        self.tolerance = max(DIGITS.get(dtype, 1e-10) for dtype in dtypes)

    def run_whole(self) -> None:
        whole = self.call.function, self.call.args, self.call.kwargs
        leaves = self.leaves(self.tensors)
        results = self.run(*whole, leaves)
        self.call.results = [Value("y", "result", tuple(x.shape), x.dtype, x.requires_grad) for x in results]
        self.cotangents = [torch.rand_like(x) if x.requires_grad else None for x in results]
        self.whole = [x.detach() for x in results]
        self.gradients = self.backward(leaves, results, self.cotangents)

    @staticmethod
    def leaves(tensors: dict[Value, Tensor]) -> dict[Value, Tensor]:
        return {value: x.detach().clone().requires_grad_(value.requires_grad) for value, x in tensors.items()}

    @staticmethod
    def run(function: Any, args: Any, kwargs: Any, leaves: dict[Value, Tensor]) -> list[Tensor]:
        args, kwargs = substituted((args, kwargs), Value, leaves.__getitem__)
        return results_of(function(*args, **kwargs))

    @staticmethod
    def backward(leaves: dict[Value, Tensor], results: list[Tensor], cotangents: Sequence[Any]) -> dict[Value, Tensor]:
        pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if x.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))
        return {value: x.grad if x.grad is not None else torch.zeros_like(x) for value, x in leaves.items()}

    def recorded(self, strategy: Strategy, size: int) -> tuple[list[Any], list[Any]]:
        """The collectives of rank 0, forward and backward."""
        types = dict(zip(operands_of(self.call), strategy.operands, strict=True))
        operands = {value: divided(x, types[value], size) for value, x in self.tensors.items()}

        def run() -> tuple[list[Any], list[Any]]:
            leaves = self.leaves({value: parts[comm.rank("tp")] for value, parts in operands.items()})
            with comm.record() as forward:
                results = self.run(*strategy.local, leaves)
            with comm.record() as backward:
                self.backward(leaves, results, [torch.ones_like(x) for x in results])
            return list(forward), list(backward)

        return threads.run(Mesh(size, tp=size), run)[0]

    def wrong(self, strategy: Strategy, size: int) -> Iterator[str]:
        """Yields the differences when each rank runs the strategy's local call."""
        types = dict(zip(operands_of(self.call), strategy.operands, strict=True))
        operands = {value: divided(x, types[value], size) for value, x in self.tensors.items()}
        # what R ranks receive as a gradient are summands of it, and of P the whole
        handed = [
            [None] * size
            if g is None
            else [g / size] * size
            if spmd_type == P("avg")
            else [g] * size
            if spmd_type.letter == "P"
            else summands(g, size)
            if spmd_type.letter == "R"
            else divided(g, spmd_type, size)
            for g, spmd_type in zip(self.cotangents, strategy.results, strict=True)
        ]

        def on_rank(rank: int) -> Any:
            leaves = self.leaves({value: parts[rank] for value, parts in operands.items()})
            values = self.run(*strategy.local, leaves)
            return values, self.backward(leaves, values, [gradient[rank] for gradient in handed])

        if strategy.local.function in vars(composites).values():  # the ranks communicate
            done = threads.run(Mesh(size, tp=size), lambda: on_rank(comm.rank("tp")))
        else:
            done = [on_rank(rank) for rank in range(size)]
        results, gradients = zip(*done)
        for number, (whole, spmd_type) in enumerate(zip(self.whole, strategy.results, strict=True)):
            yield from self.differences(
                f"result {number}", whole, [result[number].detach() for result in results], spmd_type
            )
        for value, spmd_type in types.items():
            if value.requires_grad:
                of_gradient = {"R": P, "P": R}.get(spmd_type.letter, spmd_type)
                pieces = [gradient[value] for gradient in gradients]
                yield from self.differences(f"gradient of {value}", self.gradients[value], pieces, of_gradient)

    def differences(self, what: str, whole: Tensor, pieces: list[Tensor], spmd_type: SpmdType) -> Iterator[str]:
        try:
            together = put_together(pieces, spmd_type)
        except RuntimeError as error:
            yield f"{what}: {error}"
            return
        if together.shape != whole.shape:
            yield f"{what} is of shape {list(together.shape)} in place of {list(whole.shape)}"
        elif not torch.allclose(
            together.to(whole.dtype), whole, rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        ):
            yield f"{what} differs by {float((together - whole).abs().max())}"


def wrong_pieces(case: Case, size: int, strides: Sequence[int] = ()) -> tuple[list[str], list[str]]:
    """`(names of the strategies, what is wrong)`."""
    found = candidates(case.call, "tp", size, strides=strides)
    wrong: list[str] = []
    for strategy in found:
        try:
            wrong += [f"{strategy.name} on {size}: {what}" for what in case.wrong(strategy, size)]
        except Exception as error:
            wrong.append(f"{strategy.name} on {size}: {type(error).__name__} {error}")
    return [strategy.name for strategy in found], wrong


def wrong_types(case: Case, size: int, strides: Sequence[int] = ()) -> list[str]:
    """Strategies whose local call the type checker refuses, or finds other types in than were derived."""
    wrong = []
    for strategy in candidates(case.call, "tp", size, strides=strides):
        try:
            with comm.as_rank(Mesh(size, tp=size), 0, CheckBackend()), typecheck():
                leaves = {}
                for value, spmd_type in zip(operands_of(case.call), strategy.operands, strict=True):
                    with no_typecheck():
                        x = case.tensors[value]
                        x = cut(x, spmd_type, size, 0) if isinstance(spmd_type, Shard) else x
                        x = x.detach().clone().requires_grad_(value.requires_grad)
                    leaves[value] = assert_type(x, {"tp": spmd_type})
                results = [get_local_type(x).get("tp") for x in case.run(*strategy.local, leaves)]
        except SpmdTypeError as error:
            wrong.append(f"{strategy.name}: {error}")
            continue
        if [*map(plain, results)] != [*strategy.results]:
            wrong.append(f"{strategy.name}: {results}")
    return wrong


def plain(spmd_type: Any) -> Any:
    """A type without what the checker alone keeps of it: how shards were merged, along what values are repeated."""
    if isinstance(spmd_type, Shard):
        return Shard(spmd_type.dim, spmd_type.stride)
    return R if spmd_type is None or spmd_type.letter in "R0" else spmd_type
