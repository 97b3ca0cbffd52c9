"""Programs and divisions written by hand, for what comes after recording and choosing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist.program.program import Call, Division, LocalCall, Program, Strategy, Value
from neuronx_dist.spmd import I, P, R, S

WIDTH = 8


class Pair(nn.Module):
    """Two linear layers, the first by columns, the second by rows, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)])
        self.spare = nn.Linear(2, 2)  # nothing reads it

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = self.layers[1](torch.tanh(self.layers[0](data["x"])))
        return {"loss": (x - data["target"]).pow(2).sum(), "rows": (x,)}


def pair(size: int) -> tuple[nn.Module, Division, dict[str, Any]]:
    """`Pair`, its division over `size` ranks, and arguments."""
    torch.manual_seed(0)
    module = Pair().double()
    arguments = {"data": {"x": torch.randn(4, WIDTH).double(), "target": torch.randn(4, WIDTH).double()}}

    def value(name: str, kind: str, shape: tuple[int, ...], path: str = "", grad: bool = True) -> Value:
        return Value(name, kind, shape, torch.float64, grad, path)

    x, target = (value(name, "input", (4, WIDTH), f"data.{name}", False) for name in ("x", "target"))
    w0 = value("layers_0_weight", "parameter", (2 * WIDTH, WIDTH), "layers.0.weight")
    b0 = value("layers_0_bias", "parameter", (2 * WIDTH,), "layers.0.bias")
    w1 = value("layers_1_weight", "parameter", (WIDTH, 2 * WIDTH), "layers.1.weight")
    calls: list[Call] = []
    strategies: dict[Call, Strategy] = {}

    def call(
        name: str, shape: tuple[int, ...], types: tuple[Any, ...], result: Any, function: Any, *args: Any
    ) -> Value:
        output = value(name, "result", shape)
        call = Call(function, args, {}, [output], where=f"model.py:{len(calls)}", source="...", module="layers")
        output.producer = call
        calls.append(call)
        strategies[call] = Strategy("by hand", types, (result,), LocalCall(function, args, {}))
        return output

    columns = (R, S(0), S(0))
    h = call("linear", (4, 2 * WIDTH), columns, S(1), F.linear, x, w0, b0)
    h = call("tanh", (4, 2 * WIDTH), (S(1),), S(1), torch.tanh, h)
    y = call("linear_1", (4, WIDTH), (S(1), S(1)), P, F.linear, h, w1)
    d = call("sub", (4, WIDTH), (I, I), I, torch.Tensor.sub, y, target)
    p = call("pow_1", (4, WIDTH), (I,), I, torch.Tensor.pow, d, 2)
    loss = call("sum_1", (), (I,), I, torch.Tensor.sum, p)
    structure = pytree.tree_structure(arguments)
    result = pytree.tree_structure({"loss": 0, "rows": (0,)})
    program = Program([x, target], structure, [w0, b0, w1], [], [], calls, [loss, y], result, True, [x, target])
    types = {x: R, target: R, w0: S(0), b0: S(0), w1: S(1)}
    return module, Division(program, "tp", size, strategies, types), arguments
