"""SPMD types: typed, differentiable collectives, and the checker that proves a program's types.

`R, I, V, P, S(i)` are the types (`types.py`), the operators are rows of one table (`collectives.py`), `spec.py` says
how parameters are laid out, `random.py` holds the random streams. `SpmdTypeMode` (`checker.py`) follows types through
ordinary torch code; `check` does so for whole models on all ranks of a mesh, in one process (`neuronx_dist.checking`).
"""

from typing import Any

from ..call_site import hide
from ..checking.types.handlers import verbs as _verb_types  # noqa: F401 - gives the checker the types of operators and plain verbs
from ..checking.types.mode import SpmdTypeMode, typecheck
from ..checking.types.rules import rule as register_rule
from ..weights.shard_spec import ShardedModule, ShardSpec, named_specs, restamp, set_spec, spec_of
from .collectives import all_gather, all_reduce, all_to_all, convert, redistribute, reduce_scatter, reinterpret, table
from .declarations import (
    assert_local_type,
    assert_type,
    forget,
    get_local_type,
    gradient,
    has_local_type,
    local,
    mark_shard,
    trust,
)
from .errors import SpmdTypeError
from .types import I, P, R, S, Shard, SpmdType, V, dual
from .verify import verify
from .watching import no_typecheck

__all__ = [
    "I",
    "P",
    "R",
    "S",
    "Shard",
    "ShardSpec",
    "ShardedModule",
    "SpmdType",
    "SpmdTypeError",
    "SpmdTypeMode",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assert_local_type",
    "assert_type",
    "check",
    "convert",
    "dual",
    "forget",
    "get_local_type",
    "gradient",
    "has_local_type",
    "local",
    "mark_shard",
    "named_specs",
    "no_typecheck",
    "redistribute",
    "reduce_scatter",
    "register_rule",
    "reinterpret",
    "restamp",
    "set_spec",
    "spec_of",
    "table",
    "trust",
    "typecheck",
    "verify",
]

hide(__name__)


def __getattr__(name: str) -> Any:
    """`check` stands on the whole package, and is looked up when it is used."""
    if name == "check":
        from ..checking import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
