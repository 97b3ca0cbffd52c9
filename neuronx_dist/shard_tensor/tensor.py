"""`ShardTensor`: a tensor of which every rank of a mesh holds a part.

It is a `torch.Tensor` of the whole shape that holds a plain local tensor *with its own autograd graph*, and its layout
(`_spec`). A call arrives in `__torch_function__`, whose handler computes on local tensors and wraps the result. So
backward runs on plain tensors, and nothing is recorded twice.

The wrapper itself is *linked*: it is the output of an autograd function of its local tensor, so that foreign autograd
functions (those of FSDP and DDP, users' own) find a `grad_fn`. No other backward visits it. A wrapper that such a
function returned has a graph that its local tensor does not have: `local_of` takes it through a second function, once.

For `torch.compile` a function of ShardTensors is a break of the graph and runs in eager mode (`skip_in_compiler`):
Dynamo would trace the handlers' code, down to process groups and caches. Plain tensors between breaks are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from ..spmd import no_typecheck
from ..torch_internals.autograd import apply_without_transforms
from ..torch_internals.operators import skip_in_compiler
from ..torch_internals.tensors import (
    DisableTorchFunction,
    base_of_view,
    is_view,
    make_wrapper_subclass,
    pytree,
    refuse_address,
)
from ..torch_internals.transforms import transforms_active
from . import handlers
from .device_mesh import DeviceMesh, as_mesh
from .handlers import DISPATCH, FUNCTIONS, UNHANDLED, DTensorMet
from .local_shapes import check_plain, local_spec, weighed
from .local_views import dtensor_of, graded, local_of_dtensor, local_view
from .moves.redistribute import moved, nothing_of, redistributed
from .placements import Placement
from .spec import Offsets, ShardTensorSpec, gradient_spec, make_spec
from .typed import declared, laid_out, promoted

__all__ = [
    "MergedShardTensor",
    "OutsideShardTensor",
    "ShardTensor",
    "gradient_spec",
    "in_layout",
    "laid_out_gradient",
    "leave_leaf",
    "local_of",
    "wrap",
    "wrap_result",
    "wrap_view",
    "written",
]

_BASE: Any = torch.Tensor  # its properties, which this class has in another way


class ShardTensor(torch.Tensor):
    """A tensor that lives on the ranks of a device mesh. See the module's docstring for how it works.

    `distribute_tensor`, `scatter_tensor`, `from_local` and the factories make ShardTensors. `_spec` is the layout.

    Attributes:
        placements, device_mesh: of the layout.
        offsets: where this rank's shard begins, for each dim; called, as `x.offsets(mesh_dim=0)`, for each mesh dim.
    """

    __slots__ = ("_foreign", "_local", "_spec")

    holds_local = True  # SpmdTypeMode follows the handlers, and parallel layers hand them their functions

    _local: torch.Tensor
    _spec: ShardTensorSpec
    _family: list[ref[ShardTensor]]  # if it is or has a view: all that share its memory
    _used: torch.Tensor | None = None  # of `construct.shared_by_layers`: `_local` as R, in the same memory
    _rows_to: Placement | None = None  # of positions that a style looks up in an embedding: where the sum goes
    _foreign: bool  # made while gradients were off: a foreign autograd function may have wanted it a graph

    # --- the protocol of torch

    @classmethod
    @skip_in_compiler
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        if handler is None:
            handler = handlers.named_handler(func) or FUNCTIONS[UNHANDLED]
        try:
            return handler(func, types, args, kwargs or {})
        except DTensorMet:
            return handler(func, types, *without_dtensors(args, kwargs or {}))

    @classmethod
    @skip_in_compiler
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = DISPATCH.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
        else:
            handler = handlers.named_handler(func) or DISPATCH[UNHANDLED]
            result = handler(func, types, args, kwargs or {})
        for output in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(output, ShardTensor):  # the graph of what was called lies above, on wrappers
                output._foreign = True
        return result

    @staticmethod
    def as_laid_out(result: Any) -> Any:
        """Declares the results of a handler to the type checker: computed local tensors have their layouts' types."""
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, ShardTensor):
                laid_out(x._local, x._spec)
        return result

    # --- from and to other tensors

    @staticmethod
    @skip_in_compiler
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> ShardTensor:
        """Makes a ShardTensor whose part on this rank is `local_tensor`, in its graph.

        Args:
            device_mesh: None: that of the innermost `with mesh:`, else of the job (`current_mesh`).
            placements: None: Replicate everywhere.
            sharding_shapes: "infer": all ranks exchange their shapes, once. "chunk": shards are as `torch.chunk` cuts
                them. A dict from mesh dim to the shapes of all shards along it. Both of these communicate nothing, and
                must be equal on all ranks. At a mesh dim that is `Partial("avg")` a dict may have the shapes of the
                shards whose means the ranks have: if these differ they become a sum, by counts.
            global_shape: of the whole tensor, for "chunk"; None: every shard is as long as this one.
            run_check: False, as DTensor has it by default; True is refused.
            shape: DTensor's name of `global_shape`; "infer" is "chunk" with it.
            stride: accepted for DTensor's programs, without effect: the strides are those of `local_tensor`.
            grad_placements: what the gradient of `local_tensor` is, where it is not of the layout: Partial for a
                Replicate tensor whose gradients code before it sums over the ranks.

        Raises:
            ValueError: sizes that do not add up, that are not those of this rank's tensor, or, by "infer", dims other
                than the sharded ones that differ between ranks; `run_check=True`.
        """
        check_plain(local_tensor)
        if run_check:
            raise ValueError(
                "from_local(run_check=True) of torch's DTensor broadcasts the first rank's values of what is "
                "Replicate: use distribute_tensor(x, mesh, placements), which does, and leave run_check out"
            )
        if shape is not None:
            global_shape, sharding_shapes = shape, "chunk" if sharding_shapes == "infer" else sharding_shapes
        mesh = as_mesh(device_mesh, local_tensor.device.type)
        if not isinstance(sharding_shapes, str):
            local_tensor, placements = weighed(local_tensor, mesh, placements, sharding_shapes)
        spec = local_spec(local_tensor.shape, mesh, placements, sharding_shapes, global_shape)
        if grad_placements is not None:
            return wrap(graded(local_tensor, spec, grad_placements), spec)
        return wrap(declared(local_tensor, spec), spec)

    @staticmethod
    def from_dtensor(x: Any) -> ShardTensor:
        """Returns a torch DTensor as a ShardTensor, in its graph; that of a leaf has its gradient in `grad` too."""
        result = wrap(*local_of_dtensor(x))
        if x.is_leaf and result.requires_grad:
            result.retain_grad()
        return result

    def to_dtensor(self) -> Any:
        """Returns this tensor as a torch DTensor, in its graph. Shards that are no chunks are redistributed."""
        return dtensor_of(local_of(self), self._spec)

    # --- layouts

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def offsets(self) -> Offsets:
        return Offsets(self._spec)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self._local

    @skip_in_compiler
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's part, a plain tensor in the same autograd graph.

        It shares memory with this tensor, but for a Partial one: what is reduced in place there would be reduced again.
        Where it has a graph, torch refuses to modify it in place: use the functions of the ShardTensor, or clone().

        Args:
            grad_placements: what the gradient that comes back is, where it is not of this tensor's own layout: Partial
                for a Replicate tensor that each rank uses on its own.
        """
        return local_view(local_of(self), self._spec, grad_placements)

    @skip_in_compiler
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gathers the complete tensor on every rank; differentiable. `grad_placements` as in `to_local`."""
        whole = self._spec.replicated()
        full = redistributed(local_of(self), self._spec, whole)
        return full if grad_placements is None else local_view(full, whole, grad_placements)

    @skip_in_compiler
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: Sequence[Sequence[int] | None] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        """Returns the tensor in another layout, differentiable; itself where layout and dtype are equal.

        Args:
            device_mesh: None: its own. To another mesh, of any ranks, every rank of the job calls this alike; one that
                is no part of a mesh has an empty part of what lies there, and takes part in backward all the same.
            placements: None: Replicate everywhere, or its own if only `sizes` is wanted.
            sizes: for each mesh dim the sizes of its shards; None: chunks.
            async_op: whether to return while the values travel, by one exchange; whoever asks for them first waits.
            forward_dtype: dtype in which the values travel, and of the result; the gradient travels in it, too, and
                gets the dtype of this tensor then. None: the tensor's.
            backward_dtype: None, or the dtype of the result: the gradient travels in no other one.

        Raises:
            NotImplementedError: `async_op=True` of a Partial that is no sum.
            ValueError: see `make_spec`; another `backward_dtype`.
        """
        if forward_dtype is not None or backward_dtype is not None:
            dtype = forward_dtype or self.dtype
            if backward_dtype not in (None, dtype):
                raise ValueError(
                    f"redistribute: backward_dtype={backward_dtype}, and the result is {dtype}, in which its gradient "
                    "travels: pass the same dtype as forward_dtype, or leave it out"
                )
            converted: Any = self.to(dtype)
            return converted.redistribute(device_mesh, placements, sizes=sizes, async_op=async_op)
        if placements is None and sizes is not None:
            placements = self._spec.placements
        target = make_spec(as_mesh(device_mesh or self._spec.mesh), placements, self._spec.shape, sizes)
        if target is self._spec:
            return self
        if async_op:
            result: ShardTensor = FUNCTIONS[ShardTensor.redistribute](self, target)
            return result
        return wrap(moved(local_of(self), self._spec, target), target)

    # --- autograd

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad or (self._foreign and _wrapper_requires_grad(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        if not self._foreign:
            return self._local.is_leaf
        with DisableTorchFunction():  # a parameter is a leaf in both graphs
            return self._local.is_leaf and bool(_BASE.is_leaf.__get__(self))

    @property
    def grad(self) -> ShardTensor | None:
        """The gradient: of the same layout, Replicate where the tensor is Partial."""
        grad = self._local.grad
        return None if grad is None else laid_out_gradient(grad, self._spec)

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        self._local.grad = None if grad is None else in_layout(grad, gradient_spec(self._spec))

    @grad.deleter
    def grad(self) -> None:
        self._local.grad = None

    @property
    def data(self) -> ShardTensor:
        return wrap(self._local.data, self._spec)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        local = in_layout(value, self._spec)
        self._local.data, self._used = local, None
        with DisableTorchFunction():
            _BASE.data.__set__(self, wrap(local.detach(), self._spec))

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        local_of(self).requires_grad_(requires_grad)
        self._foreign = self._foreign and not requires_grad  # made while gradients were off, and a leaf all the same
        with DisableTorchFunction():
            torch.Tensor.requires_grad_(self, requires_grad)
            if requires_grad and _BASE.is_leaf.__get__(self):
                torch.Tensor.register_post_accumulate_grad_hook(self, _pass_on)
        return self

    # --- copies

    def __deepcopy__(self, memo: Any) -> ShardTensor:
        if id(self) in memo:
            copied: ShardTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError("only leaf ShardTensors support deepcopy, as with torch.Tensor")
        local = self._local.detach().clone()
        result = memo[id(self)] = as_leaf(local, self._spec, self._local.requires_grad)
        if self._local.grad is not None:
            result._local.grad = self._local.grad.clone()
        if getattr(self, "_is_param", False):
            result._is_param = True
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_param = bool(getattr(self, "_is_param", False))
        return rebuilt, (self._local.detach(), self._spec, self._local.requires_grad, is_param)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardTensor(local={self._local!r}, placements={self._spec.placements}, shape={tuple(self._spec.shape)})"
        )

    # --- handlers and promotion; names as the tutorial's and PhysicsNeMo's

    register_function_handler = staticmethod(handlers.register_function_handler)
    register_dispatch_handler = staticmethod(handlers.register_dispatch_handler)
    register_named_function_handler = staticmethod(handlers.register_named_function_handler)
    get_promotion_mode = staticmethod(handlers.get_promotion_mode)
    set_promotion_mode = staticmethod(handlers.set_promotion_mode)
    promotion_mode = staticmethod(handlers.promotion_mode)


class MergedShardTensor(ShardTensor):
    """A ShardTensor with a dim that several mesh dims shard: its functions are computed on a mesh that merges them."""

    __slots__ = ()

    @classmethod
    @skip_in_compiler
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS[MergedShardTensor.__torch_function__]
        try:
            return handler(func, types, args, kwargs or {})
        except DTensorMet:
            return handler(func, types, *without_dtensors(args, kwargs or {}))

    @classmethod
    @skip_in_compiler
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return FUNCTIONS[MergedShardTensor.__torch_dispatch__](func, types, args, kwargs or {})


class OutsideShardTensor(ShardTensor):
    """A ShardTensor on a rank outside of its mesh: its functions do nothing there, or are refused (`outside.py`)."""

    __slots__ = ()

    @classmethod
    @skip_in_compiler
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS[OutsideShardTensor.__torch_function__](func, types, args, kwargs or {})


def laid_out_gradient(grad: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """Returns the gradient of a local tensor as that of the ShardTensor.

    Raises:
        RuntimeError: the tensor is Partial by another reduction than a sum or a mean.
    """
    if any(str(spec.placements[m].reduce_op) not in ("sum", "avg") for m in spec.partial):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the gradient of a tensor that is {list(spec.placements)} differs between the ranks, so that no layout "
            "describes it: require the gradient of the local tensor, ShardTensor.from_local(part.requires_grad_(), ..)"
        )
    return wrap(grad, gradient_spec(spec))


def _new(local: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
    class_ = ShardTensor
    if not spec.is_ordinary:
        class_ = OutsideShardTensor if spec.merged is None else MergedShardTensor
    # by position: torch takes 0.2 us less to read them (size, strides, offset, memory format, dtype, layout, device)
    result: ShardTensor = make_wrapper_subclass(
        class_, spec.shape, None, None, None, local.dtype, torch.strided, local.device
    )
    refuse_address(result)
    result._local = local
    result._spec = spec
    result._foreign = False
    return result


class _Link(torch.autograd.Function):
    """Autograd function from a local tensor to its wrapper."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
        ctx.spec = spec
        return _new(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return in_layout(grad, gradient_spec(ctx.spec)), None


class _Relink(torch.autograd.Function):
    """Autograd function from a local tensor that was modified in place to its wrapper."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, local: torch.Tensor) -> ShardTensor:
        ctx.spec = x._spec
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, in_layout(grad, gradient_spec(ctx.spec))


def _pass_on(x: torch.Tensor) -> None:
    """Passes the gradient that a foreign autograd function sent to a leaf's wrapper on to its local tensor."""
    assert isinstance(x, ShardTensor)
    with DisableTorchFunction():
        grad = _BASE.grad.__get__(x)
        _BASE.grad.__set__(x, None)
    x._local.backward(in_layout(grad, gradient_spec(x._spec)))


class _Unlink(torch.autograd.Function):
    """Autograd function from a wrapper that a foreign function returned to a local tensor in its graph."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor) -> torch.Tensor:
        ctx.spec = x._spec
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardTensor:
        return wrap(grad, gradient_spec(ctx.spec))


# `Function.apply` without its look at functorch's transforms, which do not go through wrappers.
_link: Callable[..., ShardTensor] = apply_without_transforms(_Link)
_unlink: Callable[..., torch.Tensor] = apply_without_transforms(_Unlink)
_relink: Callable[..., ShardTensor] = apply_without_transforms(_Relink)


def leave_leaf(x: ShardTensor) -> None:
    """Gives `x` of `from_local(leaf)` a local tensor behind the leaf in its graph, which torch lets functions modify.

    A tensor that is a leaf itself, or that has views, stays as it is: torch refuses to modify its local tensor.
    """
    local = x._local
    if local.requires_grad and local.is_leaf and torch.is_grad_enabled() and not getattr(x, "_family", None):
        with DisableTorchFunction():
            is_leaf = _BASE.is_leaf.__get__(x)
        if not is_leaf:
            x._local, x._used = _unlink(x), None


def written(x: ShardTensor) -> ShardTensor:
    """Links `x`, whose local tensor was modified in place, and its views to the new graph. Returns `x`."""
    if torch.is_grad_enabled() and x._local.grad_fn is not None:  # of a view without a graph torch would not say
        sharing = [reference() for reference in getattr(x, "_family", ())] or [x]
        with DisableTorchFunction():
            for view in sharing:
                if view is not None and view._local.grad_fn is not None:
                    _relink(view, view._local)
    return x


def without_dtensors(args: Any, kwargs: Any) -> Any:
    """Returns arguments in which each DTensor of torch is a ShardTensor, in its layout and graph."""
    return pytree.tree_map_only(DTensor, lambda x: wrap(*local_of_dtensor(x)), (args, kwargs))


def wrap(local: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """Returns the ShardTensor whose local tensor on this rank is `local`."""
    if local.requires_grad:
        return _new(local, spec) if transforms_active() else _link(local, spec)
    result = _new(local, spec)
    result._foreign = not torch.is_grad_enabled()
    return result


def wrap_view(local: torch.Tensor, spec: ShardTensorSpec, source: ShardTensor) -> ShardTensor:
    """Wraps a view of the local tensor of `source`; the two are related, so that a write into one is known to both."""
    result = wrap(local, spec)
    if torch.is_grad_enabled() and is_view(local):
        family: list[ref[ShardTensor]] = getattr(source, "_family", None) or [ref(source)]
        if len(family) % 64 == 0:  # many are gone
            family[:] = [reference for reference in family if reference() is not None]
        family.append(ref(result))
        source._family = result._family = family
    return result


def wrap_result(local: torch.Tensor, spec: ShardTensorSpec, operands: Sequence[Any]) -> ShardTensor:
    """Wraps a result of a function of these operands; by `wrap_view` if it is a view of one of them."""
    if is_view(local):
        for x in operands:
            if isinstance(x, ShardTensor) and base_of_view(local) is (
                base_of_view(x._local) if is_view(x._local) else x._local
            ):
                return wrap_view(local, spec, x)
    return wrap(local, spec)


def local_of(x: ShardTensor) -> torch.Tensor:
    """Returns the local tensor of `x`, in its graph."""
    if x._foreign and torch.is_grad_enabled():
        if not x._local.requires_grad and _wrapper_requires_grad(x):
            x._local = _unlink(x)
        x._foreign = False
    return x._local


def _wrapper_requires_grad(x: ShardTensor) -> bool:
    with DisableTorchFunction():
        return bool(_BASE.requires_grad.__get__(x))


def as_leaf(local: torch.Tensor, spec: ShardTensorSpec, requires_grad: bool) -> ShardTensor:
    """Returns a ShardTensor that is a leaf, from a leaf `local`."""
    with no_typecheck():  # how it was cut says nothing
        local = local.detach()
    result = _new(declared(local, spec), spec)
    return result.requires_grad_(True) if requires_grad else result


def in_layout(x: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """Returns the local tensor of `x` in a layout; a plain tensor counts as replicated."""
    if isinstance(x, ShardTensor):
        return redistributed(local_of(x), x._spec, spec)
    if spec.mesh.communicators is None:
        return nothing_of(x, spec.local_shape)
    return redistributed(promoted(x, spec.mesh), make_spec(spec.mesh, None, x.shape), spec)


def rebuilt(local: torch.Tensor, spec: ShardTensorSpec, requires_grad: bool, is_param: bool) -> ShardTensor:
    result = as_leaf(local, spec, requires_grad)
    if is_param:
        result._is_param = True
    return result
