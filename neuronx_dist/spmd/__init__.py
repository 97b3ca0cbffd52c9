"""SPMD types: typed, differentiable collectives, and the checker that proves a program's types.

types.py          R, I, V, P, S(i); tensor_type.py: the type of a tensor, and how it is written on tensors
rows.py           the table of operators; collectives.py, special_cases.py, operator_options.py: the operators
several.py        an operator on several tensors, in one collective
linear_operator.py  operators under `torch.func`; errors.py: `SpmdTypeError` and its family
declarations.py   declarations of users and layers about a tensor
local_code.py     `local_map` and `on_own_shard`, scopes for code that computes on this rank's shard
gathered_tensors.py  gathered tensors, from autograd's graph; local_holders.py: tensors that hold a local tensor
watching.py       whether a checker is at work; functions with a handler in the checker
named_mesh.py, partition_spec.py, retyping.py, boundaries.py, scalar.py, function_types.py, type_rules.py, tracing.py,
dtensor.py        the rest of spmd_types' language (docs/type-system.md)
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
from .types import I, P, R, S, Shard, V, dual
from .watching import no_typecheck

__all__ = [
    "I",
    "P",
    "R",
    "S",
    "Shard",
    "ShardSpec",
    "ShardedModule",
    "SpmdTypeError",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assert_local_type",
    "assert_type",
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
    "reinterpret",
    "restamp",
    "set_spec",
    "spec_of",
    "table",
    "trust",
]

hide(__name__)

# The checker stands above this room: a training run loads none of it. Nor does it load what few programs use.
_ABOVE = {"SpmdTypeMode": "checking.types.mode", "typecheck": "checking.types.mode", "check": "checking.api"}
_FILES = {
    "boundaries": "Infer register_no_typecheck",
    "named_mesh": "MeshAxis current_mesh current_mesh_all_names current_mesh_names normalize_axis normalize_mesh "
    "set_current_mesh",
    "dtensor": "dtensor_placement_to_spmd_type spmd_redistribute spmd_type_to_dtensor_placement",
    "function_types": "register_autograd_function register_decomposition register_local_autograd_function "
    "register_local_backward_hook",
    "local_code": "local_map",
    "partition_spec": "DimSharding LocalSpmdType PartitionSpec PerMeshAxisLocalSpmdType PerMeshAxisSpmdType SpmdType "
    "PerMeshAxisSpmdTypes TensorSharding get_partition_spec merge_types normalize_partition_spec",
    "retyping": "TYPE_CHECKING Invariant Partial Replicate Varying assert_type_like get_axis_local_type "
    "is_type_checking invariant_to_replicate maybe_get_axis_local_type mutate_type reinterpret_mesh "
    "assert_local_type_like reinterpret_no_grad set_dist shard traceback_filtering unshard",
    "scalar": "Scalar",
    "several": "together",
    "tracing": "trace",
    "verification": "verify",
}
_LAZY = {name: f"spmd.{file}" for file, names in _FILES.items() for name in names.split()}
_LAZY |= {**_ABOVE, "checker": "checking", "register_rule": "rules:rule", "rules": "spmd:type_rules"}
__getattr__ = lazy_names(__name__, _LAZY)
__all__ += _LAZY
