"""Stages that hold each parameter, by the order in which layers are registered or by a recording of the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from ...program.recording import info_of, is_leaf
from ...weights.partial_model import join
from .splitting import StagePlan

__all__ = [
    "Placement",
    "attribute_of",
    "leaf_names",
    "misplaced",
    "misplacement",
    "place_by_recording",
    "place_by_registration",
    "registered",
]


def leaf_names(module: nn.Module, leaf_classes: Sequence[type]) -> list[str]:
    """Names of the leaf layers, in the order of registration. A module with two names is listed twice."""
    return [path for path, _, leaf in registered(module, leaf_classes) if leaf]


def registered(
    module: nn.Module, leaf_classes: Sequence[type], prefix: str = ""
) -> Iterator[tuple[str, nn.Module, bool]]:
    """`(name, module, is_leaf)` of each container and leaf layer, in order; the whole model is a container."""
    leaf = prefix != "" and is_leaf(module, leaf_classes)
    yield prefix, module, leaf
    for name, child in module._modules.items() if not leaf else ():
        if child is not None:
            yield from registered(child, leaf_classes, join(prefix, name))


@dataclass(frozen=True)
class Placement:
    """Stages that hold each tensor of the model.

    Attributes:
        leaves: stages of each leaf layer with parameters, by name; more than one if several stages call it.
        direct: stages of each parameter that no leaf layer holds, by name.
    """

    leaves: dict[str, frozenset[int]]
    direct: dict[str, frozenset[int]]

    def on_stages(self, holders: Sequence[int]) -> Placement:
        """This placement with pieces replaced by the stages that hold them, `holders[piece]`."""
        leaves, direct = (
            {name: frozenset(holders[piece] for piece in pieces) for name, pieces in table.items()}
            for table in (self.leaves, self.direct)
        )
        return Placement(leaves, direct)

    def without_parameters(self, stages: int) -> list[int]:
        """Stages of so many that hold no parameter; none if the model has none."""
        held = frozenset().union(*self.leaves.values(), *self.direct.values())
        return [stage for stage in range(stages) if stage not in held] if held else []

    def stages(self, name: str) -> frozenset[int] | None:
        """Stages of a parameter, buffer or module; None: all stages, since no leaf layer with parameters holds it."""
        if name in self.direct:
            return self.direct[name]
        path = name
        while path:
            if path in self.leaves:
                return self.leaves[path]
            path = path.rpartition(".")[0]
        return None


def place_by_registration(module: nn.Module, cuts: Sequence[str], leaf_classes: Sequence[type]) -> Placement:
    """Places layers in the order in which they are registered; this needs no inputs.

    Parameters of a container itself are where the container begins: a learned position embedding of the model on
    stage 0.
    """
    leaves: dict[str, frozenset[int]] = {}
    direct: dict[str, frozenset[int]] = {}
    stage = 0
    for path, child, leaf in registered(module, leaf_classes):
        if not leaf:
            direct.update((join(path, name), frozenset([stage])) for name, _ in child.named_parameters(recurse=False))
            continue
        if next(child.parameters(), None) is not None:
            leaves[path] = frozenset([stage])
        if stage < len(cuts) and path == cuts[stage]:
            stage += 1
    return Placement(leaves, direct)


def place_by_recording(
    module: nn.Module, plans: Sequence[StagePlan], cuts: Sequence[str], leaf_classes: Sequence[type]
) -> Placement:
    """Places each tensor on the stages that use it; an unused tensor stays where `place_by_registration` puts it."""
    called: dict[int, set[int]] = {}  # by id of the module or parameter, which may have several names
    for stage, plan in enumerate(plans):
        for node in plan.nodes:
            used = attribute_of(module, node)
            if used is not None:
                called.setdefault(id(used), set()).add(stage)
    unused = place_by_registration(module, cuts, leaf_classes)
    leaves = {}
    for name, stages in unused.leaves.items():
        leaf = module.get_submodule(name)
        users = called.get(id(leaf), set()).union(*(called.get(id(param), ()) for param in leaf.parameters()))
        leaves[name] = frozenset(users) or stages
    direct = {
        name: frozenset(called.get(id(module.get_parameter(name)), ())) or stages
        for name, stages in unused.direct.items()
    }
    return Placement(leaves, direct)


def attribute_of(module: nn.Module, node: fx.Node) -> nn.Module | nn.Parameter | None:
    """The leaf layer or parameter that a node uses."""
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    return module.get_parameter(str(node.target)) if info_of(node).kind == "parameter" else None


def misplaced(
    module: nn.Module, placement: Placement, plans: Sequence[StagePlan], holders: Sequence[int]
) -> tuple[fx.Node, int, frozenset[int]] | None:
    """The first call that needs parameters which its stage does not hold.

    Args:
        plans, holders: of each piece of the model, and the stage that holds it.

    Returns:
        `(node, stage that runs it, stages that hold its parameters)`; None: each stage holds what it runs.
    """
    held: dict[int, set[int]] = {}  # by id: a parameter under any of its names
    for name, param in module.named_parameters(remove_duplicate=False):
        held.setdefault(id(param), set()).update(placement.stages(name) or holders)
    for stage, plan in zip(holders, plans):
        for node in plan.nodes:
            used = attribute_of(module, node)
            for param in [used] if isinstance(used, nn.Parameter) else [] if used is None else used.parameters():
                if stage not in held[id(param)]:
                    return node, stage, frozenset(held[id(param)])
    return None


def misplacement(
    module: nn.Module, placement: Placement, node: fx.Node, stage: int, held: frozenset[int]
) -> ValueError:
    """An error that says what to do about a call that `misplaced` found."""
    target = str(node.target)
    repair = "call trace(kwargs={...example inputs...}) right after NxDPPModel()"
    if node.op != "call_module":  # in the forward of a container, which reads the parameter itself
        for holder in _holders(target):
            names = [join(holder, name) for name, _ in module.get_submodule(holder).named_parameters()]
            if len({placement.stages(name) for name in names}) > 1:
                kind = type(module.get_submodule(holder)).__name__
                repair += f"; or list {kind!r} in leaf_module_cls, so that {holder} is one call, and cut around it"
                break
    return ValueError(
        f"{target} ({info_of(node).where}) is used by pipeline stage {stage}, but its parameters are on stage "
        f"{', '.join(map(str, sorted(held)))}, following the order in which the model registers its layers. "
        f"Register the layers in the order in which they run, or show that order: {repair}."
    )


def _holders(parameter: str) -> Iterator[str]:
    """Names of the modules around a parameter, from the inside out, without the whole model."""
    while parameter := parameter.rpartition(".")[0]:
        yield parameter
