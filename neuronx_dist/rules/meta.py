"""Rules of functions that have nothing to type ("pass"), or through which a value leaves torch ("scalar").

"pass" are queries of shape, dtype, memory and autograd, whose answers do not depend on values, and settings. "scalar"
are item, bool, numpy and others that make Python values of a tensor's numbers: a program may continue with them in
ways that no type can follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals.operators import record_function_enter, record_function_exit
from ..torch_internals.tensors import assert_async, functional_assert_async, set_grad_enabled
from .names import getter
from .spec import Spec, rule, same

__all__: list[str] = []

# --- questions and settings ---

_QUESTIONS = (
    # shape and memory
    "size dim ndimension numel nelement stride storage_offset storage storage_type untyped_storage data_ptr "
    "const_data_ptr element_size is_contiguous is_pinned is_same_size is_set_to is_shared share_memory_ get_device "
    "dim_order __len__ _is_view _version __cuda_array_interface__ __dlpack_device__ "
    # dtype and layout
    "is_floating_point is_complex is_signed is_conj is_neg is_inference is_coalesced is_distributed "
    "sparse_dim dense_dim _nnz _dimI _dimV q_scale q_zero_point q_per_channel_axis qscheme "
    # autograd
    "backward register_hook register_post_accumulate_grad_hook retain_grad refine_names rename "
    "rename_ align_to align_as has_names _clear_non_serializable_cached_data _autocast_to_full_precision "
    "__repr__ __format__ __hash__ __dir__ __reduce_ex__ __setstate__ __array_priority__ "
    "_nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides record_stream"
)

_PROPERTIES = (
    "shape ndim dtype device layout itemsize nbytes requires_grad is_leaf grad grad_fn grad_dtype _grad _grad_fn "
    "retains_grad output_nr _version _base _cdata _backward_hooks _post_accumulate_grad_hooks name names volatile "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr "
    "is_vulkan is_xla is_xpu _has_grad_dtype_override __cuda_array_interface__"
)

_LEAVING = (
    "item tolist numpy __array__ __bool__ __int__ __long__ __float__ __complex__ __index__ __nonzero__ __contains__ "
    "is_nonzero __dlpack__ __array_wrap__"
)


def _methods(names: str) -> list[Any]:
    functions = (getattr(namespace, name, None) for name in names.split() for namespace in (Tensor, torch))
    return [function for function in functions if callable(function)]


for _function in _methods(_QUESTIONS):
    rule(_function, kind="pass")(None)
for _function in _methods(_LEAVING):
    rule(_function, kind="scalar")(None)
for _name in _PROPERTIES.split():
    _property = getattr(Tensor, _name, None)
    for _access in ("__get__", "__set__", "__delete__"):
        if hasattr(_property, _access):
            rule(getattr(_property, _access), kind="pass", name=_name)(None)

# settings that a mode receives as if they were operators
rule(set_grad_enabled, assert_async, functional_assert_async, torch.device, kind="pass")(None)
rule(record_function_enter, kind="pass", name="record_function")(None)
rule(record_function_exit, kind="pass", name="record_function")(None)
for _name in "sym_int sym_float sym_ite sym_max sym_min sym_not sym_sqrt sym_sum".split():
    rule(getattr(torch, _name), kind="scalar")(None)


# --- values under another name ---

_DATA: Any = Tensor.data


@rule(getter("data"), linear=((0,),), aliases=True)
def data(input: Tensor) -> Spec:
    """Returns `x.data`: the values of x without its history."""
    return same(input.shape)


@rule(_DATA.__set__, linear=((1,),), inplace=0, name="data")
def set_data(input: Tensor, value: Tensor) -> Spec:
    """Sets `x.data = value`: x then has the shape and the values of `value`."""
    spec = same(value.shape)
    return spec._replace(ins=(None, *spec.ins))


def _loaded(input: Tensor, other: Tensor, assign: bool = False) -> Tensor:
    return other


rule(Tensor.module_load, kind="decompose", decompose=_loaded)(None)
rule(nn.Parameter.__deepcopy__, linear=((0,),))(lambda x, *args: same(x.shape))
