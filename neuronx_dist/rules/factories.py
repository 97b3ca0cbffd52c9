"""Rules of functions that make tensors: constants, numbers in order, data, random numbers.

Kinds: "zero" and "uniform" for constants, "factory" for values that are the same on all ranks but differ by position
(arange, eye, tensor), "random" for draws, "copy_of_meta" where only shape and dtype of an operand are read and the
values are undefined (empty_like). The dims of a result have new labels. A random result of the shape of an operand
has the operand's labels, because its random stream must differ where the operand is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..torch_internals.tensors import tensor_factories
from .names import out_of_place
from .spec import ALL, Spec, elementwise, labels, operands, rule, same
from .views import ViewLabels, as_int

__all__: list[str] = []


def _forms(names: str) -> list[Any]:
    """The functions of these names, `torch.*` and `Tensor.*`."""
    return [function for name in names.split() for function in out_of_place(name)]


def _filled(size: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Spec:
    """Spec of `full(size, value)`; the value may be a tensor of one element."""
    builder = ViewLabels()
    values = [[()] * fill_value.dim()] if isinstance(fill_value, Tensor) else []
    return builder.spec(values, [builder.dims(as_int(length) for length in size)])


def _new_filled(input: Tensor, *args: Any, **kwargs: Any) -> Spec:
    spec = _filled(*args, **kwargs)
    return spec._replace(ins=(None, *spec.ins))


def _shape_of(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a result with the shape of an operand; `full_like` may have a tensor of one element as its value."""
    shape, *values = (x.shape for x in operands(args, kwargs))
    dims = labels(len(shape))
    return Spec((None, *(((),) * len(value) for value in values)), (dims,), dict(enumerate(shape)))


rule(*_forms("zeros new_zeros"), kind="zero")(None)
rule(torch.zeros_like, kind="zero")(_shape_of)
rule(*_forms("ones new_ones"), kind="uniform")(None)
rule(torch.ones_like, torch.full_like, kind="uniform")(_shape_of)
rule(torch.full, kind="uniform", linear=((0,),))(_filled)
rule(Tensor.new_full, kind="uniform", linear=((1,),))(_new_filled)
rule(*_forms("empty empty_strided empty_permuted new_empty new_empty_strided"), kind="copy_of_meta")(None)
rule(torch.empty_like, kind="copy_of_meta")(_shape_of)
rule(
    *_forms("arange range linspace logspace eye tril_indices triu_indices scalar_tensor"),
    *_forms("bartlett_window blackman_window hamming_window hann_window kaiser_window"),
    *(torch.fft.fftfreq, torch.fft.rfftfreq, torch.from_numpy, torch.frombuffer),
    kind="factory",
)(None)


def _data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs["data"] if "data" in kwargs else next(iter((*args, *kwargs.values())))


def _has_numbers(*args: Any, **kwargs: Any) -> bool:
    """Returns whether there is a number beside the tensors of the list."""
    data = _data(args, kwargs)
    return isinstance(data, (list, tuple)) and not all(isinstance(item, Tensor) for item in data)


@rule(*tensor_factories, kind="factory", linear=ALL, affine=_has_numbers, aliases=True)
def tensor(*args: Any, **kwargs: Any) -> Spec:
    """Spec of `torch.tensor`: of numbers, equal on all ranks; of a tensor, its dims; of tensors in a list, stacked."""
    tensors = operands(args, kwargs)
    data = _data(args, kwargs)
    if not tensors:
        return Spec((), ((),), {})
    if isinstance(data, Tensor):
        return same(data.shape)
    return Spec(tuple(((),) * x.dim() for x in tensors), (((0,),),), {0: len(data)})


@rule(
    Tensor.new_tensor, kind="factory", linear=ALL, affine=lambda input, *args, **kwargs: _has_numbers(*args, **kwargs)
)
def new_tensor(input: Tensor, data: Any, **kwargs: Any) -> Spec:
    spec = tensor(data)
    return spec._replace(ins=(None, *spec.ins))


# --- random numbers ---


def _drawn_like(*args: Any, **kwargs: Any) -> Spec:
    return same(operands(args, kwargs)[0].shape)


def _drawn_from(*args: Any, **kwargs: Any) -> Spec:
    """Spec of draws whose parameters are tensors, element by element."""
    return elementwise(*(x.shape for x in operands(args, kwargs)))


rule(*_forms("rand randn randint randperm"), kind="random", random=True)(None)
rule(torch.rand_like, torch.randn_like, torch.randint_like, kind="random", random=True)(_drawn_like)
rule(*_forms("normal bernoulli poisson binomial"), random=True)(_drawn_from)
rule(
    *(
        getattr(Tensor, name)
        for name in "normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ bernoulli_".split()
    ),
    kind="random",
    random=True,
    inplace=0,
)(_drawn_like)


@rule(torch.multinomial, Tensor.multinomial, random=True)
def multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Spec:
    dims = labels(input.ndim)
    why = "multinomial draws positions of the whole of it"
    sizes = {**dict(enumerate(input.shape)), input.ndim: as_int(num_samples)}
    return Spec((dims,), ((*dims[:-1], (input.ndim,)),), sizes, fixed={input.ndim - 1: why})


def _draws(*args: Any, **kwargs: Any) -> bool:
    """Returns True if this dropout call draws: training is on, and the rate is not 0."""
    named = {**dict(zip(("input", "p", "training", "inplace"), args)), **kwargs}
    return bool(named.get("training", True)) and named.get("p", 0.5) != 0


def _drawn_channels(after: int | None) -> Any:
    """Spec of dropout of channels: one draw covers the `after` last dims; None: all dims after the first two."""

    def spec(*args: Any, **kwargs: Any) -> Spec:
        shape = operands(args, kwargs)[0].shape
        if not _draws(*args, **kwargs):
            return same(shape)
        first = 2 if after is None else len(shape) - after
        return same(shape)._replace(fixed=dict.fromkeys(range(first, len(shape)), "a channel is dropped in all of it"))

    return spec


_ALPHA: dict[str, Any] = dict(linear=((0,),), affine=_draws, random=_draws)  # dropped elements get a constant, not 0
rule(F.dropout, torch.dropout, linear=((0,),), random=_draws, aliases=True)(_drawn_like)
rule(torch.dropout_, linear=((0,),), random=_draws, inplace=0)(_drawn_like)
rule(F.alpha_dropout, torch.alpha_dropout, aliases=True, **_ALPHA)(_drawn_like)
rule(torch.alpha_dropout_, inplace=0, **_ALPHA)(_drawn_like)
for _after, _function in enumerate((F.dropout1d, F.dropout2d, F.dropout3d), 1):
    rule(_function, linear=((0,),), random=_draws, aliases=True)(_drawn_channels(_after))
rule(torch.feature_dropout, linear=((0,),), random=_draws, aliases=True)(_drawn_channels(None))
rule(torch.feature_dropout_, linear=((0,),), random=_draws, inplace=0)(_drawn_channels(None))
rule(F.feature_alpha_dropout, torch.feature_alpha_dropout, aliases=True, **_ALPHA)(_drawn_channels(None))
rule(torch.feature_alpha_dropout_, inplace=0, **_ALPHA)(_drawn_channels(None))
rule(torch.native_dropout, random=True)(lambda input, *args: same(input.shape, outs=2))


# --- torch.nn.init: a mode receives some functions whole, the others as the tensor methods that they call ---

rule(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, kind="random", random=True, inplace=0)(_drawn_like)
rule(nn.init.constant_, kind="uniform", inplace=0)(_shape_of)


def _slopes_drawn(*args: Any, **kwargs: Any) -> bool:
    named = {**dict(zip(("input", "lower", "upper", "training"), args)), **kwargs}
    return bool(named.get("training", False))


rule(F.rrelu, torch.rrelu, random=_slopes_drawn)(_drawn_like)
rule(torch.rrelu_, random=_slopes_drawn, inplace=0)(_drawn_like)
