"""Capabilities of a process group's backend, determined once per backend, when a communicator is made.

A backend that is written in Python (a subclass of torch's ProcessGroup or Backend) has the methods that it overrides.
A backend in C++ cannot be asked: torch gives it every method, and those without an implementation raise when they are
called. Such a backend counts as having all methods, less those that `NEURONX_DIST_LACKS` names, and a call that fails
for want of an implementation is reported as such (`without`). `substitutes.py` does what is missing with what is there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch.distributed as dist

from ...torch_internals.distributed import overrides, python_class
from ..errors import CommError

__all__ = [
    "LACKS_VARIABLE",
    "LIMITS",
    "METHODS",
    "Capabilities",
    "advice_on_missing",
    "capabilities_of",
    "is_missing_call",
    "without",
]

LACKS_VARIABLE = "NEURONX_DIST_LACKS"

# Methods of a group that carry out each verb, the best one first: the names since torch 2.13, the older names, and the
# collectives of lists of tensors.
METHODS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("allreduce",),
    "all_gather": ("all_gather_single", "_allgather_base", "allgather"),
    "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter"),
    "all_to_all": ("all_to_all_single", "alltoall_base", "alltoall"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "recv": ("recv",),
}
_CALLED = dict.fromkeys(("send", "recv", "permute", "exchange"), ("send", "recv")) | {"gather_objects": ("allgather",)}
_ALL = frozenset(name for names in METHODS.values() for name in names)

_MESSAGES = (
    "messages between two ranks need point-to-point calls; use NxDPPModel for a pipeline, comm.permute or "
    "comm.exchange, in which all ranks of the group take part, or comm.new_group of the two ranks alone"
)
# The features that need a verb, and what to use where neither the verb nor a substitute is there.
_NEEDS = {
    "send": _MESSAGES,
    "recv": _MESSAGES,
    "all_gather": (
        "tensor and sequence parallelism, ZeRO-1 and checkpoints gather, and no other call replaces it; use a backend "
        "that has one of them (gloo, nccl)"
    ),
}

# Limits that no method shows, by the name of the backend, as published (docs/devices.md).
LIMITS: dict[str, dict[str, bool]] = {
    "neuron": {"unequal_all_to_all": False},
    "tpu_dist": {"gathers_objects": False, "any_order": False},
}
_LACKING = {"tpu_dist": frozenset({"send", "recv"})}  # the group has experimental_send and experimental_recv
_MISSING = re.compile(
    r"does not (?:support|implement)|not (?:yet )?(?:supported|implemented)|unsupported|no backend type associated",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of the groups of a backend.

    Attributes:
        backend: name of the backend.
        methods: the methods of `METHODS` that it has.
        unequal_all_to_all: whether an all-to-all takes parts of unequal sizes.
        gathers_objects: whether `dist.all_gather_object` works; else objects go through the store.
        any_order: whether a group takes its ranks in any order, not only in ascending order.
    """

    backend: str
    methods: frozenset[str] = _ALL
    unequal_all_to_all: bool = True
    gathers_objects: bool = True
    any_order: bool = True

    @property
    def is_whole(self) -> bool:
        """Returns whether nothing is missing."""
        return self == Capabilities(self.backend)

    @property
    def has_messages(self) -> bool:
        return {"send", "recv"} <= self.methods

    def has(self, verb: str) -> bool:
        """Returns whether a method for a verb of `METHODS` is there, under any of its names."""
        return not self.methods.isdisjoint(METHODS[verb])

    def check(self) -> None:
        """Raises CommError if the backend lacks a call without which no communicator works."""
        if not self.has("all_gather"):
            raise CommError(without(self.backend, "all_gather"))

    def check_order(self, ranks: tuple[int, ...], label: str) -> None:
        """Raises CommError if a group of these ranks, in this order, cannot be made."""
        if not self.any_order and list(ranks) != sorted(ranks):
            raise CommError(
                f"backend {self.backend} takes the ranks of a group in ascending order only: the group {label} has the "
                f"ranks {list(ranks)}; order the ranks of the mesh along this axis, or use another backend"
            )


def without(backend: str, verb: str) -> str:
    """Returns the message that a backend lacks a verb: which methods, which features need it, what to use instead."""
    names = f" (none of {', '.join(METHODS[verb])})" if len(METHODS[verb]) > 1 else ""
    return f"backend {backend} has no {verb}{names}: {_NEEDS[verb]}"


def advice_on_missing(backend: str, verb: str) -> str:
    """Returns what to do about a call of a verb that failed because the backend, in C++, does not implement it."""
    methods = _CALLED.get(verb) or METHODS.get(verb)
    if verb == "all_gather":  # one of them has to stay
        methods = METHODS[verb][:-1]
    if methods is None:
        return f"This is a call that backend {backend} does not have, or not for this tensor: use another backend"
    return (
        f"This is a call that backend {backend} does not have, or not for this tensor: with "
        f"{LACKS_VARIABLE}={','.join(methods)} in the environment of all ranks other calls do it"
    )


def is_missing_call(error: BaseException) -> bool:
    """Returns whether an error of a backend says that it has no such call, or none for such operands."""
    return isinstance(error, NotImplementedError) or bool(_MISSING.search(str(error)))


def capabilities_of(group: dist.ProcessGroup) -> Capabilities:
    """Returns the capabilities of a group's backend.

    Raises:
        CommError: `NEURONX_DIST_LACKS` names an unknown method.
    """
    backend = dist.get_backend(group)
    python = python_class(group)
    lacks = _lacking() | _LACKING.get(backend, frozenset())
    key = (backend, python, lacks)
    if key not in _known:
        methods = _ALL if python is None else frozenset(name for name in _ALL if overrides(python, name))
        limits = dict(LIMITS.get(backend, {}))
        if python is not None and backend not in LIMITS:
            limits["unequal_all_to_all"] = False  # not known: padding works with either
        if not {"allgather", "all_gather_single"} <= methods - lacks:  # torch 2.15 gathers objects by the latter
            limits["gathers_objects"] = False
        _known[key] = Capabilities(backend, methods - lacks, **limits)
    return _known[key]


_known: dict[tuple[str, type | None, frozenset[str]], Capabilities] = {}


def _lacking() -> frozenset[str]:
    asked = frozenset(name for name in os.environ.get(LACKS_VARIABLE, "").replace(",", " ").split())
    if not asked <= _ALL:
        raise CommError(
            f"{LACKS_VARIABLE} names {', '.join(sorted(asked - _ALL))}: the methods that can be replaced are "
            f"{', '.join(sorted(_ALL))}"
        )
    return asked
