"""Programs whose transfers are replayed; the mode is an argument, since they run in another process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends.xla_transfer import TRANSFER_VARIABLE


def transferred(mode: str, pairs: Sequence[tuple[int, int]], *xs: torch.Tensor) -> Any:
    with mock.patch.dict(os.environ, {TRANSFER_VARIABLE: mode}):
        return [comm.permute(x, "tp", pairs) for x in xs]
