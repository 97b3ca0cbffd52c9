"""Dual numbers of forward-mode AD: the functions that torch calls to make one and to take it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What `forward_ad.make_dual` and `unpack_dual` call. Without them a dual ShardTensor would be gathered to be made.
make_dual: Callable[..., Any] = torch._C._VariableFunctions._make_dual
unpack_dual: Callable[..., Any] = torch._C._VariableFunctions._unpack_dual
