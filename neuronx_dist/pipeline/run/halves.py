"""A backward in two halves, by autograd: the gradients of a stage's inputs now, those of its parameters later.

The two halves are those that Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), call B and W; schedules
here call them I and W. torch has no such backward; this page explains how it is built on autograd. The mechanism lies
in this file, line.py and recomputation.py alone, and the executor calls `divide` and `WeightHalf` alone.

The line. A stage's graph leads from its outputs (the roots) to its inputs and to its parameters. The *line* is the set
of nodes on a way from a root to an input (line.py). A node of the line with an edge that leaves it is a *branch*:

    root ── n3 ─── n2 ─── n1 ─── input       the line: n3, n2, n1
            │      │      │
            w3     T ─ w2  w1                 edges that leave it: to w3, T and w1

Input half (`divide`). `torch.autograd.grad(roots, inputs, retain_graph=True)` makes the engine run the line alone, and
a node computes only the results that the engine asks for: a linear layer computes its input gradient, not its weight
gradient. A prehook, which runs after all hooks of users, keeps the gradients that arrive at each branch.

Weight half (`WeightHalf.run`). Each branch is called again with the gradients that were saved: `node(*grads)`. Which
results it computes it looks up in the engine's record of what was asked for, so the calls happen inside of another
engine run, `torch.autograd.grad(start, [start, *edges])`, whose only node, `_CallInBackward`, makes them. No hook
runs again, and no gradient goes on along the line. The results lie at edges such as those to w3, T and w1; one ordinary
backward from there (`_accumulate`) runs what lies below (T) and adds to the gradients of parameters, with all their
hooks. For gradients of parameters that are complete already, `_DeliverWeightGradients` is a node whose backward returns
them: autograd takes over a gradient that a node returns, and copies one that is passed in from outside.

No product and no collective is done twice, no hook runs twice, and gradients equal those of a whole backward bit for
bit, but for the order in which those of three or more uses of a parameter are added.

The first stage receives nothing with a gradient. Its line ends at the first activations, such as the output of the
embedding, so that its halves are balanced too; the gradient of the embedding belongs to the weight half. Under the type
checker the input half is the whole backward, so that types are judged in one place.

Custom functions (`torch.autograd.Function`) run the author's code, which computes all gradients. With the attribute
`splits_backward = True` a class promises to compute only what `ctx.needs_input_grad` asks for; it is set for each half
(`_ask`), `ctx.in_halves` is True, and the first half may leave on `ctx` what the second half needs. In the second half
an output without a gradient gets zeros, even after `ctx.set_materialize_grads(False)`, a setting that torch does not
let anybody read. Any other function runs once, in the input half (`Branch.once`), and its gradients of parameters are
kept until the weight half. Code that `torch.compile` made does not allow to keep the graph: a graph with any of it is
not divided, and its whole backward is the input half. The stage warns of both once, by name.

Memory. After the input half, nodes on the line that do not branch are not needed any more. The engine runs with
`retain_graph`, so their saved tensors are freed here (`_free`): hooks on a saved tensor replace it, these ones by None.
Activation checkpoints recompute in the input half; tensors that the weight half needs are stored (recomputation.py).

`torch_internals/autograd.py` holds the private parts of torch: saved tensors, metadata and flags of a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ...torch_internals.autograd import (
    AccumulateGrad,
    FunctionNode,
    input_metadata,
    raw_saved_names,
    set_needs_input_grad,
)
from ...torch_internals.versions import warn_if_untested
from .line import Branch, below, follow, is_custom
from .recomputation import keep_for_later, keep_no_more

__all__ = ["WeightHalf", "divide"]

_MOST_DUE = 64 << 20  # bytes of gradients that a weight half has at one time, before parameters have them

Grads = Sequence[torch.Tensor | None]


class WeightHalf:
    """The second half of a backward: gradients of parameters. It runs once.

    Attributes:
        once: names of the nodes that could not be divided: all their work was done in the input half.
    """

    def __init__(self, once: Sequence[str] = (), roots: Sequence[GradientEdge] = (), in_one: bool = False) -> None:
        self.once = once
        self._roots = roots  # roots own the graph: custom functions do not own their node
        self._in_one = in_one  # gradients are accumulated once, at the end
        self._calls: deque[tuple[Branch, Grads]] = deque()
        self._due: deque[tuple[GradientEdge, torch.Tensor]] = deque()
        self._due_bytes = 0

    def call(self, branch: Branch, grads: Grads) -> None:
        """Schedules a node for this half, with the gradients that arrived at it."""
        self._calls.append((branch, grads))

    def give(self, edges: Sequence[tuple[int, GradientEdge]], results: Grads) -> None:
        """Accepts the results of a node for the edges that leave the line."""
        for index, edge in edges:
            grad = results[index]
            if grad is not None:
                self._due.append((edge, grad))
                self._due_bytes += grad.nbytes

    def run(self) -> None:
        """Adds to the gradients of parameters, as a backward does, with all their hooks."""
        with torch.enable_grad():
            if self._calls:
                edges = list(dict.fromkeys(edge for branch, _ in self._calls for _, edge in branch.edges))
                start = torch.zeros((), requires_grad=True)
                # Nodes look up in the engine's record which of these edges are asked for.
                asked_for: list[Any] = [start, *edges]
                torch.autograd.grad(_CallInBackward.apply(start, self._call), asked_for, allow_unused=True)
            self._accumulate()
        self._roots = ()

    def _call(self) -> None:
        while self._calls:
            branch, grads = self._calls.popleft()
            self.give(branch.edges, _called(branch, grads))
            if self._due_bytes > _MOST_DUE and not self._in_one:
                self._accumulate()

    def _accumulate(self) -> None:
        due, self._due, self._due_bytes = self._due, deque(), 0
        roots: list[Any] = []
        root_grads: list[torch.Tensor | None] = []
        params: list[torch.Tensor] = []
        param_grads: list[torch.Tensor] = []
        while due:
            edge, grad = due.popleft()
            if type(edge.node) is AccumulateGrad:
                params.append(_param(edge))
                param_grads.append(grad)
            else:
                shape = input_metadata(edge.node)[edge.output_nr].shape
                roots.append(edge)
                root_grads.append(grad if grad.shape == shape else grad.sum_to_size(shape))
        if params:
            del grad
            # Autograd takes over a gradient that a node returns, and copies one that is passed in.
            with torch.enable_grad():
                roots.append(_DeliverWeightGradients.apply(param_grads, *params))
            root_grads.append(None)
        if roots:
            torch.autograd.backward(roots, root_grads)


class _CallInBackward(torch.autograd.Function):
    """Calls `work` in backward, inside of the engine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return grad, None


class _DeliverWeightGradients(torch.autograd.Function):
    """Returns gradients of parameters in backward, and empties the list of them."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)  # real, whatever parameters are: backward starts there

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        result = (None, *ctx.grads)
        ctx.grads.clear()
        return result


def divide(
    roots: Sequence[GradientEdge],
    root_grads: Grads,
    inputs: Sequence[GradientEdge],
    recomputes: bool = False,
) -> tuple[list[torch.Tensor | None], WeightHalf]:
    """Computes the gradients of `inputs` (the input half), and prepares the weight half.

    Args:
        roots, root_grads: edges where backward starts, and their gradients; None: 1, of a scalar.
        inputs: edges where the input half ends. No node above may lead to an input through another edge.
        recomputes: the graph has tensors that activation checkpointing recomputes.

    Returns:
        `(grads, weight_half)`: None for an input that no root depends on.
    """
    warn_if_untested("a backward pass in two halves")
    line = follow([root.node for root in roots], {edge.node for edge in inputs})
    if line.compiled:
        torch.autograd.backward(roots, root_grads)
        params = [_param(edge) if type(edge.node) is AccumulateGrad else None for edge in inputs]
        return [None if param is None else param.grad for param in params], WeightHalf(line.compiled)
    half = WeightHalf([branch.node.name() for branch in line.branches if branch.once], roots, line.shares)
    for index in line.beside:
        grad = root_grads[index]
        half.give([(0, roots[index])], [_one(roots[index]) if grad is None else grad])
    on_line = [index for index in range(len(roots)) if index not in line.beside]
    if not on_line:
        return [None] * len(inputs), half
    arrived: dict[int, Grads] = {}
    results: dict[int, Grads] = {}
    rerun: list[list[Any]] = []
    if recomputes:
        seen: set[Node] = set()
        leaving = [[edge.node for _, edge in branch.edges] for branch in line.branches]
        rerun += [below(nodes, seen) + [b.node] * (not b.once) for nodes, b in zip(leaving, line.branches)]
        rerun.append(below([roots[index].node for index in line.beside], seen))
        # In the last node of the line: by then the layers above have been recomputed, one after the other.
        for node in [*line.others, *(branch.node for branch in line.branches)][-1:]:
            node.register_prehook(partial(_keep_saved, rerun, -1))
    for index, branch in enumerate(line.branches):
        if recomputes:
            branch.node.register_prehook(partial(_keep_saved, rerun, index))
            if type(branch.node).__name__ == "CopySlices":  # a write through a view: what it saved is in a node inside
                branch.node.register_prehook(keep_for_later)
                branch.node.register_hook(keep_no_more)
        if branch.once:
            branch.node.register_hook(partial(_store_results, results, index))
        else:
            _ask(branch, False)
            branch.node.register_prehook(partial(arrived.__setitem__, index))
    try:
        grads = torch.autograd.grad(
            [roots[index] for index in on_line],
            inputs,
            [root_grads[index] for index in on_line],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        rerun.clear()  # hooks hold the list: a node held by its own hook would never be freed
        keep_no_more()
    for node in line.others:
        _free(node)
    for index, branch in enumerate(line.branches):
        if branch.once:
            half.give(branch.edges, results.pop(index))
            _free(branch.node)
        else:
            half.call(branch, arrived.pop(index))
    return list(grads), half


# --- running a node


def _ask(branch: Branch, leaving: bool) -> None:
    """Sets `needs_input_grad` of a custom function to the edges that leave the line, or to the remaining ones."""
    node = branch.node
    if not is_custom(node):
        return  # a built-in node asks the engine
    due = {index for index, _ in branch.edges}
    indices = iter([index for index, (child, _) in enumerate(node.next_functions) if child is not None])
    set_needs_input_grad(node, tuple([needs and (next(indices) in due) is leaving for needs in _needs(node)]))


def _needs(node: Any) -> tuple[bool, ...]:
    """For each argument of a custom function, whether it requires a gradient."""
    needs = getattr(node, "_needs_input_grad", None)
    if needs is None:
        needs = node._needs_input_grad = node.needs_input_grad
        node.in_halves = True
    return needs


def _called(branch: Branch, grads: Grads) -> Grads:
    """Runs a branch node's backward again, and returns its gradients for the edges that leave the line."""
    node = branch.node
    if not is_custom(node):
        return node(*grads)
    _ask(branch, True)
    results = node.apply(*[_zeros(node, i) if grad is None else grad for i, grad in enumerate(grads)])
    due = [result for result, needs in zip(results, _needs(node)) if needs]
    by_edge = iter(due)
    return [None if child is None else next(by_edge) for child, _ in node.next_functions]


def _store_results(by_branch: dict[int, Grads], index: int, results: Grads, _: Grads) -> None:
    by_branch[index] = results


def _keep_saved(rerun: Sequence[Sequence[Any]], index: int, _: Grads) -> None:
    """Keeps recomputed tensors of a branch, and of the nodes below it, until the other half."""
    keep_for_later()
    try:
        for node in rerun[index]:
            node_class: Any = type(node)
            for name in _saved_names(node_class):
                getattr(node, name)
    finally:
        keep_no_more()


# --- tensors that nodes have saved


def _param(edge: GradientEdge) -> torch.Tensor:
    accumulator: Any = edge.node
    return accumulator.variable


def _zeros(node: Any, index: int) -> torch.Tensor:
    data = input_metadata(node)[index]
    return torch.zeros(data.shape, dtype=data.dtype, device=data.device)


def _one(root: GradientEdge) -> torch.Tensor:
    data = input_metadata(root.node)[root.output_nr]
    return torch.ones(data.shape, dtype=data.dtype, device=data.device)


_raw_names = cache(raw_saved_names)


@cache
def _saved_names(node_class: Any) -> tuple[str, ...]:
    if issubclass(node_class, FunctionNode):
        return ("saved_tensors",)
    return tuple(name.replace("_raw", "") for name in _raw_names(node_class))


def _free(node: Any) -> None:
    """Frees the tensors that a node has saved, as the engine does without `retain_graph`."""
    node_class: Any = type(node)
    for name in _raw_names(node_class):
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, (tuple, list)) else (saved,):
            with suppress(RuntimeError):  # it is None, or has hooks already, which hold what they made of it
                tensor.register_hooks(_forget, _freed)


def _forget(_: torch.Tensor) -> None:
    return None


def _freed(_: None) -> torch.Tensor:
    raise RuntimeError("this part of the graph was freed after the first half of its backward")
