"""Parameters that are no plain tensors: in `fully_shard`, in DistributedDataParallel, in whole state dicts.

It imports `torch.distributed.fsdp` and `torch.distributed.tensor`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def before_sharding(convert: Callable[[Any, Any], tuple[torch.Tensor, Callable[[Any], nn.Parameter] | None]]) -> None:
    """Makes `fully_shard` divide other tensors than its parameters, and gather others again.

    Args:
        convert: from a parameter and the mesh of `fully_shard` to the tensor that is divided, and to a function that
            makes a parameter of what was gathered; None: that is the parameter. Without it ShardTensors are refused.
    """
    initialize, gather, gradient = FSDPParam.__init__, FSDPParam.init_unsharded_param, FSDPParam._get_grad_inner_tensor

    @functools.wraps(initialize)
    def initialized(self: Any, param: Any, module_info: Any, mesh_info: Any, *args: Any, **kwargs: Any) -> None:
        param, as_parameter = convert(param, mesh_info.mesh)
        if as_parameter is not None:
            self.as_parameter = as_parameter
        initialize(self, param, module_info, mesh_info, *args, **kwargs)

    @functools.wraps(gather)
    def gathered(self: Any) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        gather(self)
        if is_first and hasattr(self, "as_parameter"):
            self._unsharded_param = self.as_parameter(self._unsharded_param)

    @functools.wraps(gradient)
    def local_gradient(self: Any, grad: Any) -> torch.Tensor:
        return grad._local_tensor if hasattr(self, "as_parameter") else gradient(self, grad)

    replaced: Any = FSDPParam
    replaced.__init__, replaced.init_unsharded_param = initialized, gathered
    replaced._get_grad_inner_tensor = local_gradient


def reduce_leaves(wrapper: Any, module: nn.Module, leaves: Mapping[str, torch.Tensor]) -> None:
    """Makes a DistributedDataParallel reduce the gradients of `leaves`, in the place of parameters of these names.

    Called while it is initialized; it does not broadcast these. Without it ShardTensors are refused.
    """
    wrapper.parameters_to_ignore = wrapper.parameters_to_ignore | leaves.keys()
    vars(wrapper)["_build_params_for_reducer"] = functools.partial(_parameters, wrapper, leaves)
    vars(wrapper)["_build_debug_param_to_name_mapping"] = _names


def _parameters(wrapper: Any, leaves: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
    named = dict(wrapper.module.named_parameters())
    others = {named[name]: leaf for name, leaf in leaves.items()}
    ignored, wrapper.parameters_to_ignore = wrapper.parameters_to_ignore, wrapper.parameters_to_ignore - leaves.keys()
    parameters, are_sparse = type(wrapper)._build_params_for_reducer(wrapper)
    wrapper.parameters_to_ignore = ignored
    return [others.get(param, param) for param in parameters], are_sparse


def _names(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    return {number: f"parameter {number}" for number in range(len(parameters))}


def before_gathering(convert: Callable[[Any], Any]) -> None:
    """Makes `get_model_state_dict(full_state_dict=True)` gather `convert(state dict)`; without it not all is plain."""
    gather = _state_dict_utils._gather_state_dict

    @functools.wraps(gather)
    def gathered(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(convert(state_dict), *args, **kwargs)

    for module in (_state_dict_utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
        if module is not None:
            module._gather_state_dict = gathered  # type: ignore[attr-defined]
