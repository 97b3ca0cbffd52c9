"""SPMD-typed, differentiable collectives.

`R, I, V, P, S(i)` are the types (`types.py`), the operators are rows of one table (`collectives.py`), `spec.py` says
how parameters are laid out, `random.py` holds the random streams.
"""

from .collectives import all_gather, all_reduce, all_to_all, convert, redistribute, reduce_scatter, reinterpret, table
from .errors import SpmdTypeError
from .spec import ShardedModule, ShardSpec, named_specs, restamp, set_spec, spec_of
from .types import I, P, R, S, Shard, SpmdType, V, dual

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
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "dual",
    "named_specs",
    "redistribute",
    "reduce_scatter",
    "reinterpret",
    "restamp",
    "set_spec",
    "spec_of",
    "table",
]
