"""Tensors without values, on which programs are recorded and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# `FakeTensorMode` makes tensors that have shapes and no values; `unset_fake_temporarily` is a context outside of it.
# The exceptions say that a call needs values. Without them nothing is checked, recorded or planned before it runs.

LOGGER = "torch._subclasses.fake_tensor"  # logs each call that fails, which is tried again: silenced meanwhile


def guard_data_pointer(fake: Any, mode: FakeTensorMode) -> None:
    """Makes a fake tensor warn or raise where its data pointer is asked for, as its constructor does."""
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
