"""Cutting a model into stages: where its parameters are, by the names of layers, and where each recorded call runs.

    cuts ["layers.1"] of 4 layers:   stage 0: embedding, layers.0, layers.1   stage 1: layers.2, layers.3, norm, head

A cut is the name of the last layer of a stage. Calls between two cuts, in recorded order, belong to the stage between
them. Values that a later stage needs go from hop to hop through the stages between, with their gradients. What depends
on the model's inputs alone (masks, position ids, rotary cos and sin) is not sent: each stage that needs it computes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ...model_shape import stage_layers
from ..record.recording import Info, Recording, TensorSpec, TracingError, is_leaf

__all__ = [
    "Placement",
    "StagePlan",
    "check_cuts",
    "check_placement",
    "create_partitions",
    "leaf_names",
    "nearest",
    "place_by_recording",
    "place_by_registration",
    "split",
]

_PACKAGE = __name__.split(".")[0]


def create_partitions(pipeline_parallel_size: int, model_layer_names: Sequence[str]) -> list[str]:
    """The cuts that divide layers evenly: `floor(layers / stages)` each, and one more for each of the last stages.

    >>> create_partitions(4, [f"layers.{i}" for i in range(19)])
    ['layers.3', 'layers.8', 'layers.13']

    Raises:
        ValueError: there is no stage, or there are fewer layers than stages.
    """
    stages, layers = pipeline_parallel_size, len(model_layer_names)
    if stages < 1:
        raise ValueError(f"pipeline_parallel_size must be at least 1, got {stages}")
    if layers < stages:
        raise ValueError(
            f"auto_partition: {stages} pipeline stages need at least {stages} transformer layers, found {layers}: use "
            f"a pipeline_model_parallel_size of at most {max(1, layers)}, or check transformer_layer_cls"
        )
    return [model_layer_names[of_stage.stop - 1] for of_stage in stage_layers(layers, stages)[:-1]]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The most similar of these names, for a message; some of all if none is similar."""
    known = list(dict.fromkeys(candidates))
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.3)
    return ", ".join([by_lower[each] for each in near] or known[:4])


def check_cuts(cuts: Sequence[str], names: Sequence[str], num_stages: int, which: str = "of this model") -> None:
    """Checks cuts against the leaf layers of a model, in the order in which they run.

    Args:
        which: which layers `names` are, for a message.

    Raises:
        ValueError: a wrong number of cuts, a name that is no layer (the message lists near ones), or a wrong order.
    """
    if len(cuts) != num_stages - 1:
        raise ValueError(
            f"{num_stages} pipeline stages need {num_stages - 1} cuts, got {len(cuts)}: {list(cuts)}. A cut is the "
            f"name of the last layer of a stage; the last stage needs none."
        )
    for cut in cuts:
        if cut not in names:
            raise ValueError(
                f"pipeline cut {cut!r} is not a layer {which}; near it: {nearest(cut, names)}. A cut is a transformer "
                "layer or, outside of those, a layer with parameters"
            )
    positions = [names.index(cut) for cut in cuts]
    if positions != sorted(set(positions)):
        raise ValueError(f"pipeline cuts must be different layers, in the order in which they run; got {list(cuts)}")


def leaf_names(module: nn.Module, leaf_classes: Sequence[type]) -> list[str]:
    """Names of the leaf layers, in the order in which they are registered. A module with two names is listed twice."""
    names: list[str] = []

    def walk(parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():
            if child is not None:
                path = f"{prefix}.{name}" if prefix else name
                if is_leaf(child, leaf_classes):
                    names.append(path)
                else:
                    walk(child, path)

    walk(module, "")
    return names


@dataclass(frozen=True)
class Placement:
    """Which stages hold which tensors of the model.

    Attributes:
        leaves: stages of each leaf layer with parameters, by name; more than one if several stages call it.
        direct: stages of each parameter that no leaf layer holds, by name.
    """

    leaves: dict[str, frozenset[int]]
    direct: dict[str, frozenset[int]]

    def on_stages(self, holders: Sequence[int]) -> Placement:
        """This placement of pieces of the model, as one of the stages that hold them: `holders[piece]`."""
        leaves, direct = (
            {name: frozenset(holders[piece] for piece in pieces) for name, pieces in table.items()}
            for table in (self.leaves, self.direct)
        )
        return Placement(leaves, direct)

    def stages(self, name: str) -> frozenset[int] | None:
        """Stages of a parameter, buffer or module; None: of all (what no leaf layer with parameters holds)."""
        if name in self.direct:
            return self.direct[name]
        path = name
        while path:
            if path in self.leaves:
                return self.leaves[path]
            path = path.rpartition(".")[0]
        return None


def place_by_registration(module: nn.Module, cuts: Sequence[str], leaf_classes: Sequence[type]) -> Placement:
    """Where everything is if layers run in the order in which they are registered; this needs no inputs.

    Parameters of containers (a learned position embedding on the model itself) are on stage 0.
    """
    leaves: dict[str, frozenset[int]] = {}
    stage = 0
    for leaf in leaf_names(module, leaf_classes):
        if _has_parameters(module, leaf):
            leaves[leaf] = frozenset([stage])
        if stage < len(cuts) and leaf == cuts[stage]:
            stage += 1
    return Placement(leaves, _direct(module, leaves, {}))


def place_by_recording(module: nn.Module, plans: Sequence[StagePlan], leaf_classes: Sequence[type]) -> Placement:
    """Where everything is used. What is not used is on stage 0."""
    called: dict[int, set[int]] = {}  # by id of the module, which may have several names
    read: dict[str, set[int]] = {}
    for stage, plan in enumerate(plans):
        for node in plan.nodes:
            if node.op == "call_module":
                called.setdefault(id(module.get_submodule(str(node.target))), set()).add(stage)
            elif _info(node).kind == "parameter":
                read.setdefault(str(node.target), set()).add(stage)
    names = [name for name in leaf_names(module, leaf_classes) if _has_parameters(module, name)]
    leaves = {name: frozenset(called.get(id(module.get_submodule(name)), {0})) for name in names}
    for name, stages in read.items():  # the parameter of a layer, used outside it too
        leaf = next((leaf for leaf in names if name.startswith(f"{leaf}.")), None)
        if leaf is not None:
            others = called.get(id(module.get_submodule(leaf)), set())
            leaves[leaf] = frozenset(stages | others)
    return Placement(leaves, _direct(module, leaves, read))


def _has_parameters(module: nn.Module, name: str) -> bool:
    return next(module.get_submodule(name).parameters(), None) is not None


def _direct(
    module: nn.Module, leaves: dict[str, frozenset[int]], read: dict[str, set[int]]
) -> dict[str, frozenset[int]]:
    inside = Placement(leaves, {})
    names = [name for name, _ in module.named_parameters(remove_duplicate=False) if inside.stages(name) is None]
    return {name: frozenset(read.get(name, {0})) for name in names}


def check_placement(placement: Placement, plans: Sequence[StagePlan], holders: Sequence[int]) -> None:
    """Checks that each stage has what it runs.

    Args:
        plans, holders: of each piece of the model, and the stage that holds it.

    Raises:
        ValueError: layers do not run in the order in which they are registered, by which they were placed.
    """
    for stage, plan in zip(holders, plans):
        for node in plan.nodes:
            if node.op == "call_module" or _info(node).kind == "parameter":
                placed = placement.stages(str(node.target))
                if placed is not None and stage not in placed:
                    raise ValueError(
                        f"{node.target} ({_info(node).where}) is used by pipeline stage {stage}, but its parameters "
                        f"were placed on stage {', '.join(map(str, sorted(placed)))}, by the order in which the model "
                        f"registers its layers. Register them in the order in which they run, or show how they run "
                        f"before partition(): call trace(kwargs={{...example inputs...}})."
                    )


# --- splitting a recording --------------------------------------------------------------------------------------------


@dataclass
class StagePlan:
    """What one stage runs, for each microbatch.

    Attributes:
        nodes: its calls, in recorded order; values of earlier stages are in `received`, inputs are placeholders.
        received: what the stage before sends, in order.
        copied: those of `received`, and those inputs, that this stage changes in place.
        sent: what the next stage receives, in order.
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
    """One plan per stage.

    Args:
        cuts: names of the last layers of all stages but the last.
        outputs: the leaves of the result that are wanted; None: all.

    Raises:
        ValueError: a cut is not a layer that was called, or leaves a stage with nothing to do.
        TracingError: a tensor is changed in place in another stage than one that shares its memory.
    """
    return _Splitter(recording, cuts, recording.outputs if outputs is None else outputs).plans()


class _Splitter:
    """Nodes are *bound* to the stage in which they come, or *free*: computed wherever they are needed.

    All that shares memory with what a bound node changes is bound too, so a free value is the same on every stage.
    """

    def __init__(self, recording: Recording, cuts: Sequence[str], outputs: Sequence[Any]) -> None:
        self.nodes = [node for node in recording.graph.nodes if node.op != "output"]
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.outputs = list(outputs)
        self.num_stages = len(cuts) + 1
        last_calls = {str(node.target): self.order[node] for node in recording.calls()}
        called = sorted(last_calls, key=last_calls.__getitem__)
        check_cuts(cuts, called, self.num_stages, "that the forward calls, for inputs like these")
        self.ends = [last_calls[cut] for cut in cuts]
        self.attributes = {_info(node).storage for node in self.nodes if node.op == "get_attr"}
        self.attributes.update(*(_info(node).buffers for node in self.nodes))
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
                self._require(leaf, self.num_stages - 1, {node for node in self.nodes if _info(node).writes})
        plans = []
        for stage in range(self.num_stages):
            received = self._sorted(self.crossing[stage - 1]) if stage else []
            own = self._sorted(self.computed[stage])
            self._check_aliases(received, stage)
            changed = set().union(*(_info(node).writes for node in own))
            arriving = received + [node for node in own if node.op == "placeholder"]
            plans.append(
                StagePlan(
                    nodes=own,
                    received=received,
                    copied={node for node in arriving if _info(node).storage in changed},
                    sent=self._sorted(self.crossing[stage]),
                    outputs=self.outputs if stage == self.num_stages - 1 else [],
                )
            )
        return plans

    # --- which are bound

    def _bind_all(self) -> None:
        changed: set[int] = set()  # memory that bound nodes change
        wholes: set[fx.Node] = set()  # calls, parts of whose results share that memory
        while True:
            self.stage = {}
            for index, node in enumerate(self.nodes):
                info = _info(node)
                if info.kind == "part":
                    whole = node.all_input_nodes[0]
                    if whole in self.stage:
                        self.stage[node] = self.stage[whole]
                elif info.kind != "pack" and (
                    node in wholes or {info.storage, *info.buffers} & changed or not self._is_free(node)
                ):
                    self.stage[node] = sum(index > end for end in self.ends)
            changed_now = set().union(*(_info(node).writes for node in self.stage))
            parts = (n for n in self.nodes if _info(n).kind == "part" and _info(n).storage in changed_now)
            wholes_now = {self._whole(node) for node in parts}
            if changed_now == changed and wholes_now == wholes:
                return
            changed, wholes = changed_now, wholes_now

    def _is_free(self, node: fx.Node) -> bool:
        """No parameter, no randomness, no lasting effect, and nothing that depends on them."""
        info = _info(node)
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
        if _info(node).kind == "pack":
            return any(self._is_bound(argument) for argument in node.all_input_nodes)
        return node in self.stage

    def _whole(self, node: fx.Node) -> fx.Node:
        while _info(node).kind == "part":
            node = node.all_input_nodes[0]
        return node

    # --- where they are needed

    def _compute(self, node: fx.Node, stage: int) -> None:
        """Makes `stage` compute `node`."""
        if node in self.computed[stage]:
            return
        self.computed[stage].add(node)
        for argument in node.all_input_nodes:
            self._require(argument, stage, _info(node).after)

    def _require(self, node: fx.Node, stage: int, after: Iterable[fx.Node]) -> None:
        """Makes the value that `node` has after the calls `after` available on `stage`."""
        info = _info(node)
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
                if info.storage in _info(writer).writes:
                    self._compute(writer, stage)

    # --- what cannot be cut

    def _check_every_stage_runs(self, cuts: Sequence[str]) -> None:
        busy = set(self.stage.values())
        for stage in range(self.num_stages):
            if stage not in busy:
                between = " and ".join(repr(cut) for cut in cuts[max(0, stage - 1) : stage + 1])
                side = "between cuts" if 0 < stage < len(cuts) else "after cut" if stage else "before cut"
                raise ValueError(
                    f"pipeline stage {stage} of {self.num_stages} has nothing to do: the forward calls nothing {side} "
                    f"{between} that depends on parameters. Move the cut."
                )

    def _check_aliases(self, received: Sequence[fx.Node], stage: int) -> None:
        written = set().union(*(_info(node).writes for node, where in self.stage.items() if where >= stage))
        seen: dict[int, fx.Node] = {}
        for node in received:
            storage = _info(node).storage
            assert storage is not None  # only tensors are sent
            if storage in seen and storage in written:
                raise TracingError(
                    f"{_info(node).where}: {seen[storage]} and {node} share memory, both go to pipeline stage "
                    f"{stage}, and it is changed in place after that. Sent, they share nothing: use an out-of-place "
                    f"operation, or move the cut."
                )
            seen[storage] = node

    def _check_attributes(self) -> None:
        """A buffer that one stage changes and another reads would be out of date there."""
        writers: dict[int | None, set[int]] = {}
        users: dict[int | None, set[int]] = {}
        for node, stage in self.stage.items():
            for storage in _info(node).writes:
                writers.setdefault(storage, set()).add(stage)
            for storage in _info(node).buffers:
                users.setdefault(storage, set()).add(stage)
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and _info(argument).kind != "parameter":
                    users.setdefault(_info(argument).storage, set()).add(stage)
        for node in self.nodes:
            for memory in [_info(node).storage, *_info(node).buffers]:
                stages = users.get(memory, set()) | writers.get(memory, set())
                if memory in users and memory in writers and len(stages) > 1:
                    what = f"{node.target}" if node.op == "get_attr" else f"a buffer of {node.target}"
                    raise TracingError(
                        f"{_info(node).where}: {what} is changed on pipeline stage {max(writers[memory])} and used on "
                        f"stages {sorted(stages)}; each stage has its own copy. Move the cut, or keep it within one "
                        f"layer."
                    )

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)


def _info(node: fx.Node) -> Info:
    info: Info = node.meta["info"]
    return info


def _spec(node: fx.Node) -> TensorSpec:
    spec = _info(node).spec
    assert spec is not None  # only tensors cross a boundary
    return spec
