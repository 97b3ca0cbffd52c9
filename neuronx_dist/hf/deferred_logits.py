"""Logits of a swapped model's head in training, which are computed where code reads their values, and else never.

    hidden [b, s, h] -> head -> DeferredLogits [b, s, vocab/tp] -> causal_lm_loss     hidden, weight -> loss, in chunks
                                                                -> output.logits      computed when they are read

So no list of architectures says where the fused loss is right: a model that scales or caps its logits, an adapter on
the head, a hook or a loss of another kind reads them, which computes them, and the loss is that of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import comm
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming
from ..parallel_layers.linear import ColumnParallelLinear
from ..program.recorder import is_recording
from ..sharded_functions.vocabulary import hide_padding
from ..spmd.local_holders import holds_local
from ..torch_internals.tensors import DisableTorchFunction, make_wrapper_subclass, pytree, version_of

__all__ = ["DeferredLogits", "HeadCall", "computed", "defer_logits"]


class HeadCall(NamedTuple):
    """The head's operands, from which the loss is computed; `sequence_dim`: the sharded dim of `x`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sequence_dim: int | None
    reduce_dtype: torch.dtype | None


def defer_logits(head: ColumnParallelLinear, required: str = "") -> None:
    """Makes the head of a model, whose output is each rank's shard of the logits, return `DeferredLogits` in training.

    Args:
        required: name of a model whose logits may not be read before the loss, which raises an error then.
    """
    forward = partial(_forward, head, head.forward, required)
    forward.is_optional = True  # type: ignore[attr-defined]  # an adapter of the head goes without
    vars(head)["forward"] = forward


def _forward(head: Any, forward: Callable[..., Any], required: str, input: torch.Tensor) -> Any:
    is_followed = torch.compiler.is_compiling() or is_recording() or transforming()
    if is_followed or not head.training or not isinstance(input, torch.Tensor) or holds_local(input):
        return forward(input)
    # What accelerate offloads has its weight during the call alone; input of another width raises an error.
    if in_one_program(input) or hasattr(head, "_hf_hook") or input.shape[-1:] != head.weight.shape[1:]:
        return forward(input)
    device = input.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
    if not autocasts and dtype != head.weight.dtype:
        return forward(input)
    sequence_dim = head.sequence_dimension if head.sequence_parallel_enabled and comm.size("tp") > 1 else None
    shape = [*input.shape[:-1], head.weight.shape[0]]
    if sequence_dim is not None:
        shape[sequence_dim] *= comm.size("tp")
    weight, grad = head.weight, torch.is_grad_enabled()
    version = version_of(weight)

    def compute() -> torch.Tensor:
        if head.weight is not weight or version_of(weight) != version:
            raise RuntimeError(
                f"the logits {shape} of a call with labels were not computed, and now the head's weight has changed: "
                "read output.logits before optimizer.step(), or swap the model with fused_loss=False"
            )
        cast = torch.autocast(device, dtype) if autocasts else nullcontext()
        with torch.set_grad_enabled(grad), cast:
            logits: torch.Tensor = forward(input)
            return logits

    call = HeadCall(input, weight, head.bias, sequence_dim, head.reduce_dtype)
    requires_grad = grad and any(x is not None and x.requires_grad for x in call[:3])
    return DeferredLogits(shape, dtype, input.device, requires_grad, compute, call, required)


def computed(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits as a plain tensor."""
    return logits.computed() if isinstance(logits, DeferredLogits) else logits


def _refuse_gradient(grad: torch.Tensor | None) -> None:
    if grad is None:  # of a function that passed the logits on
        return
    raise RuntimeError(
        f"a gradient {list(grad.shape)} of logits that were not computed would be lost: an autograd.Function got "
        "output.logits of a model in training. Pass it output.logits + 0, or swap the model with fused_loss=False"
    )


class DeferredLogits(torch.Tensor):
    """Shape, dtype and device of logits `[.., vocab/tp]`; functions of torch that read values compute them, once.

    Under sequence parallelism that gathers the head's input: all ranks of tp read them then, or none.
    """

    is_deferred = True  # for the checker, which follows what the functions of this class call

    @staticmethod
    def __new__(
        cls: Any,
        shape: list[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        compute: Callable[[], torch.Tensor],
        call: HeadCall | None,
        required: str,
    ) -> DeferredLogits:
        logits: DeferredLogits = make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        logits._compute, logits._call, logits._required = compute, call, required
        logits._value, logits._vocabulary = None, 0
        if requires_grad:
            with DisableTorchFunction():
                logits.register_hook(_refuse_gradient)
        return logits

    _compute: Callable[[], torch.Tensor]
    _call: HeadCall | None
    _required: str
    _value: torch.Tensor | None
    _vocabulary: int  # whose padding is hidden; 0: it is not

    def take_call(self, vocabulary: int) -> HeadCall | None:
        """Returns the operands of the head, of which the loss is computed; None: the values were read before.

        As after the loss of logits, the columns after `vocabulary` are -inf.
        """
        if self._value is not None:
            return None
        self._required, self._vocabulary = "", vocabulary
        return self._call

    def computed(self) -> torch.Tensor:
        if self._value is None:
            value = self._compute()
            self._value = hide_padding(value, self._vocabulary) if self._vocabulary else value
            self._call = None
        return self._value

    def _cast(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the logits of another dtype, deferred too: the loss is computed in fp32 or better anyway."""
        if dtype == self.dtype:
            return self
        if self._value is not None:
            return self._value.to(dtype)
        return DeferredLogits(
            [*self.shape],
            dtype,
            self.device,
            self.requires_grad,
            lambda: self.computed().to(dtype),
            self._call,
            self._required,
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_NO_VALUES:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.to and len(args) == 2 and not kwargs and args[1] in _WIDER.values():
            return args[0]._cast(args[1])
        if func in _WIDER:
            return args[0]._cast(_WIDER[func])

        def values(x: DeferredLogits) -> torch.Tensor:
            if x._required and x._value is None:
                raise RuntimeError(
                    f"fused_loss=True: {x._required} reads its logits {list(x.shape)} before the loss, by "
                    f"{getattr(func, '__qualname__', func)}, so that they are computed: swap it with fused_loss=None"
                )
            return x.computed()

        args, kwargs = pytree.tree_map_only(DeferredLogits, values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} got logits that were not computed, past torch's functions: pass it output.logits + 0, or swap the "
            "model with fused_loss=False"
        )


# Models and accelerate convert logits to fp32, in which the loss is computed anyway.
_WIDER = {torch.Tensor.float: torch.float32, torch.Tensor.double: torch.float64}
_OF_NO_VALUES = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement}
_OF_NO_VALUES |= {torch.Tensor.__len__, torch.Tensor.is_floating_point, torch.Tensor.element_size}
_OF_NO_VALUES |= {
    getattr(torch.Tensor, name).__get__
    for name in "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_meta nbytes itemsize".split()
}
