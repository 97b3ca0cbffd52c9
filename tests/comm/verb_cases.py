"""Results of every verb, in all forms, against a closed form: rank-valued tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from neuronx_dist import comm

__all__ = ["CASES", "SHAPES", "layouts", "on_every_rank", "strided"]


SIZE = -1  # stands for the number of ranks
SHAPES = {
    torch.float32: [(SIZE,), (2, 6, SIZE), (1, SIZE, 2), ()],
    torch.bfloat16: [(3, SIZE)],
    torch.float16: [(SIZE, 1)],
    torch.int64: [(SIZE, 2)],
    torch.float64: [(SIZE,)],
    torch.int32: [(SIZE,)],
}
CASES = sum(len(shapes) for shapes in SHAPES.values())


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + 8 * rank).reshape(shape).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    wide = x.new_zeros((*x.shape, 3))
    wide[..., 1] = x
    return wide[..., 1]


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone(), strided(x)] + ([x.t().clone(memory_format=torch.contiguous_format).t()] if x.dim() == 2 else [])


def equal(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert torch.equal(found, expected), (what, found, expected)


def in_all_forms(
    verb: Callable[..., object], x: torch.Tensor, expected: torch.Tensor, what: object, /, **options: object
) -> None:
    """Plain, with out= (contiguous and not), with out=x where shapes allow, asynchronous; else `x` never changes."""
    outs = itertools.cycle(layouts(torch.full_like(expected, 99)))
    for given in layouts(x):
        before = given.clone()
        found = verb(given, **options)
        equal(found, expected, (what, "plain", given.stride()))
        assert found is not given and (found.numel() == 0 or found.data_ptr() != given.data_ptr()), what
        out = next(outs).fill_(99)
        assert verb(given, out=out, **options) is out
        equal(out, expected, (what, "out", given.stride(), out.stride()))
        handle = verb(given, async_op=True, **options)
        result = handle.wait()
        equal(result, expected, (what, "async"))
        assert handle.wait() is result, (what, "a second wait gives the same tensor")
        out = next(outs).fill_(99)
        assert verb(given, out=out, async_op=True, **options).wait() is out
        equal(out, expected, (what, "async out"))
        equal(given, before, (what, "the input is left alone"))
        if given.shape == expected.shape:
            assert verb(given, out=given, **options) is given
            equal(given, expected, (what, "out is x", given.stride()))


def on_every_rank(verb: str, size: int) -> int:
    """Runs all cases on this rank, and returns how many it checked."""
    rank, done = comm.rank("world"), 0
    others = range(size)
    for dtype in SHAPES:
        for shape in SHAPES[dtype]:
            shape = tuple(size if length == SIZE else length for length in shape)
            dims = [*range(len(shape)), *range(-len(shape), 0)]
            even = [dim for dim in dims if shape[dim] % size == 0]
            all_values = [value(r, shape, dtype) for r in others]
            mine, total = all_values[rank], sum(all_values)
            total = total.to(dtype)
            what = (verb, dtype, shape)
            if verb == "all_reduce":
                in_all_forms(comm.all_reduce, mine, total, what, axis="world")
                in_all_forms(comm.all_reduce, mine, all_values[-1], (*what, "max"), axis="world", op="max")
                in_all_forms(comm.all_reduce, mine, all_values[0], (*what, "min"), axis="world", op="min")
            elif verb == "all_gather":
                for dim in dims:
                    in_all_forms(comm.all_gather, mine, torch.cat(all_values, dim), (*what, dim), axis="world", dim=dim)
            elif verb == "reduce_scatter":
                for dim in even:
                    for op, whole in (("sum", total), ("max", all_values[-1]), ("min", all_values[0])):
                        piece = whole.chunk(size, dim)[rank].contiguous()
                        in_all_forms(comm.reduce_scatter, mine, piece, (*what, dim, op), axis="world", dim=dim, op=op)
            elif verb == "all_to_all":
                for split, concat in itertools.product(even, dims):
                    expected = torch.cat([v.chunk(size, split)[rank] for v in all_values], concat)
                    options = dict(split_dim=split, concat_dim=concat)
                    in_all_forms(comm.all_to_all, mine, expected, (*what, options), axis="world", **options)
            elif verb == "permute":
                ring = [(src, (src + 1) % size) for src in others]
                for pairs in (ring, [(size - 1, 0)], [(1, 1)], []):
                    sources = [src for src, dst in pairs if dst == rank]
                    expected = all_values[sources[0]] if sources else torch.zeros_like(mine)
                    in_all_forms(comm.permute, mine, expected, (*what, pairs), axis="world", pairs=pairs)
            elif verb == "broadcast":
                for src in others:
                    in_all_forms(comm.broadcast, mine, all_values[src], (*what, src), axis="world", src=src)
            elif verb == "send":
                for given in layouts(mine):
                    # a ring, receives posted first; then in order, tags apart
                    out = torch.full_like(mine, 99)
                    receiving = comm.recv(out, "world", src=(rank - 1) % size, async_op=True)
                    assert comm.send(given, "world", dst=(rank + 1) % size) is given
                    assert receiving.wait() is out and receiving.wait() is out
                    equal(out, all_values[(rank - 1) % size], (*what, "ring"))
                    if rank == 0:
                        works = [comm.send(given + i, "world", dst=1, tag=i, async_op=True) for i in range(2)]
                        [work.wait() for work in works]
                    elif rank == 1:
                        for tag in range(2):
                            equal(comm.recv(out, "world", src=0, tag=tag), all_values[0] + tag, (*what, "tag", tag))
            done += 1
    comm.barrier()
    return done
