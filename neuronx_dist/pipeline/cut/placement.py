"""Which stages hold which parameters: by the order in which layers are registered, or by a recording of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..record.recording import info_of, is_leaf
from .splitting import StagePlan

__all__ = [
    "Placement",
    "check_placement",
    "leaf_names",
    "place_by_recording",
    "place_by_registration",
]


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
            elif info_of(node).kind == "parameter":
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
            if node.op == "call_module" or info_of(node).kind == "parameter":
                placed = placement.stages(str(node.target))
                if placed is not None and stage not in placed:
                    raise ValueError(
                        f"{node.target} ({info_of(node).where}) is used by pipeline stage {stage}, but its parameters "
                        f"were placed on stage {', '.join(map(str, sorted(placed)))}, by the order in which the model "
                        f"registers its layers. Register them in the order in which they run, or show how they run "
                        f"before partition(): call trace(kwargs={{...example inputs...}})."
                    )
