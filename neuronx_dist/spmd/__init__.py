"""SPMD types: typed, differentiable collectives, and the checker that proves a program's types.

types.py          R, I, V, P, S(i); tensor_type.py: the type of a tensor, and how it is written on tensors
rows.py           the table of operators; collectives.py: the operators, and messages for pairs of types without one
linear_operator.py  operators under `torch.func`; errors.py: `SpmdTypeError` and its family
declarations.py   declarations of users and layers about a tensor
local_code.py     `local_map` and `on_own_shard`, scopes for code that computes on this rank's shard
gathered_tensors.py  gathered tensors, from autograd's graph; local_holders.py: tensors that hold a local tensor
watching.py       whether a checker is at work; functions with a handler in the checker
axes.py           atoms: the names of axes in types; random.py: random streams; verification.py: values, at run time
intercept.py      intercepts calls of autograd functions; checkpoint_hooks.py: activation checkpoints

`SpmdTypeMode` follows types through ordinary torch code; `check` does so for whole models on all ranks of a mesh, in
one process. Both live in `neuronx_dist.checking`, which is loaded at their first use.
"""

from ..call_site import hide
from ..lazy_names import lazy_names
from ..weights.shard_spec import ShardedModule, ShardSpec, named_specs, restamp, set_spec, spec_of
from .collectives import all_gather, all_reduce, all_to_all, convert, redistribute, reduce_scatter, reinterpret
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
from .rows import table
from .types import I, P, R, S, Shard, SpmdType, V, dual
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
    "local_map",
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


# The checker stands above this room: a training run loads none of it. `verify` is for debugging, `local_map` for few.
_LAZY = {
    "SpmdTypeMode": "checking.types.mode",
    "check": "checking.api",
    "local_map": "spmd.local_code",
    "register_rule": "rules:rule",
    "typecheck": "checking.types.mode",
    "verify": "spmd.verification",
}
__getattr__ = lazy_names(__name__, _LAZY)
