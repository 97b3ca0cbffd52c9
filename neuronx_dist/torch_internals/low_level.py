"""Forms of functions that compiled and exported programs name, and those of a list of tensors.

Without them these functions gather whole ShardTensors.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten

batch_norm_with_update = _aten._batch_norm_with_update
softmax_backward_data, safe_softmax = _aten._softmax_backward_data, _aten._safe_softmax
native_batch_norm_legit, chunk_cat = torch._native_batch_norm_legit, torch._chunk_cat
unsafe_masked_index = torch._unsafe_masked_index
unsafe_masked_index_put_accumulate = torch._unsafe_masked_index_put_accumulate

of_lists: Any = torch._VF  # `torch.meshgrid` and `torch.atleast_1d` call those of a list of tensors
