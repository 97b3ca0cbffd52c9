"""Rules of the checker that are dropped, each with a program whose verdict it decides.

A rule is a function of the checker, in the place where it is called; dropped, it does nothing, or finds nothing. What
the checker says of the program then changes, so that the exam, whose program it is, or a test of the rule goes red.

    python -m tests.checking.mutation.rules         # the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from neuronx_dist import comm, reduce_gradients, spmd
from neuronx_dist.checking import api
from neuronx_dist.checking.programs import played
from neuronx_dist.checking.types import judge, judging
from neuronx_dist.checking.types.handlers import autograd, axis_numbers, captured, operators, rank_arguments, verbs
from neuronx_dist.checking.types.mode import _memos
from neuronx_dist.checking.types.read_numbers import Decisions
from tests.checking.exam.support import load
from tests.checking.types.typed_tensors import checked, typed
from tests.checking.user_programs.support import verdict

__all__ = ["RULES", "Dropped", "dropped", "said"]


class Dropped(NamedTuple):
    """A rule without effect.

    Attributes:
        places: objects and names of attributes in which it is replaced.
        by: the replacement.
        program: whose verdict the rule decides: the name of one of the exam, or a function that returns the verdict.
    """

    places: tuple[tuple[Any, str], ...]
    by: Callable[..., Any]
    program: str | Callable[[], str]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Summed(torch.autograd.Function):
    """A sum over tp whose backward sums again, though each rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(x, "tp")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(grad, "tp") * comm.size("tp")


_summed = Summed.apply  # before any check


class _Bound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        spmd.set_spec(self, "weight", spmd.ShardSpec("tp", 1, num_partitions=2, full_shape=(4, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _summed(x @ self.weight.t()).square().mean()


def _bound_before_the_check() -> str:
    report = spmd.check(_Bound, torch.empty(2, 4), {"tp": 2}, in_types={"tp": spmd.S(1)})
    return "accepted" if report.ok else report.problems[0].message.partition(" at ")[0]


def _wrong_where_a_decision_is_false() -> str:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        if (comm.all_reduce(loss.detach(), "dp") / comm.size("dp")).item() < 3:
            reduce_gradients(model)
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 2), torch.empty(8, 4), {"dp": 2}, step=step)
    return "accepted" if report.ok else "refused"


def _square_of_a_maximum() -> str:
    with checked():
        try:
            typed(4, 8, tp=spmd.S(0)).amax().square()
        except spmd.SpmdTypeError:
            return "refused"
    return "accepted"


RULES = {
    "one rank's summand": Dropped(((judging, "as_share"),), _nothing, "norm_filter"),
    "claims of one rank": Dropped(((judging, "claim"),), _nothing, "norm_filter.all_counted"),
    "claims are compared": Dropped(((api, "compare_claims"),), lambda explored: [], "norm_filter.all_counted"),
    "functions bound before": Dropped(((captured, "install"), (captured, "remove")), _nothing, _bound_before_the_check),
    "both branches": Dropped(((Decisions, "decide"),), lambda self: True, _wrong_where_a_decision_is_false),
    "what stages share": Dropped(
        ((operators, "claim_stage"), (verbs, "claim_stage")), _nothing, "norm_over_stages.twice"
    ),
    "a sum with what stages share": Dropped(
        ((judge, "adds_what_stages_share"),), lambda *args: False, "norm_over_stages.twice"
    ),
    "parts that are no summands": Dropped(((judge, "part_of_whole"),), _nothing, "clipped_by_squared_norms"),
    "what maxima and norms go through": Dropped(
        ((judge, "other_partial"),), lambda *args: args[4][args[5][0]], _square_of_a_maximum
    ),
    "squares of norms": Dropped(
        ((judging, "_squared_axes"),), lambda rule, args, kwargs, operands: (operands, ()), "clipped_by_squared_norms"
    ),
    "what a step returns": Dropped(((played, "check_returned"),), _nothing, "accuracy.numerator"),
    "ways back": Dropped(((autograd, "check_ways_back"),), _nothing, "mapped_ring.gradient_goes_on"),
    "numbers that are read": Dropped(((played, "number_of"),), _nothing, "logs_the_loss"),
    "literal numbers": Dropped(
        ((axis_numbers, "_literal_factors"),), lambda *args: (), "learning_rate_by_a_literal.twice"
    ),
    "pieces picked by rank": Dropped(((rank_arguments, "_dealt"),), lambda *args: rank_arguments.V, "zigzag_attention"),
    "pieces put together": Dropped(((judge, "joined_pieces"),), _nothing, "zigzag_attention"),
    "pieces gathered": Dropped(
        ((operators, "gathered"), (verbs, "gathered")), lambda spmd_type, plain: plain, "zigzag_attention.rank_order"
    ),
}


@contextmanager
def dropped(rule: Dropped) -> Iterator[None]:
    """Drops a rule inside the context; what is known of calls and functions is forgotten, before and after."""
    with ExitStack() as stack:
        for owner, name in rule.places:
            stack.enter_context(mock.patch.object(owner, name, rule.by))
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for memo in _memos.values():
        memo.clear()
    autograd._flavours.clear()


def said(program: str | Callable[[], str]) -> tuple[str, int]:
    """The verdict on a program, and how many assumptions it rests on."""
    if callable(program):
        return program(), 0
    load()
    found = verdict.__wrapped__(program)
    return found.outcome, len(found.assumed)


if __name__ == "__main__":
    for rule_name, rule in RULES.items():
        verdicts = [said(rule.program)]
        with dropped(rule):
            verdicts.append(said(rule.program))
        print(f"{rule_name:35} {getattr(rule.program, '__name__', rule.program):45} {verdicts}", flush=True)
