"""Parameters that are ShardTensors in torch's data-parallel wrappers, over ranks that hold equal parts of them.

`fully_shard` divides the local tensor further: its parameters, those of the optimizer, are torch's DTensors on both
meshes, as with tensor parallelism by torch. In forward and backward a layer has the ShardTensor.
DistributedDataParallel gets the local tensors, in which gradients are accumulated. Whole state dicts, of
`get_model_state_dict(full_state_dict=True)`, are gathered as DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import comm
from ..torch_internals.data_parallel import before_gathering, before_sharding, reduce_leaves
from ..torch_internals.tensors import pytree
from ..weights import wrappers
from .spec import make_spec
from .tensor import ShardTensor, wrap

__all__: list[str] = []


def _divided(param: torch.Tensor, mesh: Any) -> tuple[torch.Tensor, Callable[[Any], nn.Parameter] | None]:
    """Returns what `fully_shard` over a mesh divides for a parameter, and what makes the parameter of the gathered."""
    if not isinstance(param, ShardTensor):
        return param, None
    _check_ranks("fully_shard", mesh.mesh.flatten().tolist(), param, "a parameter")
    with torch.no_grad():
        values: Any = param.detach()
        divided = nn.Parameter(values.to_dtensor(), requires_grad=param.requires_grad)
    spec = make_spec(param._spec.mesh, param._spec.placements, param.shape)

    def as_parameter(gathered: Any) -> nn.Parameter:
        with torch.no_grad():
            local = gathered.to_local()
        return nn.Parameter(wrap(local, spec), requires_grad=gathered.requires_grad)

    return divided, as_parameter


def _check_ranks(wrapper: str, group: Sequence[int], param: ShardTensor, name: str) -> None:
    """Checks that a group holds equal parts of a parameter, none of whose gradients are reduced over the group.

    Raises:
        RuntimeError: it does not.
    """
    ranks = sorted({*param.device_mesh.mesh.flatten().tolist()} & {*group})
    if len(ranks) > 1:
        raise RuntimeError(
            f"{wrapper} over ranks {[*group]}: {name} is a ShardTensor over ranks {ranks} of these, which reduce its "
            'gradient already: pass a mesh of other ranks, as mesh["dp"] beside mesh["tp"]; or leave the wrapper out, '
            "and distribute inputs with Shard(0): docs/shard-tensor-wrappers.md"
        )


def _reduce_parts(wrapper: Any, module: nn.Module, names: Sequence[str]) -> None:
    """Makes a DistributedDataParallel take the local tensors of ShardTensors, equal on all ranks of its group.

    Raises:
        RuntimeError: ranks of the group hold different parts, or reduce the gradient already.
    """
    group = comm.communicator(wrapper.process_group)
    leaves: dict[str, torch.Tensor] = {}
    for name in names:
        param: Any = module.get_parameter(name)
        _check_ranks("DistributedDataParallel", group.ranks, param, name)
        leaves[name] = param._local
    for leaf in leaves.values():
        leaf.data.copy_(comm.broadcast(leaf.detach(), group, src=0))
    reduce_leaves(wrapper, module, leaves)


def _as_dtensors(state_dict: Any) -> Any:
    with torch.no_grad():
        return pytree.tree_map_only(ShardTensor, lambda x: x.detach().to_dtensor(), state_dict)


wrappers.TAKE_SHARDS["DistributedDataParallel"] = _reduce_parts
before_sharding(_divided)
before_gathering(_as_dtensors)
