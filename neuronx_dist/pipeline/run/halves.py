"""A backward in two halves, by autograd: the gradients of a stage's inputs now, those of its parameters later.

    root ── n3 ─── n2 ─── n1 ─── input       input half: the engine runs n3, n2 and n1, for the line to the input
            │      │      │                  weight half: each is run again, for what leaves the line,
            w3     T ─ w2  w1                and then what lies below (T), down to the parameters

A node computes only those of its results that are asked for: a linear layer's is run twice, one product each time.
In the input half a hook keeps the gradients that arrive at a node that branches, after all hooks of users; in the
weight half the node is called with them directly, where no hook runs again and no gradient goes on along the line.

A custom `torch.autograd.Function` computes what its author wrote. With the attribute `splits_backward = True` it
promises to compute only what `ctx.needs_input_grad` asks for, which is set for each half; `ctx.in_halves` is True then,
and the first half may leave on `ctx` what the second needs, too. The second has zeros for an output without a gradient,
even after `ctx.set_materialize_grads(False)`, which torch lets nobody read. Any other function is run once, in the
input half, and the gradients that it made for parameters are kept until the weight half. What `torch.compile` made lets
nobody keep the graph: a graph that has some of it is not divided, and its whole backward is the input half.

What only the input half needs is freed when it is over: saved tensors of the nodes on the line that do not branch.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), which names the halves B and W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from .line import Branch, below, follow, is_custom
from .recomputation import keep_for_later, keep_no_more

__all__ = ["WeightHalf", "divide"]

_MOST_DUE = 64 << 20  # bytes of gradients that a weight half has at one time, before parameters have them

_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad")  # noqa: B009  # its stubs lack it
Grads = Sequence[torch.Tensor | None]


class WeightHalf:
    """The half of a backward that is to come: gradients of parameters. It is run once.

    Attributes:
        once: names of the nodes that could not be divided: all of their work was done in the input half.
    """

    def __init__(self, once: Sequence[str] = (), roots: Sequence[GradientEdge] = (), in_one: bool = False) -> None:
        self.once = once
        self._roots = roots  # they own the graph: custom functions do not own their node
        self._in_one = in_one  # whether gradients are accumulated at the end, each parameter's once
        self._calls: deque[tuple[Branch, Grads]] = deque()
        self._due: deque[tuple[GradientEdge, torch.Tensor]] = deque()
        self._due_bytes = 0

    def call(self, branch: Branch, grads: Grads) -> None:
        """Has a node run in this half, with the gradients that arrived at it."""
        self._calls.append((branch, grads))

    def give(self, edges: Sequence[tuple[int, GradientEdge]], results: Grads) -> None:
        """Takes what a node made for the edges that leave the line."""
        for index, edge in edges:
            grad = results[index]
            if grad is not None:
                self._due.append((edge, grad))
                self._due_bytes += grad.nbytes

    def run(self) -> None:
        """Adds the gradients to those of the parameters, as a backward does, with all their hooks."""
        with torch.enable_grad():
            if self._calls:
                edges = list(dict.fromkeys(edge for branch, _ in self._calls for _, edge in branch.edges))
                start = torch.zeros((), requires_grad=True)
                # The engine's record of what it is asked for, these edges, is what nodes look into.
                asked_for: list[Any] = [start, *edges]
                torch.autograd.grad(_Calling.apply(start, self._call), asked_for, allow_unused=True)
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
            if type(edge.node) is _AccumulateGrad:
                params.append(_param(edge))
                param_grads.append(grad)
            else:
                shape = edge.node._input_metadata[edge.output_nr].shape
                roots.append(edge)
                root_grads.append(grad if grad.shape == shape else grad.sum_to_size(shape))
        if params:
            del grad
            # What a node returns becomes a parameter's gradient as it is; what comes from here would be copied.
            with torch.enable_grad():
                roots.append(_Giving.apply(param_grads, *params))
            root_grads.append(None)
        if roots:
            torch.autograd.backward(roots, root_grads)


class _Calling(torch.autograd.Function):
    """Calls `work` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return grad, None


class _Giving(torch.autograd.Function):
    """Gives parameters their gradients in backward, and empties the list of them."""

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
    """The gradients of `inputs`, and the other half of the backward.

    Args:
        roots, root_grads: where backward starts, and with which gradients; None of a scalar: 1.
        inputs: where the input half ends. Nothing above an input may lead to it but through the edges given here.
        recomputes: the graph has tensors that activation checkpointing recomputes.

    Returns:
        `(grads, weight_half)`: None for an input that no root depends on.
    """
    line = follow([root.node for root in roots], {edge.node for edge in inputs})
    if line.compiled:
        torch.autograd.backward(roots, root_grads)
        params = [_param(edge) if type(edge.node) is _AccumulateGrad else None for edge in inputs]
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
        # Late, since the layers above have been recomputed then, one after the other.
        for node in [*line.others, *(branch.node for branch in line.branches)][-1:]:
            node.register_prehook(partial(_keep_saved, rerun, -1))
    for index, branch in enumerate(line.branches):
        if recomputes:
            branch.node.register_prehook(partial(_keep_saved, rerun, index))
            if type(branch.node).__name__ == "CopySlices":  # a write through a view: what it saved is in a node inside
                branch.node.register_prehook(keep_for_later)
                branch.node.register_hook(keep_no_more)
        if branch.once:
            branch.node.register_hook(partial(_keep_results, results, index))
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
        rerun.clear()  # hooks have the list: a node that its own hook holds would never be freed
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
    """Says to a custom function which gradients are due: of the edges that leave the line, or of the others."""
    node = branch.node
    if not is_custom(node):
        return  # torch's own look into what the engine was asked for
    due = {index for index, _ in branch.edges}
    indices = iter([index for index, (child, _) in enumerate(node.next_functions) if child is not None])
    node.needs_input_grad = tuple([needs and (next(indices) in due) is leaving for needs in _needs(node)])


def _needs(node: Any) -> tuple[bool, ...]:
    """Which arguments of a custom function require a gradient."""
    needs = getattr(node, "_needs_input_grad", None)
    if needs is None:
        needs = node._needs_input_grad = node.needs_input_grad
        node.in_halves = True
    return needs


def _called(branch: Branch, grads: Grads) -> Grads:
    """The results of a node for the edges that leave the line; inside of an engine run that asks for these."""
    node = branch.node
    if not is_custom(node):
        return node(*grads)
    _ask(branch, True)
    results = node.apply(*[_zeros(node, i) if grad is None else grad for i, grad in enumerate(grads)])
    due = [result for result, needs in zip(results, _needs(node)) if needs]
    by_edge = iter(due)
    return [None if child is None else next(by_edge) for child, _ in node.next_functions]


def _keep_results(kept: dict[int, Grads], index: int, results: Grads, _: Grads) -> None:
    kept[index] = results


def _keep_saved(rerun: Sequence[Sequence[Any]], index: int, _: Grads) -> None:
    """Keeps what activation checkpointing recomputes for a branch, and for what lies below it, until the other half."""
    keep_for_later()
    try:
        for node in rerun[index]:
            node_class: Any = type(node)
            for name in _saved_names(node_class):
                getattr(node, name)
    finally:
        keep_no_more()


# --- what nodes have saved


def _param(edge: GradientEdge) -> torch.Tensor:
    accumulator: Any = edge.node
    return accumulator.variable


def _zeros(node: Any, index: int) -> torch.Tensor:
    data = node._input_metadata[index]
    return torch.zeros(data.shape, dtype=data.dtype, device=data.device)


def _one(root: GradientEdge) -> torch.Tensor:
    data = root.node._input_metadata[root.output_nr]
    return torch.ones(data.shape, dtype=data.dtype, device=data.device)


@cache
def _raw_names(node_class: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))


@cache
def _saved_names(node_class: Any) -> tuple[str, ...]:
    if issubclass(node_class, torch._C._FunctionBase):
        return ("saved_tensors",)
    return tuple(name.replace("_raw", "") for name in _raw_names(node_class))


def _free(node: Any) -> None:
    """Frees the tensors that a node has saved: the engine does, where it is not told to keep the graph."""
    node_class: Any = type(node)
    for name in _raw_names(node_class):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            with suppress(RuntimeError):  # it is None, or has hooks already: then it is what these made of it
                each.register_hooks(_forget, _freed)


def _forget(_: torch.Tensor) -> None:
    return None


def _freed(_: None) -> torch.Tensor:
    raise RuntimeError("this part of the graph was freed after the first half of its backward")
