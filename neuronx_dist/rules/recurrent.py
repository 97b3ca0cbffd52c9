"""Rules of recurrent networks, as torch.nn's modules call them: samples are independent, all other dims mix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .spec import Spec, operands, rule
from .views import ViewLabels

__all__: list[str] = []

_STEPS = "the steps of a recurrent network follow one another along it"
_WEIGHTS = "every step of a recurrent network sums over it"


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Returns True for arguments `(data, batch_sizes, hx, params, ..)`, not `(input, hx, params, ..)`."""
    return isinstance(args[3], (list, tuple))


def _draws(*args: Any) -> bool:
    dropout, train = args[6:8] if _is_packed(args) else args[5:7]
    return bool(dropout) and bool(train)


def _samples_alone(builder: ViewLabels, tensors: list[Tensor], dims: list[int], count: int) -> list[list[Any]]:
    """Returns the dims of the tensors; dim `dims[i]` of tensor i is the samples; further tensors are weights."""
    samples = (builder.new(count),)
    at = [*dims, *[-1] * (len(tensors) - len(dims))]
    return [
        [samples if d == sample_dim else (builder.new(size, _WEIGHTS),) for d, size in enumerate(x.shape)]
        for x, sample_dim in zip(tensors, at)
    ]


def _network(states: int) -> Any:
    def spec(*args: Any) -> Spec:
        """Spec of the steps' outputs and the last states: `[steps, samples, ..]`, swapped with `batch_first`."""
        tensors = operands(args, {})
        builder = ViewLabels()
        at = 2 if _is_packed(args) else 1
        x, last = tensors[0], tensors[at : at + states]
        both = bool(args[8 if _is_packed(args) else 7])
        width = last[0].shape[-1] * (1 + both)  # of the returned states, which may be projected
        if _is_packed(args):  # samples of several lengths, one after the other
            ins = [[(builder.new(size, _STEPS),) for size in tensor.shape] for tensor in tensors]
            return builder.spec(
                ins, [[ins[0][0], (builder.new(width),)], *(builder.dims(tensor.shape) for tensor in last)]
            )
        along = 0 if args[8] else 1
        ins = _samples_alone(builder, tensors, [along, *[1] * states], x.shape[along])
        samples = ins[0][along]
        steps = (builder.new(x.shape[1 - along]),)
        out = [samples, steps] if args[8] else [steps, samples]
        ends = [[(builder.new(tensor.shape[0]),), samples, (builder.new(tensor.shape[2]),)] for tensor in last]
        return builder.spec(ins, [[*out, (builder.new(width),)], *ends])

    return spec


def _cell(states: int) -> Any:
    def spec(*args: Any, **kwargs: Any) -> Spec:
        """Spec of one step, whose results are the new states `[samples, ..]`."""
        tensors = operands(args, kwargs)
        builder = ViewLabels()
        ins = _samples_alone(builder, tensors, [0] * (1 + states), tensors[0].shape[0])
        return builder.spec(ins, [[ins[0][0], (builder.new(tensors[1].shape[-1]),)]] * states)

    return spec


rule(torch.lstm, random=_draws)(_network(2))
rule(torch.gru, torch.rnn_tanh, torch.rnn_relu, random=_draws)(_network(1))
rule(torch.lstm_cell)(_cell(2))
rule(torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)(_cell(1))
