"""Attention over context-parallel ranks beside attention of one process: output and all gradients, in float64."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.attention import Keys, attention, zigzag_runs
from neuronx_dist.attention.context_parallel import split_of, traffic
from neuronx_dist.attention.positions import visible
from neuronx_dist.mesh import Mesh

BATCH, FEATURES = 2, 4


def mask_of(length: int, causal: bool, window: int | None, documents: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """Returns who sees whom, `[batch, 1, length, length]`, by definition."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = torch.ones(BATCH, length, length, dtype=torch.bool)
    if causal:
        seen &= i >= j
    if window is not None:
        seen &= i - j < window
    for row, bounds in enumerate(documents or ()):
        number = torch.searchsorted(torch.tensor(bounds), torch.arange(length), right=True)
        seen[row] &= number[:, None] == number[None]
    return seen[:, None]


def expected(operands: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Returns torch's attention of the complete sequence; a sink is one more key, with a value of 0."""
    q, k, v, *sinks = operands
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if not sinks:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    column = sinks[0][None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


def lengths_of(length: int, ranks: int, balance: str | None) -> tuple[int, ...]:
    """Returns the tokens of each rank, where the ranks do not divide the sequence."""
    if balance:
        runs = zigzag_runs(length, ranks)
        return tuple(sum(stop - start for start, stop in runs[2 * rank : 2 * rank + 2]) for rank in range(ranks))
    return (*(length // ranks,) * (ranks - 1), length - length // ranks * (ranks - 1))


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": dict(causal=False),
    "grouped heads": dict(kv_heads=2),
    "one kv head": dict(kv_heads=1),
    "zig-zag": dict(balance="zigzag", kv_heads=2),
    "uneven": dict(lengths=True),
    "uneven zig-zag": dict(lengths=True, balance="zigzag"),
    "window": dict(window=5),
    "window zig-zag": dict(window=5, balance="zigzag"),
    "sinks": dict(sinks=True, window=7, kv_heads=2),
    "documents": dict(cu_seqlens=[[0, 3, 4, 13, 16], [0, 9, 16]]),
    "documents for all rows": dict(cu_seqlens=[0, 6, 16], causal=False),
    "documents zig-zag": dict(cu_seqlens=[[0, 5, 16], [0, 16]], balance="zigzag", window=4),
    "other features of values": dict(values=3),
}


@pytest.mark.parametrize(
    "cp, function, degree",
    [(cp, function, None) for cp in (1, 2, 4) for function in ("ring_attention", "ulysses_attention")]
    + [(4, "ulysses_attention", 2)],
)
@pytest.mark.parametrize("name", CASES)
def test_attention_of_parts_is_attention_of_the_sequence(name: str, cp: int, function: str, degree: int | None) -> None:
    options = {**CASES[name], **({} if degree is None else {"degree": degree})}
    kv_heads, values = options.pop("kv_heads", 4), options.pop("values", FEATURES)
    has_sinks, balance = options.pop("sinks", False), options.get("balance")
    length = 16
    lengths: tuple[int, ...] | None = None
    if options.pop("lengths", False):
        length = 15
        options["lengths"] = lengths = lengths_of(length, cp, balance)
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, 4, length, FEATURES), (BATCH, kv_heads, length, FEATURES), (BATCH, kv_heads, length, values)]
    shapes += [(4,)] * has_sinks  # type: ignore[list-item]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    documents = options.get("cu_seqlens")
    rows = documents if documents is None or isinstance(documents[0], list) else [documents] * BATCH
    mask = mask_of(length, options.get("causal", True), options.get("window"), rows)
    out = expected(leaves, mask)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(upstream)
    wanted = [out.detach(), *(x.grad for x in leaves)]
    split = split_of(lengths or (length // cp,) * cp, balance)

    def rank() -> list[torch.Tensor]:
        places = torch.cat([torch.arange(*run) for run in split.positions[comm.rank("cp")]])
        local = [x.detach()[:, :, places] if x.dim() == 4 else x.detach().clone() for x in leaves]
        local = [x.requires_grad_() for x in local]
        given = dict(options, **({"sinks": local[3]} if has_sinks else {}))
        result = getattr(nxd, function)(*local[:3], **given)
        result.backward(upstream[:, :, places])
        found = [result.detach(), *(x.grad for x in local)]
        return [torch.zeros_like(w).index_copy_(2, places, x) if x.dim() == 4 else x for w, x in zip(wanted, found)]

    ranks = comm.threads.run(Mesh(cp, cp=cp), rank)
    for what, parts, whole in zip(("output", "dq", "dk", "dv", "dsinks"), zip(*ranks), wanted):
        assert error(sum(parts), whole) < 1e-10, what


def by_heads() -> None:
    test_attention_of_parts_is_attention_of_the_sequence("grouped heads", 4, "ulysses_attention", 2)


def hiding(number: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask `[1, 1, 8, 8]` whose rows are hidden everywhere, on one rank, on the other, or nowhere."""
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen[1] = seen[6] = seen[2, :4] = seen[3, 4:] = seen[4, 1] = False
    if number is None:
        return seen[None, None]
    mask = torch.zeros(8, 8, dtype=dtype).masked_fill(~seen, number)
    mask[5, :4], mask[6, :5] = -torch.inf, torch.finfo(dtype).min
    return mask[None, None]


@pytest.mark.each_value
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("hidden", ["boolean", "-inf", "finite", "finite, sinks"])
def test_rows_that_a_mask_hides_everywhere(
    hidden: str, dtype: torch.dtype, tolerance: float, ranks: int, merged: bool
) -> None:
    """The mean of all keys where finite numbers hide a row, else 0, as softmax; and all gradients.

    Beside torch's function without its fused kernel, whose gradients of such rows are as many times too large as there
    are keys.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 4, 8, 6, generator=generator, dtype=dtype) for _ in range(3)]
    mask = hiding({"boolean": None, "-inf": -torch.inf}.get(hidden, torch.finfo(dtype).min), dtype)
    leaves += [mask] if mask.dtype == dtype else []
    leaves += [torch.randn(4, generator=generator, dtype=dtype)] if "sinks" in hidden else []
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v = leaves[:3]
    if "sinks" in hidden:
        scores = q @ k.mT * 6**-0.5 + mask
        out = torch.cat([scores, leaves[4][:, None, None].expand(1, 4, 8, 1)], -1).softmax(-1)[..., :8] @ v
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, mask)
    scale = torch.arange(out.numel()).view(out.shape)
    out.mul(scale).sum().backward()
    if hidden == "finite":
        assert error(out[:, :, 1].detach(), v.detach().mean(2)) < tolerance
    wanted = [out.detach(), *(x.grad for x in leaves)]
    dims = [None, None, 2, 2, 3, None] if merged else [2, 2, 2, 2, 2, None]  # of the output and the operands

    def part(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return x.detach().clone() if dim is None else x.detach().chunk(ranks, dim)[comm.rank("cp")]

    def rank() -> list[torch.Tensor]:
        local = [part(x, dim).requires_grad_() for x, dim in zip(leaves, dims[1:])]
        of_mask, *sinks = local[3:] or [part(mask, dims[4])]
        keys = Keys((8 // ranks,) * ranks, merged)
        result = attention(*local[:3], keys, "cp", mask=of_mask, sinks=sinks[0] if sinks else None, scale=6**-0.5)
        (result * part(scale, dims[0])).sum().backward()
        return [result.detach(), *(x.grad for x in local)]

    parts = [*zip(*comm.threads.run(Mesh(ranks, cp=ranks), rank))]
    if merged:
        parts[0] = parts[0][:1]  # equal on all ranks
        parts[5:] = [of_ranks[:1] for of_ranks in parts[5:]]
    for what, dim, of_ranks, whole in zip(("output", "dq", "dk", "dv", "dmask", "dsinks"), dims, parts, wanted):
        result = sum(of_ranks) if dim is None else torch.cat(of_ranks, dim)
        assert error(result, whole) < tolerance, what


@pytest.mark.parametrize("window", [None, 1, 3, 200])
def test_visible_pieces_are_the_mask(window: int | None) -> None:
    """Runs in any order, documents and windows longer than a tile: the pieces cover each visible pair once."""
    queries, keys = ((150, 420), (600, 640)), ((0, 90), (140, 500), (610, 630))
    documents = ((0, 155), (155, 400), (400, 700))
    rows, columns = (torch.cat([torch.arange(*run) for run in runs]) for runs in (queries, keys))
    bounds = torch.tensor([0, 155, 400, 700])
    number = [torch.searchsorted(bounds, x, right=True) for x in (rows, columns)]
    wanted = (rows[:, None] >= columns) & (number[0][:, None] == number[1])
    if window is not None:
        wanted &= rows[:, None] - columns < window
    found = torch.zeros(wanted.shape, dtype=torch.int64)
    for piece in visible(queries, keys, window=window, documents=documents):
        i, j = torch.arange(piece.rows[1] - piece.rows[0])[:, None], torch.arange(piece.keys[1] - piece.keys[0])
        seen = torch.ones(len(i), len(j), dtype=torch.bool)
        if piece.diagonal:
            seen = i >= j
        elif piece.band is not None:
            seen = (piece.band + i - j >= 0) & (piece.band + i - j < window)
        found[slice(*piece.rows), slice(*piece.keys)] += seen
    assert torch.equal(found, wanted.long())


@pytest.mark.parametrize(
    "function, sizes, options, words",
    [
        ("ulysses_attention", (5, 5), {}, "3 heads of q .* cannot be divided among 2 ranks of cp: use ring_attention"),
        ("ulysses_attention", (5, 5), dict(degree=3), r"degree 3 does not divide 2 ranks: choose one of \[1, 2\]"),
        ("ring_attention", (5, 5), dict(window=4, causal=False), "window=4 must be at least 1, with causal=True"),
        ("ring_attention", (5, 5), dict(lengths=[4, 6]), r"lengths=\[4, 6\] must have the tokens of each of 2 ranks"),
        ("ring_attention", (5, 5), dict(cu_seqlens=[0, 4]), r"cu_seqlens \[0, 4\] must rise from 0 to 10"),
        ("ring_attention", (3, 6), dict(lengths=[3, 6], balance="zigzag"), r"has \[5, 4\] tokens a rank, not \[3, 6\]"),
        ("ring_attention", (5, 5), dict(balance="zig-zag"), "balance='zig-zag' is neither None"),
    ],
)
def test_refusals_name_the_sizes(function: str, sizes: tuple[int, int], options: Any, words: str) -> None:
    def rank() -> None:
        x = torch.zeros(1, 3, sizes[comm.rank("cp")], 2)
        with pytest.raises(ValueError, match=words):
            getattr(nxd, function)(x, x, x, **options)

    comm.threads.run(Mesh(2, cp=2), rank)


@pytest.mark.parametrize("function", [nxd.ring_attention, nxd.ulysses_attention])
def test_shapes_that_do_not_go_together_are_refused(function: Any) -> None:
    def rank() -> None:
        x = torch.zeros(1, 2, 4, 4)
        for k, v in ((x[..., :3], x), (x, x[:, :1]), (x, x[:, :, :2])):
            words = re.escape(f"k {list(k.shape)} and v {list(v.shape)} must be [batch, heads, tokens, features]")
            with pytest.raises(ValueError, match=words):
                function(x, k, v)
        with pytest.raises(ValueError, match=r"sinks \[1\] must be \[2\], one score for each head"):
            function(x, x, x, sinks=torch.zeros(1))

    comm.threads.run(Mesh(2, cp=2), rank)


def test_a_degree_needs_an_axis_with_named_parts() -> None:
    def rank() -> None:
        x = torch.zeros(1, 2, 2, 4)
        with pytest.raises(ValueError, match=r"over \('dp', 'cp'\): .* degree 2 of 4 ranks needs an axis of the mesh"):
            nxd.ulysses_attention(x, x, x, degree=2, axis=("dp", "cp"))

    comm.threads.run(Mesh(4, cp=2), rank)


def test_different_descriptions_of_a_sequence_are_refused() -> None:
    """Ranks with other documents would go around the ring another number of times, and wait forever."""

    def rank() -> None:
        x, number = torch.zeros(1, 2, 2, 4), comm.rank("cp")
        with pytest.raises(
            ValueError, match=r"rank 0 has cu_seqlens .*\[0, 8\].*, and rank [1-3] cu_seqlens .*\[0, 2\]"
        ):
            nxd.ring_attention(x, x, x, cu_seqlens=[0, 2, 4, 6, 8] if number else [0, 8])

    comm.threads.run(Mesh(4, cp=4), rank)


def test_the_hops_of_many_documents_are_counted_once() -> None:
    """A batch whose rows have more documents together than the cache of pieces holds: no layer searches them anew."""

    def rank() -> tuple[int, int]:
        x = torch.zeros(70, 1, 2, 2)
        bounds = [[0, 1 + row % 3, 4] for row in range(70)]
        nxd.ring_attention(x, x, x, cu_seqlens=bounds)
        before = visible.cache_info()
        nxd.ring_attention(x, x, x, cu_seqlens=bounds)
        after = visible.cache_info()
        return after.misses - before.misses, after.hits - before.hits

    misses, hits = comm.threads.run(Mesh(2, cp=2), rank)[0]
    assert misses + hits <= 70 * 2 * 2 * 2  # rows, blocks and ranks, of which both calls may fall into one count


class Layer(nn.Module):
    """An attention between two linear layers, on a part of the sequence."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(8, 24), nn.Linear(8, 8), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize(
    "attend, cp", [(nxd.ring_attention, 2), (nxd.ulysses_attention, 2), (partial(nxd.ulysses_attention, degree=2), 4)]
)
def test_a_check_accepts_the_right_form(attend: Any, cp: int) -> None:
    inputs, types = {"x": torch.zeros(2, 8, 8)}, {"cp": spmd.S(1)}
    assert spmd.check(lambda: Layer(attend), inputs, Mesh(cp, cp=cp), in_types=types, raise_errors=True).ok


def test_a_check_refuses_attention_of_the_local_part() -> None:
    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    report = spmd.check(lambda: Layer(local), {"x": torch.zeros(2, 8, 8)}, Mesh(2, cp=2), in_types={"cp": spmd.S(1)})
    assert "on cp k is S(2) and q is S(2)" in str(report)


def test_messages_and_bytes() -> None:
    """Ring: cp - 1 messages of keys and values, twice as many in backward; Ulysses: two all-to-alls, and back.

    Both: all-to-alls over adjacent ranks, and a ring over the groups.
    """
    cp, element = 4, 8

    def rank() -> list[Any]:
        counts = []
        for function in (nxd.ring_attention, nxd.ulysses_attention, partial(nxd.ulysses_attention, degree=2)):
            q, k, v = (torch.randn(1, 4, 6, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
            with comm.record() as forward:
                out = function(q, k, v)
            with comm.record() as backward:
                out.sum().backward()
            counts.append(
                [[(call.verb, call.axis, prod(call.shape) * element) for call in log] for log in (forward, backward)]
            )
        return counts

    def near() -> list[int]:
        q, k, v = (torch.randn(1, 4, 6, 2, requires_grad=True) for _ in range(3))
        with comm.record() as calls:
            nxd.ring_attention(q, k, v, window=6).sum().backward()
        return [len(calls), sum(call.messages for call in calls)]

    assert comm.threads.run(Mesh(cp, cp=cp), near) == [[3, 3]] * cp  # one block there, there again, its gradients back

    def few() -> list[int]:
        q, k, v = (torch.randn(1, heads, 6, 2) for heads in (8, 2, 2))
        with comm.record() as calls:
            nxd.ulysses_attention(q, k, v)
        return [prod(call.shape) for call in calls]

    # Two key/value heads are repeated to one a rank, not to one a query head.
    assert comm.threads.run(Mesh(cp, cp=cp), few) == [[(8 + 4 + 4) * 6 * 2, 8 * 6 * 2]] * cp
    row = 4 * 6 * 2 * element  # bytes of this rank's q, as of k and v
    for ring, ulysses, both in comm.threads.run(Mesh(cp, cp=cp), rank):
        assert ring == [[("exchange", "cp", 2 * row)] * (cp - 1), [("exchange", "cp", 2 * row)] * 2 * (cp - 1)]
        assert ulysses == [
            [("all_to_all", "cp", 3 * row), ("all_to_all", "cp", row)],
            [("all_to_all", "cp", row), ("all_to_all", "cp", 3 * row)],
        ]
        q = torch.empty(1, 4, 6, 2)  # of the bytes of an all-to-all, 1 / size stay
        split = split_of((6,) * cp)
        for degree, calls in ((1, ring), (2, both), (cp, ulysses)):
            sizes = {"cp": cp, "cp%2": 2}
            sent = [size - size // sizes[axis] if verb == "all_to_all" else size for verb, axis, size in chain(*calls)]
            assert traffic(degree, q, q, q, split) == (sum(sent) // element, len(sent))
        there, hop, back = ("all_to_all", "cp%2", 3 * row), ("exchange", "cp/2", 2 * row), ("all_to_all", "cp%2", row)
        assert both == [[there, hop, back], [back, hop, hop, there]]
