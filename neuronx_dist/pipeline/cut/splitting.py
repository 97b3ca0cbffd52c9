"""Splitting a recording into what each stage runs.

    cuts ["layers.1"] of 4 layers:   stage 0: embedding, layers.0, layers.1   stage 1: layers.2, layers.3, norm, head

A cut is the name of the last layer of a stage. Calls between two cuts, in recorded order, belong to the stage between
them. Values that a later stage needs go from hop to hop through the stages between, with their gradients. What depends
on the model's inputs alone (masks, position ids, rotary cos and sin) is not sent: each stage that needs it computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...program.recording import Recording, TensorSpec, TracingError, info_of
from .cuts import check_cuts

__all__ = ["StagePlan", "split"]

_PACKAGE = __name__.split(".")[0]


@dataclass
class StagePlan:
    """The calls that one stage runs for each microbatch.

    Attributes:
        nodes: calls of the stage, in recorded order; values of earlier stages are in `received`, inputs are
            placeholders.
        received: values that the stage before sends, in order.
        copied: received values and inputs that this stage changes in place.
        sent: values that the next stage receives, in order.
        outputs: leaves of the model's result (nodes and constants) that this stage, the last, returns.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    received: list[fx.Node] = field(default_factory=list)
    copied: set[fx.Node] = field(default_factory=set)
    sent: list[fx.Node] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    @property
    def received_specs(self) -> list[TensorSpec]:
        """Shapes, dtypes and `requires_grad` of `received`."""
        return [_spec(node) for node in self.received]

    @property
    def sent_specs(self) -> list[TensorSpec]:
        """Shapes, dtypes and `requires_grad` of `sent`."""
        return [_spec(node) for node in self.sent]


def split(recording: Recording, cuts: Sequence[str], outputs: Sequence[Any] | None = None) -> list[StagePlan]:
    """Returns one plan per stage.

    Args:
        cuts: names of the last layers of all stages but the last.
        outputs: the leaves of the result that are wanted; None: all.

    Raises:
        ValueError: a cut is not a layer that was called, or leaves a stage with nothing to do.
        TracingError: a tensor is changed in place in another stage than one that shares its memory.
    """
    return _Splitter(recording, cuts, recording.outputs if outputs is None else outputs).plans()


class _Splitter:
    """Assigns nodes to stages: a *bound* node by its place in the order, a *free* one wherever its value is needed.

    A node that shares memory with what a bound node changes is bound too, so a free value is the same on every stage.
    """

    def __init__(self, recording: Recording, cuts: Sequence[str], outputs: Sequence[Any]) -> None:
        self.nodes = [node for node in recording.graph.nodes if node.op != "output"]
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.outputs = list(outputs)
        self.num_stages = len(cuts) + 1
        last_calls = recording.last_calls()
        check_cuts(cuts, list(last_calls), self.num_stages, "that the forward calls, for inputs like these")
        self.ends = [self.order[last_calls[cut]] for cut in cuts]
        self.attributes = {info_of(node).storage for node in self.nodes if node.op == "get_attr"}
        self.attributes.update(*(info_of(node).buffers for node in self.nodes))
        self.stage: dict[fx.Node, int] = {}  # of bound nodes
        self._bind_all()
        self._check_every_stage_runs(cuts)
        self.computed: list[set[fx.Node]] = [set() for _ in range(self.num_stages)]
        self.crossing: list[set[fx.Node]] = [set() for _ in range(self.num_stages)]  # from this stage to the next

    def plans(self) -> list[StagePlan]:
        self._check_attributes()
        for node, stage in self.stage.items():
            self._compute(node, stage)
        for leaf in self.outputs:
            if isinstance(leaf, fx.Node):
                self._require(leaf, self.num_stages - 1, {node for node in self.nodes if info_of(node).writes})
        plans = []
        for stage in range(self.num_stages):
            received = self._sorted(self.crossing[stage - 1]) if stage else []
            nodes = self._sorted(self.computed[stage])
            self._check_aliases(received, stage)
            changed = set().union(*(info_of(node).writes for node in nodes))
            arriving = received + [node for node in nodes if node.op == "placeholder"]
            plans.append(
                StagePlan(
                    nodes=nodes,
                    received=received,
                    copied={node for node in arriving if info_of(node).storage in changed},
                    sent=self._sorted(self.crossing[stage]),
                    outputs=self.outputs if stage == self.num_stages - 1 else [],
                )
            )
        return plans

    # --- binding nodes to stages

    def _bind_all(self) -> None:
        changed: set[int] = set()  # memory that bound nodes change
        wholes: set[fx.Node] = set()  # calls of which a part of the result shares that memory
        while True:
            self.stage = {}
            for index, node in enumerate(self.nodes):
                info = info_of(node)
                if info.kind == "part":
                    source = node.all_input_nodes[0]
                    if source in self.stage:
                        self.stage[node] = self.stage[source]
                elif info.kind != "pack" and (
                    node in wholes or {info.storage, *info.buffers} & changed or not self._is_free(node)
                ):
                    self.stage[node] = sum(index > end for end in self.ends)
            changed_now = set().union(*(info_of(node).writes for node in self.stage))
            parts = (n for n in self.nodes if info_of(n).kind == "part" and info_of(n).storage in changed_now)
            wholes_now = {self._whole(node) for node in parts}
            if changed_now == changed and wholes_now == wholes:
                return
            changed, wholes = changed_now, wholes_now

    def _is_free(self, node: fx.Node) -> bool:
        """Returns whether a node has no parameter, no randomness and no lasting effect, nor depends on one that has."""
        info = info_of(node)
        if info.kind not in ("function", "module"):
            return info.kind in ("input", "buffer", "constant")
        if info.kind == "module" and not info.repeatable:
            return False
        owner = getattr(node.target, "__module__", None) or ""
        return not (
            info.random
            or (info.spec is not None and info.spec.requires_grad)
            or info.writes & self.attributes
            or owner.split(".")[0] == _PACKAGE  # a collective is issued once
            or not (info.spec or info.writes or node.users)  # it is called for its effect
            or any(self._is_bound(other) for other in (*node.all_input_nodes, *info.after))
        )

    def _is_bound(self, node: fx.Node) -> bool:
        if info_of(node).kind == "pack":
            return any(self._is_bound(argument) for argument in node.all_input_nodes)
        return node in self.stage

    def _whole(self, node: fx.Node) -> fx.Node:
        while info_of(node).kind == "part":
            node = node.all_input_nodes[0]
        return node

    # --- computing values where they are needed

    def _compute(self, node: fx.Node, stage: int) -> None:
        """Makes `stage` compute `node`."""
        if node in self.computed[stage]:
            return
        self.computed[stage].add(node)
        for argument in node.all_input_nodes:
            self._require(argument, stage, info_of(node).after)

    def _require(self, node: fx.Node, stage: int, after: Iterable[fx.Node]) -> None:
        """Makes the value of `node`, as it is after the calls `after`, available on `stage`."""
        info = info_of(node)
        if info.kind == "pack":
            self.computed[stage].add(node)
            for argument in node.all_input_nodes:
                self._require(argument, stage, after)
        elif info.kind == "parameter":  # every stage that uses it has it
            self.computed[stage].add(node)
        elif node in self.stage:
            for boundary in range(self.stage[node], stage):
                self.crossing[boundary].add(node)
        else:
            self._compute(node, stage)
            for writer in after:
                if info.storage in info_of(writer).writes:
                    self._compute(writer, stage)

    # --- refusing what cannot be cut

    def _check_every_stage_runs(self, cuts: Sequence[str]) -> None:
        busy = set(self.stage.values())
        for stage in range(self.num_stages):
            if stage not in busy:
                between = " and ".join(repr(cut) for cut in cuts[max(0, stage - 1) : stage + 1])
                side = "between cuts" if 0 < stage < len(cuts) else "after cut" if stage else "before cut"
                raise ValueError(
                    f"pipeline stage {stage} of {self.num_stages} is empty: the forward calls nothing {side} "
                    f"{between} that depends on parameters. Move the cut."
                )

    def _check_aliases(self, received: Sequence[fx.Node], stage: int) -> None:
        written = set().union(*(info_of(node).writes for node, where in self.stage.items() if where >= stage))
        seen: dict[int, fx.Node] = {}
        for node in received:
            storage = info_of(node).storage
            assert storage is not None  # only tensors are sent
            if storage in seen and storage in written:
                raise TracingError(
                    f"{info_of(node).where}: {seen[storage]} and {node} share memory, both are sent to pipeline "
                    f"stage {stage}, and this memory is modified in place afterwards. Sent tensors do not share "
                    "memory: use an out-of-place operation, or move the cut."
                )
            seen[storage] = node

    def _check_attributes(self) -> None:
        """Refuses a buffer that one stage changes and another one reads: the reader's copy would be out of date."""
        writers: dict[int | None, set[int]] = {}
        users: dict[int | None, set[int]] = {}
        for node, stage in self.stage.items():
            for storage in info_of(node).writes:
                writers.setdefault(storage, set()).add(stage)
            for storage in info_of(node).buffers:
                users.setdefault(storage, set()).add(stage)
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and info_of(argument).kind != "parameter":
                    users.setdefault(info_of(argument).storage, set()).add(stage)
        for node in self.nodes:
            for memory in [info_of(node).storage, *info_of(node).buffers]:
                stages = users.get(memory, set()) | writers.get(memory, set())
                if memory in users and memory in writers and len(stages) > 1:
                    what = f"{node.target}" if node.op == "get_attr" else f"a buffer of {node.target}"
                    raise TracingError(
                        f"{info_of(node).where}: {what} is modified on pipeline stage {max(writers[memory])} and "
                        f"used on stages {sorted(stages)}, but each stage has a separate copy. Move the cut, or use "
                        "it within one layer."
                    )

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)


def _spec(node: fx.Node) -> TensorSpec:
    spec = info_of(node).spec
    assert spec is not None  # only tensors cross a boundary
    return spec
