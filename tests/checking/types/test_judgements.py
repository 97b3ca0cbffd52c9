"""The checker's judgements of one-line programs, for every type of their operands: a line for each in `judgements.txt`.

A line has the verdicts, and a digest of the whole text: of types, reasons, repairs and the edits of repairs. That a
judgement is true is what soundness/ shows, by values; that its words are good is what messages/ shows, in full: here
none changes unseen. NXD_UPDATE_JUDGEMENTS=1 writes the file anew (`-k all_are_there`). A failure prints the words of
today; those of another commit are printed there by

    python -m tests.checking.types.test_judgements NAME ...
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V

FILE = Path(__file__).parent / "judgements.txt"
UPDATE = bool(os.environ.get("NXD_UPDATE_JUDGEMENTS"))
MESH = Mesh(4, tp=2)
ONE = (R, I, V, P, P("avg"), S(0), S(1), S(0, 2), S(1, 3))
OVER_DATA = (P, S(0))
PAIRS = ((S(0), R), (S(0), S(1)), (S(0), P), (P, R), (P, P), (P, P("avg")), (V, S(0)), (V, R), (I, R), (R, S(1)))


def chained(x: Tensor) -> Tensor:
    return (
        x.t()
        .relu()
        .sum(0)
    )  # fmt: skip


# x is [4, 6], and so is y; i counts rows.
CALLS: dict[str, Callable[..., Any]] = {
    "-x": lambda x: -x,
    "x + 1": lambda x: x + 1,
    "x * 3": lambda x: x * 3,
    "2 / x": lambda x: 2 / x,
    "x ** 2": lambda x: x**2,
    "x.relu()": lambda x: x.relu(),
    "x > 0": lambda x: x > 0,
    "x.sum()": lambda x: x.sum(),
    "x.sum(1)": lambda x: x.sum(1),
    "x.mean()": lambda x: x.mean(),
    "x.amax(0)": lambda x: x.amax(0),
    "x.amin(0)": lambda x: x.amin(0),
    "x.argmax(1)": lambda x: x.argmax(1),
    "x.norm()": lambda x: x.norm(),
    "x.var(0)": lambda x: x.var(0),
    "x.cumsum(0)": lambda x: x.cumsum(0),
    "x.softmax(-1)": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "x.t()": lambda x: x.t(),
    "x.flatten()": lambda x: x.flatten(),
    "x.view(2, 2, 6)": lambda x: x.view(2, 2, 6),
    "x.view(4, 12 // 2)": lambda x: x.view(4, 12 // 2),
    "x.view(8, 3)": lambda x: x.view(8, 3),
    "x.unsqueeze(0)": lambda x: x.unsqueeze(0),
    "x.expand(2, 4, 6)": lambda x: x.expand(2, 4, 6),
    "x.repeat(2, 1)": lambda x: x.repeat(2, 1),
    "x[0]": lambda x: x[0],
    "x[:, 2:4]": lambda x: x[:, 2:4],
    "x[::2]": lambda x: x[::2],
    "x.chunk(2)[1]": lambda x: x.chunk(2)[1],
    "x.split(2, 1)[0]": lambda x: x.split(2, 1)[0],
    "x.flip(0)": lambda x: x.flip(0),
    "x.roll(1, 0)": lambda x: x.roll(1, 0),
    "x.sort(0)": lambda x: x.sort(0)[0],
    "x.topk(2)": lambda x: x.topk(2)[0],
    "x.gather(0, i)": lambda x: x.gather(0, torch.zeros(2, 6, dtype=torch.long)),
    "pad": lambda x: F.pad(x, (0, 1)),
    "x.item()": lambda x: x.sum().item(),
    "if x": lambda x: bool(x.sum() > 0),
    "x.to(int)": lambda x: x.to(torch.int64),
    "x.half()": lambda x: x.half(),
    "x.detach()": lambda x: x.detach(),
    "in place": lambda x: x.clone().add_(1),
    "comm.all_reduce": lambda x: comm.all_reduce(x, "tp"),
    "comm.all_gather": lambda x: comm.all_gather(x, "tp", dim=1),
    "comm.reduce_scatter": lambda x: comm.reduce_scatter(x, "tp"),
    "comm.all_to_all": lambda x: comm.all_to_all(x, "tp", split_dim=0, concat_dim=1),
    "comm.broadcast": lambda x: comm.broadcast(x, "tp", src=0),
    "spmd.all_reduce": lambda x: spmd.all_reduce(x, "tp", dst=R),
    "spmd.all_gather": lambda x: spmd.all_gather(x, "tp", src=S(1), dst=R),
    "spmd.convert": lambda x: spmd.convert(x, "tp", src=R, dst=S(0)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "rms_norm with a weight": lambda x: F.rms_norm(x, (6,), torch.ones(6)),
    "layer_norm with a weight": lambda x: F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6)),
    "x.mean().exp()": lambda x: x.mean().exp(),
    "x.mean(0).exp()": lambda x: x.mean(0).exp(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "zeros_like": lambda x: torch.zeros_like(x),
    "x + zeros": lambda x: x + torch.zeros(4, 6),
    "x.clone().zero_()": lambda x: x.clone().zero_(),
    "x * ones": lambda x: x * torch.ones(4, 6),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "cross_entropy with weights": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long), torch.ones(6)),
    "embedding": lambda x: F.embedding(torch.zeros(2, dtype=torch.long), x),
    "conv1d": lambda x: F.conv1d(x, torch.ones(2, 4, 3)),
    "x.masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "foreach": lambda x: torch._foreach_add([x, x], 1)[0],
    "x.tolist()": lambda x: x.tolist(),
    "len(x)": lambda x: len(x),
    "x.shape[0]": lambda x: x.shape[0] + 1,
    "iteration": lambda x: list(x)[0],
    "chain over lines": lambda x: chained(x),
    "linear of x": lambda x: F.linear(torch.ones(2, 6), x),
    "x @ constant": lambda x: x @ torch.ones(6, 2),
    "x.chunk(2)": lambda x: torch.cat(x.chunk(2)),
    "halves": lambda x: torch.cat([x.chunk(2)[1], x.chunk(2)[0]]),
    "x[1:]": lambda x: x[1:] - x[:-1],
    "x.flatten().view": lambda x: x.flatten().view(4, 6),
    "x.view(2, 2, 6).flatten": lambda x: x.view(2, 2, 6).transpose(0, 1).flatten(0, 1),
    "x.unflatten": lambda x: x.unflatten(1, (3, 2)).sum(1),
    "x.view(4, 3, 2)": lambda x: x.view(4, 3, 2).mean(2),
    "rand_like": lambda x: torch.rand_like(x) + x,
    "ones_like": lambda x: torch.ones_like(x),
    "empty_like": lambda x: torch.empty_like(x).copy_(x),
    "arange of a size": lambda x: torch.arange(x.shape[0]),
    "randn of a shape": lambda x: torch.randn(x.shape),
    "bernoulli": lambda x: torch.bernoulli(x),
    "vmap": lambda x: torch.vmap(lambda row: row.sum() + row[0])(x),
    "vmap over columns": lambda x: torch.vmap(torch.relu, in_dims=1)(x),
    "gradient": lambda x: torch.autograd.grad((x.requires_grad_() * 2).sum(), x)[0],
    "gradient of a square": lambda x: torch.func.grad(lambda z: (z * z).sum())(x),
    "spmd.reduce_scatter": lambda x: spmd.reduce_scatter(x, "tp", dst=S(1)),
    "spmd.all_to_all": lambda x: spmd.all_to_all(x, "tp", src=S(0), dst=S(1)),
    "spmd.reinterpret": lambda x: spmd.reinterpret(x, "tp", src=V, dst=P),
    "comm.all_reduce max": lambda x: comm.all_reduce(x, "tp", op="max"),
    "comm.permute": lambda x: comm.permute(x, "tp", [(0, 1), (1, 0)]),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 2])),
    "index_add": lambda x: torch.zeros(4, 6).index_add(0, torch.tensor([0, 1, 1, 2]), x),
    "x.prod(0)": lambda x: x.prod(0),
    "x.logsumexp(1)": lambda x: x.logsumexp(1),
    "x.any()": lambda x: (x > 0).any(),
    "x.std(1)": lambda x: x.std(1),
    "x.clamp(0, 1)": lambda x: x.clamp(0, 1),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.long)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "stacked": lambda x: spmd.all_gather(x, "tp", src=V, dst=R),
    "stacked and summed": lambda x: spmd.all_gather(x * 1, "tp", src=V, dst=R, gather_dim=1).sum(1),
    "stacked and flattened": lambda x: spmd.all_gather(spmd.forget(x, "tp"), "tp", src=V, dst=R).flatten(0, 1),
    "local_map": lambda x: spmd.local_map(torch.relu, out_types={"tp": V, "dp": R})(x),
    "trust": lambda x: spmd.trust(x * 1, "tp", R),
    "assert_type": lambda x: spmd.assert_type(x * 1, {"tp": S(0)}),
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "x > y": lambda x, y: x > y,
    "x @ y.t()": lambda x, y: x @ y.t(),
    "x.t() @ y": lambda x, y: x.t() @ y,
    "linear": lambda x, y: F.linear(x, y),
    "linear with a bias": lambda x, y: F.linear(x, torch.ones(4, 6), y[:, 0]),
    "torch.maximum": lambda x, y: torch.maximum(x, y),
    "torch.where": lambda x, y: torch.where(x > 0, x, y),
    "torch.cat": lambda x, y: torch.cat([x, y]),
    "torch.stack": lambda x, y: torch.stack([x, y]),
    "torch.lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "addmm": lambda x, y: torch.addmm(x, torch.ones(4, 4), y),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "x.copy_(y)": lambda x, y: x.clone().copy_(y),
    "x.add_(y)": lambda x, y: x.clone().add_(y, alpha=2),
    "x[:2] = y[:2]": lambda x, y: x.clone().__setitem__(slice(2), y[:2]),
    "y[i]": lambda x, y: y[torch.zeros(2, dtype=torch.long)] + x[:2],
}


def in_words(result: Any) -> str:
    if not isinstance(result, Tensor):
        return repr(result)
    types = {axis: kind for axis, kind in spmd.get_local_type(result).items() if str(kind) != "R"}
    return f"{[*result.shape]} {types}"


def said_of(error: SpmdTypeError) -> Iterator[str]:
    yield re.sub(r" at /\S*:\d+", "", f"refused by {error.rule}: {error.what}: {error.why}")
    for repair in error.repairs:
        edits = [
            f"{edit.end[1] - edit.start[1]} characters" + f" become {edit.text!r}" * (edit.text != repair)
            for edit in getattr(repair, "edits", ())
        ]
        yield f"    {repair}" + f" [{'; '.join(edits)}]" * bool(edits)


def judged(call: Callable[..., Any], given: Sequence[dict[str, Any]], receiving: bool = False) -> list[str]:
    """Returns the judgement of a call on tensors of these types, which receive gradients, or not."""
    tensors = [torch.ones(4, 6, requires_grad=receiving) for _ in given]
    with comm.as_rank(MESH, 0, CheckBackend()), spmd.SpmdTypeMode() as mode:
        for x, types in zip(tensors, given):
            spmd.assert_type(x, types)
        try:
            said = [in_words(call(*tensors))]
        except SpmdTypeError as error:
            said = [*said_of(error)]
        except (RuntimeError, ValueError) as error:  # torch's own words, or those of a collective
            said = [type(error).__name__]
        claims = [("assumed", text) for text, _ in mode.assumed] + [("trusted", text) for text, _ in mode.trusted]
        return [*said, *(f"    {word}: {text}" for word, text in claims)]


class Answer(NamedTuple):
    """One answer of the checker: `lines` about operands of these types, `operands` in words."""

    operands: str
    types: Sequence[dict[str, Any]]
    lines: Sequence[str]

    @property
    def verdict(self) -> str:
        """The rule that refuses, in capitals; or the shape and the types of the result, "as it is" where x has them."""
        refused = re.match(r"refused by (\w+):", self.lines[0])
        if refused:
            return refused[1].upper()
        result = " ".join(self.lines[0].split())
        unchanged = {axis: type_ for axis, type_ in sorted(self.types[0].items()) if str(type_) != "R"}
        return result.replace(f"[4, 6] {unchanged}", "as it is") if len(self.types) == 1 else result


def in_full(name: str, answers: Sequence[Answer]) -> str:
    text = "\n".join([name, *("\n".join([f"  {one.operands}: {one.lines[0]}", *one.lines[1:]]) for one in answers)])
    return re.sub(r"/\S+\.py:\d+", "this line", text)


def in_a_line(name: str, answers: Sequence[Answer]) -> str:
    operands: dict[str, list[str]] = {}
    for answer in answers:
        operands.setdefault(answer.verdict, []).append(answer.operands)
    verdicts = "; ".join(f"{verdict}: {', '.join(words)}" for verdict, words in operands.items())
    return f"{name} #{hashlib.sha256(in_full(name, answers).encode()).hexdigest()[:8]} {verdicts}"


def recorded(file: Path) -> dict[str, str]:
    """The lines of a file by the names of their programs."""
    return {line.partition(" #")[0]: line for line in file.read_text().splitlines()}


def assert_reviewed(file: Path, name: str, answers: Sequence[Answer]) -> None:
    """A program is judged as the file says; without answers, it has no line there."""
    line = in_a_line(name, answers) if answers else None
    assert line == recorded(file).get(name), f"the judgement, or its words, changed. Now:\n{in_full(name, answers)}"


def judgement(call: Callable[..., Any], types: tuple[Any, ...], axis: str = "tp") -> Answer:
    given = [{axis: type_, "dp" if axis == "tp" else "tp": R} for type_ in types]
    return Answer(", ".join(map(str, types)) + " over dp" * (axis == "dp"), given, judged(call, given))


@cache
def judgements(name: str) -> list[Answer]:
    call = CALLS[name]
    if call.__code__.co_argcount > 1:
        return [judgement(call, types) for types in PAIRS]
    return [*(judgement(call, (one,)) for one in ONE), *(judgement(call, (one,), "dp") for one in OVER_DATA)]


def test_all_are_there():
    if UPDATE:
        FILE.write_text("\n".join(in_a_line(name, judgements(name)) for name in CALLS) + "\n")
    assert [*recorded(FILE)] == [*CALLS]


@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the positions of instructions")
@pytest.mark.parametrize("name", CALLS)
def test_judgements_are_what_was_reviewed(name):
    assert_reviewed(FILE, name, judgements(name))


def test_a_change_of_a_word_is_seen_and_printed():
    answers = judgements("x + 1")
    changed = [one._replace(lines=[line.replace("all_reduce", "all_add") for line in one.lines]) for one in answers]
    assert any("all_reduce" in line for one in answers for line in one.lines)
    with pytest.raises(AssertionError, match="spmd.all_add"):
        assert_reviewed(FILE, "x + 1", changed)
    with pytest.raises(AssertionError, match="changed"):
        assert_reviewed(FILE, "x + 1", [])


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CALLS:
        print(in_full(wanted, judgements(wanted)), end="\n\n")
