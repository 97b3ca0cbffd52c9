"""Dual numbers of forward-mode AD: the functions that torch calls to make one and to take it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Functions that `forward_ad.make_dual` and `unpack_dual` call: handled, they make a dual ShardTensor without a gather.
make_dual: Callable[..., Any] = torch._C._VariableFunctions._make_dual
unpack_dual: Callable[..., Any] = torch._C._VariableFunctions._unpack_dual
