"""What a checkpoint holds of a run, as one rank has it, by names that no layout changes.

    model.<name>                        parameters, and buffers that a state dict has, by their names in the whole model
    optimizer.state.<name>.<entry>      what the optimizer keeps of a parameter: `exp_avg`, `step`, ...
    optimizer.master.<name>             its master weights, where their dtype is not the parameter's
    optimizer.param_groups              options and names of parameters, by group

They are the names that torch.distributed.checkpoint gives to `{"model": model.state_dict(), "optimizer":
get_optimizer_state_dict(...)}`. A tied weight has the first of its names. A shard is described by its pieces of the
whole tensor (`pieces`), so the same keys hold the same tensors at any degree of tp, pp and dp, with and without ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..weights.partial_model import PartialModel, buffer_slots, parameter_names, parameter_slots
from ..weights.shard_spec import spec_of
from .catalog import Catalog
from .optimizer_state import collect_optimizer, expect_optimizer, restore_optimizer
from .parameters import Parameter, parameters_of
from .tensors import ShardedTensor, State

__all__ = ["ShardedTensor", "State", "collect", "expect", "restore"]
