"""The pool of operations that programs are made of: templates of lines, and who fits into them.

In a template `{x}` is any float, `{y}` and `{z}` floats that broadcast against it, `{s}` one of its shape, `{m}` a mask
that broadcasts against it, `{j}` indices of one dim, `{w}` a matrix for the last dim of x, `{d}` and `{e}` dims of x,
`{k}` a position along d, `{axis}` a mesh axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tests.checking.types.soundness.denotation import Claim, whole_shape

if TYPE_CHECKING:
    from tests.checking.types.soundness.generator import Generator

SAME = "same"
ELEMENTS = """
torch.relu({x}) | torch.tanh({x}) | {x} * 2.0 | {x} / 3.0 | 2.0 / ({x} * {x} + 1.0) | -{x} | {x} + 1.0 | 1.0 - {x}
{x}.sin() | {x}.abs() | {x} * {x} | {x}.pow(2) | {x}.clone() | {x}.detach() | {x}.double() | {x}.contiguous()
{x}.to(torch.float64) | F.gelu({x}) | F.silu({x}) | {x}.clamp(-1.0, 1.0) | {x}.sigmoid() | F.softplus({x}) | {x} - 0.0
F.dropout({x}, 0.0) | F.dropout({x}, 0.5, training=False) | {x}.square() | torch.sqrt({x}.abs() + 1.0) | {x} % 2.0
{x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y} * {y} + 1.0) | torch.maximum({x}, {y}) | torch.add({x}, {y}, alpha=2.0)
torch.lerp({x}, {y}, 0.3) | torch.addcmul({x}, {y}, {z}) | torch.where({x} > {y}, {x}, {y}) | torch.where({m}, {x}, {y})
torch.where({m}, {x}, 0.0) | torch.where({m}, 2.0, {x}) | {x}.masked_fill({m}, 0.0) | {x}.masked_fill({m}, 1.0)
{x} * {m} | {x} * {m}.double() | torch.hypot({x}, {y}) | torch.sub({x}, {y}, alpha=0.5) | {x}.mul({y}).add({z})
{x} + {y} | {x} - {y} | {x} * {y} | {x} + {y} | {x} * {y} | torch.lerp({x}, {y}, {z})
torch.addcdiv({x}, {y}, 1.0 + {z} * {z}) | torch.atan2({x}, 2.0 + {y} * {y}) | torch.where({x} != 0.0, {x}, {y})
"""
REDUCTIONS = """
{x}.sum() | {x}.mean() | {x}.amax() | {x}.sum({d}) | {x}.sum({d}, keepdim=True) | {x}.mean({d}) | {x}.amax({d})
{x}.amin({d}) | {x}.prod({d}) | {x}.logsumexp({d}) | {x}.norm() | torch.linalg.vector_norm({x}, dim={d}) | {x}.var({d})
{x}.cumsum({d}) | {x}.softmax({d}) | F.log_softmax({x}, {d}) | F.normalize({x}, dim={d}) | {x}.sort({d}).values
F.layer_norm({x}, {x}.shape[-1:]) | F.rms_norm({x}, {x}.shape[-1:]) | {x}.max({d}).values | {x}.max({d}, keepdim=True)[0]
{x}.topk(1, {d}).values | {x}.sum() + {y} | F.mse_loss({x}, {s}) | F.mse_loss({x}, {s}, reduction="sum") | {x}.sum({d})
F.l1_loss({x}, {s}, reduction="none") | torch.count_nonzero({x}).double() | {x}.gt(0).sum({d}).double() | {x}.nansum({d})
torch.dist({x}, {s}) | F.cosine_similarity({x}, {s}, dim={d}) | {m}.double().sum() | {m}.any().double() | {x}.sum((0, -1))
{x} - {x}.mean({d}, keepdim=True) | {x} - {x}.amax({d}, keepdim=True).detach() | torch.median({x}, {d}).values
{x}.std({d}) | {x}.aminmax(dim={d}).max | F.smooth_l1_loss({x}, {s}, reduction="sum") | {x}.renorm(2, {d}, 1.0)
"""
VIEWS = """
{x}.transpose({d}, {e}) | {x}.movedim({d}, {e}) | {x}.unsqueeze({d}) | {x}.unsqueeze(-1) | {x}.squeeze({d}) | {x}.squeeze()
{x}.flatten() | {x}.T | {x}.mT | {x}[0] | {x}.select({d}, {k}) | {x}.narrow({d}, {k}, 1) | {x}[..., :1] | {x}[..., 0]
{x}[1:] | {x}[:, None] | {x}[::2] | {x}[None] | {x}[..., None, :] | {x}[:] | {x}[-1:] | {x}.flip({d}) | {x}.roll(1, {d})
torch.tril({x}) | torch.triu({x}) | torch.diagonal({x}) | torch.diag({x}) | F.pad({x}, (1, 1)) | F.pad({x}, (0, 0, 1, 0))
F.pad({x}, (0, 1), value=2.0) | torch.repeat_interleave({x}, 2, {d}) | {x}.repeat(2, *[1] * {x}.dim())
{x}.expand(2, *{x}.shape) | torch.zeros_like({x}) | torch.ones_like({x}) | torch.full_like({x}, 2.0)
{x}.new_zeros({x}.shape) | torch.ones({x}.shape, dtype=torch.float64) | torch.zeros({x}.shape, dtype=torch.float64)
torch.cat([{x}, {s}], {d}) | torch.stack([{x}, {s}], {d}) | torch.cat([{x}, {x}], {d}) | torch.atleast_2d({x}) | {x}.ravel()
torch.hstack([{x}, {s}]) | torch.vstack([{x}, {s}]) | torch.cat([{x}, torch.zeros_like({x})], {d}) | {x}.diag_embed()
torch.stack([{x}, {s}], -1).flatten(-2) | {x}.unfold({d}, 2, 1) | torch.rot90({x}, 1, ({d}, {e}))
{x}.flatten({d}, {e}) | {x}.view({x}.shape) | {x}.swapaxes({d}, {e}) | torch.block_diag({x}) | {x}[..., ::2] | {x}.tile((2,))
"""
INDEXED = """
{x}[{j}] | {x}[:, {j}] | torch.index_select({x}, {d}, {j}) | F.embedding({j}, {x}) | F.cross_entropy({x}, {j})
F.cross_entropy({x}, {j}, reduction="sum") | F.cross_entropy({x}, {j}, reduction="none") | {x}[..., {j}] | {x}.take({j})
F.one_hot({j}, 2).double() | {j}.double() + {x} | torch.gather({x}, 0, {j}[:, None].expand(-1, *{x}.shape[1:]))
torch.take_along_dim({x}, {x}.argmax({d}, keepdim=True), {d}) | {x} * ({j} == 1) | {x}.index_add({d}, {j}, {s})
{x}.scatter_add(0, {j}[:, None].expand_as({x}), {x}) | {x}[{j}, {j}]
F.nll_loss(F.log_softmax({x}, -1), {j}, reduction="sum") | torch.gather({x}, -1, {j}[:, None]) | {x}.index_fill({d}, {j}, 0.0)
"""
PRODUCTS = """
torch.matmul({x}, {w}) | {x} @ {w} | F.linear({x}, {w}.mT) | F.linear({x}, {w}.t()) | {x} @ {w} + {y} | torch.inner({x}, {w}.mT)
torch.einsum("...k,kn->...n", {x}, {w}) | torch.tensordot({x}, {w}, dims=1) | torch.mm({x}, {w}) | {x} @ {x}.mT
torch.einsum("ij,jk->ik", {x}, {w}) | torch.einsum("ij,jk->k", {x}, {w}) | F.linear({x}, {w}.mT, {w}[0]) | {x}.T @ {s}
torch.addmm({y}, {x}, {w}) | torch.outer({x}.flatten(), {y}.flatten()) | torch.dot({x}.flatten(), {s}.flatten())
torch.einsum("i,j->ij", {x}.flatten(), {y}.flatten()) | torch.bmm({x}, {x}.mT) | torch.einsum("...d,...d->...", {x}, {s})
torch.einsum("ij,ij->", {x}, {s}) | torch.matmul({x}.mT, {s}) | {x} @ {s}.mT | F.linear({x}, {s}) | torch.mv({x}, {s}[0])
F.scaled_dot_product_attention({x}, {s}, {s}) | torch.baddbmm({s} @ {s}.mT, {x}, {s}.mT) | torch.einsum("bij,bkj->bik", {x}, {s})
F.linear({x}, {w}.mT, {y}) | torch.addmv({y}, {x}, {s}[0]) | torch.linalg.multi_dot([{x}, {w}]) | {x} @ {w} @ {w}.mT
F.linear({x}, {w}.mT).relu() | torch.kron({x}, {y}) | torch.cdist({x}, {s}) | torch.einsum("ii->i", {x}) | torch.trace({x})
"""
WRITES = """
{x}.add_({y}) | {x}.mul_({y}) | {x}.mul_(2.0) | {x}.add_(1.0) | {x}.copy_({y}) | {x}.zero_() | {x}.fill_(1.0) | {x}.neg_()
{x}.masked_fill_({m}, 0.0) | {x}[0] = 0.0 | {x}[..., 0] = 0.0 | {x}[..., :1] = {y} | {x}[0] = {y} | {x}[0].add_({y})
{x}.view(-1).mul_(2.0) | {x}.narrow({d}, 0, 1).copy_({y}) | {x}.select({d}, {k}).add_({y}) | {x}.relu_() | {x}[:] = {y}
{x}[{m}] = 0.0 | {x}.index_add_({d}, {j}, {s}) | {x}.sub_({y}) | {x}.T.copy_({y}) | {x}.squeeze().fill_(2.0)
{x}[{j}] = 0.0 | {x}.narrow({d}, 0, 1).zero_() | {x}.addcmul_({y}, {z}) | {x}.lerp_({y}, 0.5) | {x}.clamp_(-1.0, 1.0)
{x}[0].copy_({y}) | {x}[-1] *= 2.0 | {x}.view(-1).copy_({s}.view(-1)) | torch.add({x}, {y}, out={x}) | {x}.tanh_()
{x}.detach().mul_(2.0) | {x}[..., 0] = {y} | {x}.view(-1)[:1] = 1.0 | {x}.expand_as({x}).add_({y}) | {x}.index_copy_({d}, {j}, {s})
"""
SCALARS = """
{x} * {y}.sum().item() | {x} * float({y}.sum()) | {x} * 2.0 if bool({y}.sum() > 0) else {x} | {x} + {x}.shape[0] * 0.0
{x} * int({y}.sum() > 0) | {x} * {y}.amax().item() | torch.tensor({y}.sum().item(), dtype=torch.float64) * {x}
"""
MASKS = "{x} > 0.0 | {x} > {y} | {m} & {n} | ~{m} | {x} == {y} | {m}.any({d}) | {m}.all() | {x}.argmax({d}) > 0 | {m}.logical_or({n})"
MADE = """
torch.arange({size}, dtype=torch.float64) | torch.eye({size}, dtype=torch.float64) | torch.ones({size}, dtype=torch.float64)
torch.zeros({size}, dtype=torch.float64) | torch.tensor([1.0, 2.0], dtype=torch.float64) | torch.full(({size},), 3.0).double()
torch.linspace(0.0, 1.0, {size}, dtype=torch.float64) | torch.ones((), dtype=torch.float64) | torch.zeros({size}, {size}).double()
torch.rand({size}, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
"""


class Proposal(NamedTuple):
    """`whole`: a text, SAME, None (no meaning there), or a function of the claims of the results that gives the text."""

    text: str
    op: str
    whole: Any = SAME
    count: int = 1  # results; 0: it writes in place


def _templates(text: str, count: int = 1) -> list[Callable[[Generator], Proposal | None]]:
    found = []
    for template in re.split(r" \| |\n", text.strip()):

        def make(g: Generator, template: str = template) -> Proposal | None:
            names = g.fill(template)
            return None if names is None else Proposal(template.format(**names), template, SAME, count)

        found.append(make)
    return found


def view(g: Generator) -> Proposal | None:
    """Any other shape, in sizes of a rank."""
    x = g.float(1)
    if x is None:
        return None
    local = g.local[x]
    shape = list(local.shape)
    for _ in range(g.rng.randint(1, 2)):
        at = g.rng.randrange(len(shape))
        if g.rng.random() < 0.5 and len(shape) > 1 and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            by = g.rng.choice([n for n in (1, 2, 2, 3, shape[at]) if n and shape[at] % n == 0])
            shape[at : at + 1] = [by, shape[at] // by]
    if g.rng.random() < 0.2:
        g.rng.shuffle(shape)
    given = list(shape)
    if g.rng.random() < 0.5 and 0 not in shape:
        given[g.rng.randrange(len(given))] = -1
    verb = g.rng.choice(["view", "reshape"])
    return Proposal(f"{x}.{verb}{tuple(given)}", verb, lambda claims: f"{x}.{verb}({_scaled(shape, claims[0], g)})")


def _scaled(shape: list[int], claim: Claim, g: Generator) -> list[int]:
    return whole_shape(shape, claim, g.grid)


def pieces(g: Generator) -> Proposal | None:
    """chunk, split and unbind: several results."""
    x = g.float(1)
    if x is None:
        return None
    local: Tensor = g.local[x]
    dim = g.rng.randrange(local.dim())
    size = local.shape[dim]
    verb = g.rng.choice(["chunk", "split", "unbind", "tensor_split", "sections", "glu"])
    if verb == "unbind" and 1 < size <= 3:
        return Proposal(f"{x}.unbind({dim})", verb, SAME, size)
    if size % 2 or not size:
        return None
    half = size // 2
    if verb == "glu":
        return Proposal(f"F.glu({x}, {dim})", verb)
    if verb in ("chunk", "tensor_split"):
        return Proposal(f"torch.{verb}({x}, 2, dim={dim})", verb, SAME, 2)
    text = f"{x}.split({[half, half]}, {dim})" if verb == "sections" else f"torch.split({x}, {half}, {dim})"
    # In the whole a half may be longer: as long as the claim says that the results are.
    return Proposal(
        text, verb, lambda claims: f"torch.split({x}, {_scaled(list(local.shape), claims[0], g)[dim]} // 2, {dim})", 2
    )


def expand(g: Generator) -> Proposal | None:
    x = g.float(1)
    if x is None:
        return None
    shape = [g.rng.choice([2, 3, g.width]) if n == 1 and g.rng.random() < 0.7 else n for n in g.local[x].shape]
    verb = g.rng.choice(["expand", "broadcast_to", "expand_as"])
    if verb == "expand_as":
        names = g.fill("{x} {y}")
        if names is None:
            return None
        x, y = names["x"], names["y"]
        shape = list(g.local[y].shape)
        return Proposal(f"{x}.expand_as({y})", verb, lambda claims: f"{x}.expand({_scaled(shape, claims[0], g)})")
    return Proposal(f"{x}.{verb}({shape})", verb, lambda claims: f"{x}.{verb}({_scaled(shape, claims[0], g)})")


def typed(g: Generator) -> Proposal | None:
    """Draws one of the typed operators, mostly one whose source is the type of x."""
    if g.dealt and g.rng.random() < 0.5 and (proposal := ordered(g)) is not None:
        return proposal
    x, axis = g.float(0), g.axis()
    if x is None:
        return None
    shape = g.local[x].shape
    kind = g.claims[x].get(axis)
    letter = kind.letter if g.rng.random() < 0.85 else g.rng.choice("RIVPS")
    dims = [f"S({d})" for d in range(len(shape))] or ["V"]
    shard = f"S({kind.dim})" if hasattr(kind, "dim") else g.rng.choice(dims)  # type: ignore[union-attr]
    other, equal = g.rng.choice(dims), g.rng.choice("RI")
    if g.level == "L" and letter == "V" and g.rng.random() < 0.5:
        letter = "S"
    rows = {
        "R": [("convert", "R", other), ("convert", "R", "V"), ("convert", "R", "P"), ("convert", "R", "I"),
              ("reinterpret", "R", "V"), ("reinterpret", "R", "P")],
        "I": [("convert", "I", "R"), ("convert", "I", other), ("convert", "I", "V"), ("convert", "I", "P"),
              ("reinterpret", "I", "V"), ("reinterpret", "I", "P"), ("reinterpret", "I", "R")],
        "P": [("all_reduce", "P", equal), ("reduce_scatter", "P", other), ("reduce_scatter", "P", "V"),
              *[(verb, 'P("avg")', dst) for verb, dst in (("all_reduce", equal), ("reduce_scatter", other))
                if "A" in g.letters]],
        "S": [("all_gather", shard, equal), ("all_to_all", shard, other), ("convert", shard, "P")],
        "V": [("all_reduce", "V", equal), ("all_gather", "V", equal), ("reduce_scatter", "V", other),
              ("reduce_scatter", "V", "V"), ("all_to_all", "V", "V"), ("convert", "V", "P"), ("reinterpret", "V", "P")],
    }  # fmt: skip
    if g.dealt and letter == "S" and getattr(kind, "order", None) is not None:  # else it is only refused
        rows["S"] = rows["S"][:1]
    verb, src, dst = g.rng.choice(rows.get(letter, rows["R"]))
    if src == "P" and g.claims[x].constant:  # ones are summed to count: how many there are is nobody's shape
        return None
    if (src[0], dst[0]) == ("S", "S") and src == dst:
        return None
    expert = ", expert_mode=True" if verb in ("convert", "reinterpret") else ""
    whole: Any = f"{x}.clone()"
    if "V" in (src, dst):
        whole = None
    elif verb == "reinterpret" or (src, dst) in (("I", "R"), ("R", "I")):  # the same memory
        whole = f"{x}.view_as({x})"
    return Proposal(f"spmd.{verb}({x}, {axis!r}, src={src}, dst={dst}{expert})", f"{verb}({src[0]},{dst[0]})", whole)


def plain(g: Generator) -> Proposal | None:
    """A collective of `comm`, which has no derivative: of a tensor without gradient, mostly."""
    x, axis = g.float(1), g.axis()
    if x is None:
        return None
    kind = g.claims[x].get(axis)
    dim = g.rng.randrange(g.local[x].dim())
    if hasattr(kind, "dim") and g.rng.random() < 0.8:
        dim = kind.dim  # type: ignore[union-attr]
    other = g.rng.randrange(g.local[x].dim())
    verb = g.rng.choice(["all_reduce", "all_reduce", "max", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
    if g.claims[x].constant and verb != "broadcast":  # ones are summed to count: how many there are is nobody's shape
        return None
    held = f"{x}.detach()" if verb in ("max", "broadcast") or g.rng.random() < 0.5 else x
    count = g.grid[axis]
    if kind.letter == "V" or (verb in ("broadcast", "max") and kind.letter not in "RIP"):
        whole = None
    elif verb == "all_gather" and kind.letter in "RI":
        whole = f"torch.cat([{held}] * {count}, {dim})"
    elif verb == "all_to_all" and kind.letter in "RI":
        whole = None
    else:
        whole = f"{held}.clone()"
    text = {
        "all_reduce": f"comm.all_reduce({held}, {axis!r})",
        "max": f"comm.all_reduce({held}, {axis!r}, op='max')",
        "all_gather": f"comm.all_gather({held}, {axis!r}, dim={dim})",
        "reduce_scatter": f"comm.reduce_scatter({held}, {axis!r}, dim={dim})",
        "all_to_all": f"comm.all_to_all({held}, {axis!r}, split_dim={other}, concat_dim={dim})",
        "broadcast": f"comm.broadcast({held}.clone(), {axis!r}, src=0)",
    }[verb]
    return Proposal(text, f"comm.{verb}", whole)


def ordered(g: Generator) -> Proposal | None:
    """The pieces of a dim gathered, and put in order, or in another one that is not in order either."""
    found = [(n, axis, k) for n, claim in g.claims.items() for axis, k in claim.types
             if getattr(k, "order", None) is not None and not k.order.in_order and n in g.local]  # fmt: skip
    if not found:
        return None
    x, axis, kind = g.rng.choice(found)
    order = sum(kind.order.held, ())
    places = sorted(range(len(order)), key=order.__getitem__)
    if g.rng.random() < 0.3:
        g.rng.shuffle(places)
    src = f"spmd.all_gather({x}, {axis!r}, src=S({kind.dim}), dst={g.rng.choice('RI')})" if kind.letter == "S" else x
    text = f"torch.cat([p[i] for p in [{src}.chunk({len(places)}, {kind.dim})] for i in {places}], {kind.dim})"
    return Proposal(text, "ordered", f"{x}.clone()")


def forget(g: Generator) -> Proposal | None:
    x = g.float(1)
    return None if x is None else Proposal(f"spmd.forget({x}, {g.axis()!r})", "forget", None)


OPERATIONS: list[tuple[float, list[Callable[[Generator], Proposal | None]]]] = [
    (5, _templates(ELEMENTS)),
    (3, _templates(REDUCTIONS)),
    (3, _templates(VIEWS)),
    (1.5, _templates(INDEXED)),
    (4, _templates(PRODUCTS)),
    (2.5, _templates(WRITES, 0)),
    (0.5, _templates(SCALARS)),
    (0.7, _templates(MASKS)),
    (0.5, _templates(MADE)),
    (2.5, [view]),
    (1.2, [pieces]),
    (0.5, [expand]),
    (4, [typed]),
    (0.7, [plain]),
    (0.1, [forget]),
]
