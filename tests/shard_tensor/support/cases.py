"""One function on ShardTensors of every layout against the same function in one process: values, and every gradient.

A line of `table.py` is a `Case`. `run_case` distributes its operands in all combinations of placements and splits, on
ranks that are threads: a combination takes milliseconds.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, distribute_tensor, fallback
from tests.support.covering import chosen

TOLERANCE = 1e-10
MESHES = [(2,), (3,), (4,), (2, 2)]
SPLITS = ("chunk", "uneven", "one")  # 16: 8/8; 11/5, 2/9/5, 1/12/0/3; 0/16
_UNEVEN = {1: (16,), 2: (11, 5), 3: (2, 9, 5), 4: (1, 12, 0, 3), 6: (3, 0, 5, 1, 7, 0), 8: (2, 1, 0, 5, 3, 0, 4, 1)}
# Combinations of placements for a mesh; of more, as many are drawn.
FULL = bool(os.environ.get("NXD_FULL"))
MOST = 60 if FULL else 6


@dataclass(frozen=True)
class Case:
    """A function, and the shapes of its operands. Dims of 16 split as the names of `SPLITS` say.

    Attributes:
        name: of the test.
        function: of as many tensors as there are shapes; it returns a tensor, or several.
        shapes: of float64 operands with gradients.
        positive: operands are above 0.1.
        plain: indices of operands that stay plain tensors.
        whole: dims of operands that are not sharded, as (operand, dim).
        refusals: words of a ValueError that some layouts may raise, on all ranks.
        gradients: whether there are any.
        gathers: whether functions without a handler may be reached, which gather.
    """

    name: str
    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    positive: bool = False
    plain: tuple[int, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    refusals: str = ""
    gradients: bool = True
    gathers: bool = False

    def __str__(self) -> str:
        return self.name


class Layout(NamedTuple):
    """One combination: for each operand a placement on each mesh dim (None: Replicate), and the split."""

    placements: tuple[tuple[int | None, ...], ...]
    split: str


def sizes(n: int, count: int, split: str) -> tuple[int, ...] | None:
    """The sizes of the shards of a dim of `n`; None: chunks."""
    if split == "chunk":
        return None
    if split == "one":
        return tuple(n if index == min(1, count - 1) else 0 for index in range(count))
    bounds = list(itertools.accumulate(_UNEVEN[count], initial=0))
    cuts = [n * bound // 16 for bound in bounds]
    return tuple(high - low for low, high in zip(cuts, cuts[1:]))


def layouts(case: Case, mesh: tuple[int, ...], most: int = MOST, doubled: bool = False) -> list[Layout]:
    """All combinations in which an operand is sharded; of more than `most`, a sample with every dim of each operand.

    Each is split in all ways with NXD_FULL=1, and else in one of the three, by turns, or in two if they are fewer.
    `doubled`: those, instead, in which an operand has a dim on several mesh dims.
    """
    choices = []
    for index, shape in enumerate(case.shapes):
        dims = [None, *(d for d in range(len(shape)) if (index, d) not in case.whole)]
        if index in case.plain:
            dims = [None]
        per_mesh_dim = itertools.product(dims, repeat=len(mesh))
        choices.append([each for each in per_mesh_dim if doubled or not _is_doubled(each)])
    combinations = [each for each in itertools.product(*choices) if any(d is not None for dims in each for d in dims)]
    if doubled:
        combinations = [each for each in combinations if any(map(_is_doubled, each))]
    if len(combinations) > most:
        few = chosen([tuple(-1 if d is None else d for dims in each for d in dims) for each in combinations], 1)
        others = [number for number in range(len(combinations)) if number not in few]
        few |= {*random.Random(0).sample(others, max(0, most - len(few)))}
        combinations = [combinations[number] for number in sorted(few)]
    splits = 1 if doubled or len(combinations) >= len(SPLITS) else 2
    return [
        Layout(each, split)
        for turn, each in enumerate(combinations, len(case.name))
        for number, split in enumerate(SPLITS)
        if FULL or (number - turn) % len(SPLITS) < splits
    ]


def _is_doubled(dims: Sequence[int | None]) -> bool:
    sharded = [d for d in dims if d is not None]
    return len({*sharded}) < len(sharded)


def distributed(x: torch.Tensor, mesh: DeviceMesh, dims: Sequence[int | None], split: str) -> ShardTensor:
    """A whole tensor, equal on all ranks, as a leaf."""
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    counts = [torch.Size(mesh.shape[m] for m, other in enumerate(dims) if other == d).numel() for d in dims]
    along = [None if d is None else sizes(x.shape[d], count, split) for d, count in zip(dims, counts)]
    return distribute_tensor(
        x.detach().clone().requires_grad_(x.requires_grad), mesh, placements, sizes=along, src=None
    )


def operands(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    result = []
    for shape in case.shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.abs() + 0.1 if case.positive else x
        result.append(x.requires_grad_(case.gradients))
    return result


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [x for x in result if isinstance(x, torch.Tensor)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} for {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{what}: {actual} for {expected}"
        return
    both_nan = actual.isnan() & expected.isnan()
    same = both_nan | (actual == expected)
    difference = torch.where(same, torch.zeros_like(actual), actual - expected)
    scale = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).norm().item()
    assert difference.norm().item() <= tolerance * max(scale, 1.0), (
        f"{what}: off by {difference.norm().item()} of {scale}"
    )


def run_case(case: Case, mesh_shape: tuple[int, ...], most: int = MOST, doubled: bool = False) -> int:
    """Checks a case at all layouts on one mesh, and returns in how many it was not refused."""
    rank = _checks(case, mesh_shape, most, doubled)
    outcomes = threads.run(Mesh(torch.Size(mesh_shape).numel()), rank)
    assert all(each == outcomes[0] for each in outcomes), "some ranks refuse, and others do not"
    return outcomes[0].count("")


def check_on_this_rank(case: Case, mesh_shape: tuple[int, ...], most: int = MOST) -> int:
    """The same on one rank, in a process of its own."""
    return _checks(case, mesh_shape, most)().count("")


def _checks(case: Case, mesh_shape: tuple[int, ...], most: int, doubled: bool = False) -> Callable[[], list[str]]:
    """Checks all layouts on one rank, and returns the error of each."""
    plain = operands(case)
    expected = tensors(case.function(*plain))
    weights = [torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for y in expected]
    graded = [(y, w) for y, w in zip(expected, weights) if y.requires_grad]
    if case.gradients:
        torch.autograd.backward([y for y, _ in graded], [w for _, w in graded])
    todo = layouts(case, mesh_shape, most, doubled)
    world = torch.Size(mesh_shape).numel()

    def rank() -> list[str]:
        mesh = DeviceMesh("cpu", torch.arange(world).view(mesh_shape))
        return [_one(case, layout, mesh, plain, [y.detach() for y in expected], weights) for layout in todo]

    return rank


def _one(
    case: Case,
    layout: Layout,
    mesh: DeviceMesh,
    plain: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> str:
    """Checks one layout; returns what it was refused with."""
    what = f"{case.name} {layout} on {mesh.shape}"
    given: list[torch.Tensor] = []
    for i, (x, dims) in enumerate(zip(plain, layout.placements)):
        if i in case.plain:
            given.append(x.detach().clone().requires_grad_(x.requires_grad))
        else:
            given.append(distributed(x, mesh, dims, layout.split))
    try:
        with fallback("gather" if case.gathers else "error"):
            results = tensors(case.function(*given))
    except ValueError as error:
        if case.refusals and case.refusals in str(error):
            return str(error)
        raise
    except Exception as error:
        error.add_note(what)
        raise
    try:
        assert len(results) == len(expected), f"{what}: {len(results)} results"
        for i, (actual, whole) in enumerate(zip(results, expected)):
            assert isinstance(actual, ShardTensor), f"{what}: result {i} is a {type(actual).__name__}"
            if not actual._spec.partial:
                assert actual.to_local().shape == actual._spec.local_shape, f"{what}: local shape of result {i}"
            assert_close(actual.full_tensor().detach(), whole, f"{what}: result {i}")
        if case.gradients:
            graded = [(y, w) for y, w in zip(results, weights) if y.requires_grad]
            torch.autograd.backward([y for y, _ in graded], [w for _, w in graded])
            for i, (x, own) in enumerate(zip(plain, given)):
                if x.grad is None:
                    continue
                assert own.grad is not None, f"{what}: operand {i} has no gradient"
                if isinstance(own, ShardTensor):
                    assert own.grad._spec is own._spec, f"{what}: the gradient of operand {i} lies elsewhere"
                    assert own.grad.to_local().shape == own.to_local().shape, f"{what}: local gradient of operand {i}"
                grad = own.grad.full_tensor() if isinstance(own, ShardTensor) else own.grad
                assert_close(grad.detach(), x.grad, f"{what}: gradient of operand {i}")
    except Exception as error:
        error.add_note(what)
        raise
    return ""


def on_ranks(count: int, function: Callable[[DeviceMesh], Any], shape: tuple[int, ...] | None = None) -> list[Any]:
    """`function(mesh)` on every rank of a world of threads; the results by rank."""

    def rank() -> Any:
        return function(DeviceMesh("cpu", torch.arange(count).view(shape or (count,))))

    return threads.run(Mesh(count), rank)


def verbs(calls: Sequence[comm.Call]) -> list[str]:
    return [call.verb for call in calls]


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)

    return call
