"""Programs written call by call, for tests of the choice: no recorder, no weights, any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from neuronx_dist.program.program import Call, Program, Value, values_in


class Lines:
    """A program as it is written: `x = lines.input("x", 2, 4)`, `y = lines(F.linear, x, weight)`."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.values: dict[str, list[Value]] = {"input": [], "parameter": [], "buffer": [], "constant": []}
        self.calls: list[Call] = []
        self.module = ""

    def leaf(self, kind: str, path: str, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Value:
        value = Value(path.replace(".", "_"), kind, shape, dtype or self.dtype, grad, path)
        self.values[kind].append(value)
        return value

    def input(self, path: str, *shape: int, **options: Any) -> Value:
        return self.leaf("input", path, *shape, **options)

    def parameter(self, path: str, *shape: int) -> Value:
        return self.leaf("parameter", path, *shape, grad=True)

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        def on_meta(x: Any) -> Any:
            if isinstance(x, Value):
                return torch.empty(x.shape, dtype=x.dtype, device="meta")
            return type(x)(map(on_meta, x)) if isinstance(x, (tuple, list)) else x

        output = function(*map(on_meta, args), **{name: on_meta(x) for name, x in kwargs.items()})
        call = Call(function, args, kwargs, several=isinstance(output, (tuple, list)), module=self.module)
        grad = any(value.requires_grad for value in values_in((args, kwargs)))
        for result in output if call.several else [output]:
            name = f"{call.name}_{len(self.calls)}_{len(call.results)}"
            call.results.append(Value(name, "result", tuple(result.shape), result.dtype, grad, producer=call))
        call.flops = flops(call)
        self.calls.append(call)
        return call.results if call.several else call.results[0]

    def program(self, *outputs: Value, training: bool = True) -> Program:
        structure = pytree.tree_flatten(list(outputs))[1]
        inputs = pytree.tree_flatten(list(self.values["input"]))[1]
        v = self.values
        return Program(
            v["input"],
            inputs,
            v["parameter"],
            v["buffer"],
            v["constant"],
            self.calls,
            list(outputs),
            structure,
            training,
        )


def flops(call: Call) -> int:
    result = torch.Size(call.results[0].shape).numel()
    if call.function in (F.linear, torch.matmul):
        return 2 * result * call.args[0].shape[-1]
    if call.function is F.scaled_dot_product_attention:
        q, k = call.args[:2]
        return 4 * torch.Size(q.shape).numel() * k.shape[-2]
    return 0


def mlp(layers: int = 2, width: int = 16, batch: int = 8, loss: bool = True) -> Program:
    """Linear layers without biases, and the sum of what they give."""
    lines = Lines(torch.float64)
    x = lines.input("x", batch, width)
    for layer in range(layers):
        lines.module = f"layers.{layer}"
        x = lines(F.linear, x, lines.parameter(f"layers.{layer}.weight", width, width))
        x = lines(torch.relu, x)
    lines.module = ""
    return lines.program(lines(torch.sum, x) if loss else x)


def llama(
    layers: int = 1,
    *,
    hidden: int = 4096,
    ffn: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    batch: int = 1,
    seq: int = 4096,
) -> Program:
    """Decoder layers as Hugging Face's Llama computes them, from hidden states to hidden states."""
    lines, head = Lines(), hidden // heads
    x = lines.input("x", batch, seq, hidden, grad=True)
    cos, sin = (lines.input(name, batch, seq, head) for name in ("cos", "sin"))
    for layer in range(layers):
        x = attention(lines, f"layers.{layer}", x, cos, sin, heads, kv_heads)
        lines.module = f"layers.{layer}.post_attention_layernorm"
        y = norm(lines, x)
        weights = {
            name: lines.parameter(f"layers.{layer}.mlp.{name}.weight", *shape)
            for name, shape in {
                "gate_proj": (ffn, hidden),
                "up_proj": (ffn, hidden),
                "down_proj": (hidden, ffn),
            }.items()
        }
        lines.module = f"layers.{layer}.mlp.gate_proj"
        gate = lines(F.linear, y, weights["gate_proj"])
        lines.module = f"layers.{layer}.mlp.act_fn"
        gate = lines(F.silu, gate)
        lines.module = f"layers.{layer}.mlp.up_proj"
        up = lines(F.linear, y, weights["up_proj"])
        lines.module = f"layers.{layer}.mlp"
        product = lines(torch.Tensor.mul, gate, up)
        lines.module = f"layers.{layer}.mlp.down_proj"
        y = lines(F.linear, product, weights["down_proj"])
        lines.module = f"layers.{layer}"
        x = lines(torch.Tensor.add, x, y)
    return lines.program(x)


def attention(lines: Lines, path: str, x: Value, cos: Value, sin: Value, heads: int, kv_heads: int) -> Value:
    batch, seq, hidden = x.shape
    head = hidden // heads
    lines.module = f"{path}.input_layernorm"
    y = norm(lines, x)
    states = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        lines.module = f"{path}.self_attn.{name}_proj"
        weight = lines.parameter(f"{path}.self_attn.{name}_proj.weight", count * head, hidden)
        z = lines(F.linear, y, weight)
        lines.module = f"{path}.self_attn"
        z = lines(torch.Tensor.view, z, (batch, seq, -1, head))
        states[name] = lines(torch.Tensor.transpose, z, 1, 2)
    cos, sin = (lines(torch.Tensor.unsqueeze, table, 1) for table in (cos, sin))
    q, k = (rotated(lines, states[name], cos, sin) for name in "qk")
    k, v = (repeated(lines, z, heads // kv_heads) for z in (k, states["v"]))
    z = lines(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    z = lines(torch.Tensor.contiguous, lines(torch.Tensor.transpose, z, 1, 2))
    z = lines(torch.Tensor.reshape, z, (batch, seq, -1))
    lines.module = f"{path}.self_attn.o_proj"
    z = lines(F.linear, z, lines.parameter(f"{path}.self_attn.o_proj.weight", hidden, hidden))
    lines.module = path
    return lines(torch.Tensor.add, x, z)


def norm(lines: Lines, x: Value) -> Value:
    weight = lines.parameter(f"{lines.module}.weight", x.shape[-1])
    y = lines(torch.Tensor.to, x, torch.float32)
    square = lines(torch.Tensor.pow, y, 2)
    scale = lines(torch.rsqrt, lines(torch.Tensor.add, lines(torch.Tensor.mean, square, -1, keepdim=True), 1e-6))
    return lines(torch.Tensor.mul, weight, lines(torch.Tensor.to, lines(torch.Tensor.mul, y, scale), x.dtype))


def rotated(lines: Lines, x: Value, cos: Value, sin: Value) -> Value:
    half = x.shape[-1] // 2
    first = lines(torch.Tensor.__getitem__, x, (Ellipsis, slice(None, half)))
    second = lines(torch.Tensor.__getitem__, x, (Ellipsis, slice(half, None)))
    turned = lines(torch.cat, (lines(torch.Tensor.neg, second), first), dim=-1)
    return lines(torch.Tensor.add, lines(torch.Tensor.mul, x, cos), lines(torch.Tensor.mul, turned, sin))


def repeated(lines: Lines, x: Value, times: int) -> Value:
    batch, heads, seq, head = x.shape
    x = lines(torch.Tensor.__getitem__, x, (slice(None), slice(None), None, slice(None), slice(None)))
    x = lines(torch.Tensor.expand, x, batch, heads, times, seq, head)
    return lines(torch.Tensor.reshape, x, (batch, heads * times, seq, head))
