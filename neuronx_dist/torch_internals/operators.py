"""Operators of the dispatcher, of compiled code and of TorchScript."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# `OpOverload` and `OpOverloadPacket`, imported above, are `torch.ops.aten.add.Tensor` and `torch.ops.aten.add`;
# `TorchDispatchMode` sees every operator, and `disable_current_modes` is a context outside of all modes. Without them
# no memory is predicted, no write in place is recorded, and an example of an annotation is recorded as a call.

disable_current_modes = _disable_current_modes
_aten: Any = torch.ops.aten
_Function = TypeVar("_Function")

# Attention on the CPU with the logarithms of its sums, which merging blocks of keys needs. Without them: by hand.
cpu_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward

# Operators of `scaled_dot_product_attention`, whose work is counted where torch has no count.
attention_operators: set[Any] = {
    getattr(_aten, f"_scaled_dot_product_{name}")
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
}

# Products of groups of rows with different matrices, as layers of experts call. Without it those are not checked.
grouped_mm = _aten._grouped_mm.default

# Forms of `interpolate` that have no public operator: nearest-exact over 1, 2 and 3 dims, and antialiased.
# Without them `interpolate` gathers whole ShardTensors.
upsample_nearest_exact = tuple(getattr(_aten, f"_upsample_nearest_exact{dims}d") for dims in (1, 2, 3))
upsample_bilinear2d_aa, upsample_bicubic2d_aa = _aten._upsample_bilinear2d_aa, _aten._upsample_bicubic2d_aa

# Operators that `torch.profiler.record_function` calls. Without their rules the checker refuses a profiled forward.
record_function_enter = torch.ops.profiler._record_function_enter_new
record_function_exit = torch.ops.profiler._record_function_exit._RecordFunction

COMPILER = "torch._dynamo.eval_frame"  # loaded once something was compiled: only then need the checker say not to


def schema_of(operator: Any) -> Any:
    """Returns an operator's arguments and what it writes; without it writes in place are not seen."""
    return operator._schema


def name_of(packet: Any) -> str:
    """Returns `namespace::name` of an `OpOverloadPacket`, by which handlers of custom operators are registered."""
    return packet._qualified_op_name


def keep_order(operator: Any) -> None:
    """Forbids a compiler to drop an operator or to exchange two: without it ranks may communicate in other orders."""
    _register_effectful_op(operator, _EffectType.ORDERED)


def skip_in_compiler(function: _Function) -> _Function:
    """Decorates a function so that dynamo traces neither it nor what it calls, at no cost where nothing is compiled.

    `torch.compiler.disable` would cost microseconds a call.
    """
    untyped: Any = function
    untyped._torchdynamo_disable = True
    untyped._torchdynamo_disable_msg = (
        "exchanges and functions of ShardTensors communicate between graphs: leave fullgraph=True out"
    )
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(untyped.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


# Classes of scripted functions and methods. Without them the checker would let their calls pass unseen.
script_classes: tuple[type, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)


def python_function(scripted: Any) -> Any:
    """Returns the function that was scripted, which a check calls in its place; None if it is not known."""
    return getattr(scripted, "_torchdynamo_inline", None)


def wrap_script_module(module: Any) -> Any:
    """Returns the Python object of a C++ script module, which has its parameters."""
    return torch.jit._recursive.wrap_cpp_module(module)


def script_as(replacement: Any, function: Any) -> None:
    """Makes `torch.jit.script` read a function's replacement as the function; without it such code does not compile."""
    name = torch.jit._builtins._find_builtin(function)
    if name is not None:
        torch.jit._builtins._register_builtin(replacement, name)
