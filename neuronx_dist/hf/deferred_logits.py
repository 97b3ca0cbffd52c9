"""Logits of a swapped model's head in training, which are computed where code reads their values, and else never.

    hidden [b, s, h] -> head -> DeferredLogits [b, s, vocab/tp] -> causal_lm_loss     hidden, weight -> loss, in chunks
                                                                -> output.logits      computed when they are read

So no list of architectures says where the fused loss is right: a model that scales or caps its logits, an adapter on
the head, a hook or a loss of another kind reads them, which computes them, and the loss is that of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming
from ..parallel_layers.linear import ColumnParallelLinear, column_outputs
from ..program.recorder import is_recording
from ..sharded_functions.vocabulary import hide_padding
from ..spmd.local_holders import holds_local
from ..spmd.watching import active
from ..torch_internals.modules import has_backward_hooks
from ..torch_internals.tensors import DisableTorchFunction, make_wrapper_subclass, pytree, version_of

__all__ = ["DeferredLogits", "HeadCall", "computed", "defer_logits"]


@dataclass
class HeadCall:
    """The head's operands, from which the loss and the logits are computed, and the modes of the call.

    Attributes:
        sequence_dim: the sharded dim of `x`.
        autocast: the dtype of autocast; None: it was off.
        had_loss: was a loss computed from these operands?
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sequence_dim: int | None
    reduce_dtype: torch.dtype | None
    autocast: torch.dtype | None
    had_loss: bool = False

    def __post_init__(self) -> None:
        self.has_grad = torch.is_grad_enabled()
        self._states = [(_version(x), _sample(x) if x is not self.x else None) for x in self._operands().values()]

    def _operands(self) -> dict[str, torch.Tensor]:
        operands = {"input": self.x, "weight": self.weight, "bias": self.bias}
        return {name: x for name, x in operands.items() if x is not None}

    def requires_grad(self) -> bool:
        return self.has_grad and any(x.requires_grad for x in self._operands().values())

    def changed(self, by_value: bool) -> str:
        """Returns the name of an operand that was written since, or nothing; `by_value` waits for the device.

        A tensor's version does not count the writes of fused optimizers and those to `param.data`, which values show.
        """
        for (name, x), (version, sample) in zip(self._operands().items(), self._states):
            if _version(x) != version:
                return name
            if by_value and sample is not None and ((now := _sample(x)) is None or not torch.equal(now, sample)):
                return name
        return ""

    def autocasting(self) -> AbstractContextManager[Any]:
        device = self.x.device.type
        if device == "meta":  # which autocast does not know
            return nullcontext()
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The call's modes, wherever the logits are read."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.has_grad), self.autocasting():
            yield

    def logits(self) -> torch.Tensor:
        biases = [] if self.bias is None else [self.bias]
        operands = (self.x, [self.weight], biases, "tp", self.sequence_dim, self.reduce_dtype, self.weight)
        return column_outputs(*operands)[0]


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else version_of(x)


def _sample(x: torch.Tensor) -> torch.Tensor | None:
    """Returns the bytes of up to 1024 values of other rows and columns, where the tensor has values."""
    if active() is not None or x.device.type == "meta" or type(x) not in (torch.Tensor, nn.Parameter):
        return None
    rows = x.detach()[:: len(x) // 1024 + 1]
    return (rows.diagonal() if rows.dim() > 1 else rows).clone().view(torch.uint8)


def defer_logits(head: ColumnParallelLinear, required: str = "") -> None:
    """Makes the head of a model, whose output is each rank's shard of the logits, return `DeferredLogits` in training.

    Args:
        required: name of a model whose logits may not be read before the loss, which raises an error then.
    """
    head.deferring = partial(_deferred, required=required)


def _deferred(head: Any, input: torch.Tensor, required: str) -> DeferredLogits | None:
    is_followed = torch.compiler.is_compiling() or is_recording() or transforming()
    if is_followed or not head.training or not isinstance(input, torch.Tensor) or holds_local(input):
        return None
    # What accelerate offloads has its weight during the call alone; input of another width raises an error.
    if in_one_program(input) or hasattr(head, "_hf_hook") or input.shape[-1:] != head.weight.shape[1:]:
        return None
    if has_backward_hooks(head):
        return None
    device = input.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
    weight = head.weight
    if not autocasts and dtype != weight.dtype:
        return None
    sequence_dim = head.sequence_dimension if head.sequence_parallel_enabled and comm.size("tp") > 1 else None
    shape = [*input.shape[:-1], weight.shape[0]]
    if sequence_dim is not None:
        shape[sequence_dim] *= comm.size("tp")
    call = HeadCall(input, weight, head.bias, sequence_dim, head.reduce_dtype, dtype if autocasts else None)
    return DeferredLogits(shape, dtype, input.device, call, required)


def computed(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits as a plain tensor."""
    return logits.computed() if isinstance(logits, DeferredLogits) else logits


def _refuse_gradient(grad: torch.Tensor | None) -> None:
    if grad is None:  # of a function that passed the logits on
        return
    raise RuntimeError(
        f"a gradient {list(grad.shape)} of logits that were not computed would be lost: an autograd.Function, or the "
        "full backward hook of a module around the model, got output.logits of a model in training. Pass it (return "
        "from that module) output.logits + 0, or swap the model with fused_loss=False"
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
        call: HeadCall,
        required: str,
    ) -> DeferredLogits:
        requires_grad = call.requires_grad()
        logits: DeferredLogits = make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        logits._call, logits._required, logits._value, logits._vocabulary = call, required, None, 0
        if requires_grad:
            with DisableTorchFunction():
                logits.register_hook(_refuse_gradient)
        return logits

    _call: HeadCall
    _required: str
    _value: torch.Tensor | None
    _vocabulary: int  # whose padding is hidden; 0: it is not

    def take_call(self, vocabulary: int) -> HeadCall | None:
        """Returns the operands of the head, of which the loss is computed; None: the values were read before.

        As after the loss of logits, the columns after `vocabulary` are -inf.
        """
        if self._value is not None:
            return None
        self._refuse_changes(by_value=self._call.had_loss)  # the first loss is that of forward, and waits for nothing
        self._required, self._vocabulary, self._call.had_loss = "", vocabulary, True
        return self._call

    def computed(self) -> torch.Tensor:
        if self._value is None:
            self._refuse_changes(by_value=True)
            with self._call.modes():
                value = self._call.logits().to(self.dtype)
                self._value = hide_padding(value, self._vocabulary) if self._vocabulary else value
        if torch.is_grad_enabled() and self.requires_grad != self._call.requires_grad():
            raise RuntimeError(
                f"gradients of the logits {list(self.shape)} would be lost: a reentrant checkpoint returned logits "
                "that it had not computed. Use use_reentrant=False, or swap the model with fused_loss=False"
            )
        return self._value

    def _refuse_changes(self, by_value: bool) -> None:
        if name := self._call.changed(by_value):
            raise RuntimeError(
                f"the logits {list(self.shape)} of a call with labels were not computed, and now the head's {name} has "
                "changed: read output.logits before optimizer.step(), or swap the model with fused_loss=False"
            )

    def _cast(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the logits of another dtype, deferred too: the loss is computed in fp32 or better anyway.

        Their values are computed apart, so that writes into these logits do not change them.
        """
        if dtype == self.dtype:
            return self
        if self._value is not None:
            return self._value.to(dtype)
        result = DeferredLogits([*self.shape], dtype, self.device, self._call, self._required)
        result._vocabulary = self._vocabulary
        return result

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

        is_of_fsdp = len(args) > 1 and str(getattr(args[1], "__module__", "")).startswith("torch.")  # hooks each output
        asked = args[:1] if func in _OF_GRADIENTS and not is_of_fsdp else args[1] if func is torch.autograd.grad else ()
        for x in asked:
            if isinstance(x, DeferredLogits) and x._call.had_loss and x.requires_grad:
                raise RuntimeError(
                    f"{getattr(func, '__qualname__', func)} of the logits {list(x.shape)} after their loss, which was "
                    "computed without them, so that they get no gradient of it: swap the model with fused_loss=False"
                )

        def values(x: DeferredLogits) -> torch.Tensor:
            if x._required and x._value is None:
                raise RuntimeError(
                    f"fused_loss=True: {x._required} reads its logits {list(x.shape)} before the loss, by "
                    f"{getattr(func, '__qualname__', func)}, so that they are computed: swap it with fused_loss=None"
                )
            # torch's collectives have no gradient, and gloo's all-gather fails at times for a tensor that needs one.
            return x.computed().detach() if is_collective else x.computed()

        is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed.")
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
_OF_GRADIENTS: set[Any] = {torch.Tensor.retain_grad, torch.Tensor.register_hook, torch.Tensor.requires_grad_}
_OF_GRADIENTS |= {getattr(torch.Tensor, "grad").__get__, torch.Tensor.register_post_accumulate_grad_hook}  # noqa: B009
