"""Queries of a tensor that compute nothing or return numbers: shapes, dtypes, `item`, hooks, backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals.dual_numbers import make_dual, unpack_dual
from ...torch_internals.tensors import DisableTorchFunction, has_compatible_type
from ..handlers import sharded
from ..labels import one_mesh
from ..moves.redistribute import redistributed
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, gradient_spec, in_layout, laid_out_gradient, local_of, wrap

__all__: list[str] = []

_T = torch.Tensor
_ATTRIBUTES = """
shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_xla is_mps is_mkldnn
is_vulkan is_nested names itemsize nbytes grad_fn output_nr retains_grad _version
""".split()
_QUERIES = """
size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device __hash__
""".split()
_MEMORY = "data_ptr const_data_ptr untyped_storage storage".split()  # torch 2.9 has no const_data_ptr


@sharded(
    *(getattr(_T, name).__get__ for name in _ATTRIBUTES if hasattr(getattr(_T, name, None), "__get__")),
    *(getattr(_T, name) for name in _QUERIES),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.result_type,
    torch.can_cast,
)
def of_the_whole(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    with DisableTorchFunction():
        return func(*args, **kwargs)


@sharded(_T.stride, _T.storage_offset)
def strides(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Returns those of the memory that each rank has; of a tensor in parts, those of the whole, contiguous."""
    spec = args[0]._spec
    return (of_the_whole if spec.sharded or spec.partial else of_the_local)(func, types, args, kwargs)


@sharded(
    *(_T.is_contiguous, _T.is_pinned, _T.is_inference, _T.is_shared, _T.storage_type, _T.__dlpack_device__),
)
def of_the_local(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


@sharded(*(getattr(_T, name) for name in _MEMORY if hasattr(_T, name)))
def memory(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Returns the memory of a tensor that each rank holds whole.

    Raises:
        RuntimeError: a rank's memory is a part, or a summand, of the tensor whose shape the caller sees; on all ranks.
    """
    x = args[0]
    spec = x._spec
    if spec.partial or any(spec.mesh.shape[m] > 1 for m, _ in spec.sharded) or spec.local_shape != spec.shape:
        raise RuntimeError(
            f"{func.__name__}: no rank has the memory of a ShardTensor of shape {tuple(spec.shape)}, "
            f"{spec.placements}: this rank holds {tuple(spec.local_shape)}. Pass x.to_local(), this rank's part, or "
            "x.full_tensor(), which gathers it; neuronx_dist.save_checkpoint, torch.distributed.checkpoint and "
            "torch.save save the parts"
        )
    return func(x._local, *args[1:], **kwargs)


@sharded(_T.share_memory_)
def share_memory_(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Moves this rank's part to memory that its child processes share."""
    func(args[0]._local)
    return args[0]


_NUMBERS = """
item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __dlpack__
""".split()


@sharded(*(getattr(_T, name) for name in _NUMBERS))
def numbers(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    args[0].device_mesh.communicator(
        0
    )  # raises on a rank outside of the mesh, where the number would be that of nothing
    return func(args[0].full_tensor(), *args[1:], **kwargs)


@sharded(_T.__len__)
def length(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> int:
    return int(args[0].shape[0])


@sharded(_T.__format__)
def formatted(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> str:
    x, format_spec = args
    return format(x.item(), format_spec) if x.dim() == 0 else object.__format__(x, format_spec)


@sharded(has_compatible_type)
def takes_the_data(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether `x.data = y` is possible; where it is not, `nn.Module` makes a new parameter."""
    x, y = args
    same = isinstance(x, ShardTensor) and isinstance(y, ShardTensor) and x._spec is y._spec
    return same and bool(func(x._local, y._local))


@sharded(torch.equal, _T.equal)
def equal(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> bool:
    x, y = args
    one_mesh(args, "equal")
    return x.shape == y.shape and bool(torch.eq(x, y).all())


@sharded(torch.allclose, _T.allclose)
def allclose(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


# --- autograd


@sharded(make_dual)
def dual(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Gives this rank's part the tangent's part, in the tensor's layout."""
    x, tangent, *others = args
    if not isinstance(x, ShardTensor):
        raise ValueError(
            f"make_dual: a plain tensor of shape {tuple(x.shape)} and a tangent that is a ShardTensor: distribute the "
            "tensor first"
        )
    return wrap(func(local_of(x), in_layout(tangent, x._spec), *others, **kwargs), x._spec)


@sharded(unpack_dual)
def undual(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    spec = args[0]._spec
    parts = func(local_of(args[0]), *args[1:], **kwargs)
    return tuple(None if part is None else wrap(part, spec) for part in parts)


def _loss(x: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor that a backward pass starts from: a Partial one is reduced."""
    if not isinstance(x, ShardTensor):
        return x
    spec = gradient_spec(x._spec)
    with torch.enable_grad():  # a checkpoint calls this in its backward
        return redistributed(local_of(x), x._spec, _start_spec(spec))


def _start(x: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if not isinstance(x, ShardTensor):
        return gradient
    if gradient is None:  # a rank outside of the mesh starts from nothing
        return None if x._spec.mesh.communicators is not None else torch.zeros_like(x._local)
    return in_layout(gradient, _start_spec(gradient_spec(x._spec)))


def _start_spec(spec: ShardTensorSpec) -> ShardTensorSpec:
    """Returns the layout in which a backward pass starts: a number is on every rank."""
    return spec.replicated() if spec.sharded and spec.shape.numel() == 1 else spec


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


@sharded(_T.backward)
def backward(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> None:
    if len(args) == 2 and not kwargs and type(args[0]) is type(args[1]) is ShardTensor:
        x, start = args
        if x._spec is start._spec and not x._spec.partial and x._spec.shape.numel() != 1:  # the usual call
            torch.autograd.backward((local_of(x),), (local_of(start),))
            return

    def call(
        x: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
        torch.autograd.backward(
            [_loss(x)],
            [_start(x, gradient)],
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=None if inputs is None else [_local(tensor) for tensor in inputs],
        )

    call(*args, **kwargs)


def _local(x: Any) -> Any:
    return local_of(x) if isinstance(x, ShardTensor) else x


@sharded(torch.autograd.backward)
def autograd_backward(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> None:
    def call(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        outputs = _listed(tensors)
        starts = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
        grads = [_start(x, g) for x, g in zip(outputs, starts)]
        chosen = None if inputs is None else [_local(tensor) for tensor in _listed(inputs)]
        torch.autograd.backward(
            [_loss(x) for x in outputs], grads, retain_graph=retain_graph, create_graph=create_graph, inputs=chosen
        )

    call(*args, **kwargs)


@sharded(torch.autograd.grad)
def autograd_grad(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(outputs: Any, inputs: Any, grad_outputs: Any = None, *others: Any, **keywords: Any) -> Any:
        outs, ins = _listed(outputs), _listed(inputs)
        starts = [None] * len(outs) if grad_outputs is None else _listed(grad_outputs)
        grads = [_start(x, g) for x, g in zip(outs, starts)]
        results = torch.autograd.grad([_loss(x) for x in outs], [_local(x) for x in ins], grads, *others, **keywords)
        return tuple(
            laid_out_gradient(grad, x._spec) if isinstance(x, ShardTensor) and grad is not None else grad
            for x, grad in zip(ins, results)
        )

    return call(*args, **kwargs)


@sharded(_T.register_hook)
def register_hook(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    spec = gradient_spec(x._spec)

    def on_local(grad: torch.Tensor) -> torch.Tensor | None:
        result = hook(wrap(grad, spec))
        return None if result is None else in_layout(result, spec)

    return local_of(x).register_hook(on_local)


@sharded(_T.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    reference = weakref.ref(x)
    return x._local.register_post_accumulate_grad_hook(lambda _: hook(reference()))


@sharded(_T.retain_grad)
def retain_grad(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> None:
    local_of(args[0]).retain_grad()
