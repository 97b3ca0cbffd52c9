"""Rules of loss functions: reduction "none" keeps the dims, "sum" and "mean" reduce them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .spec import Spec, elementwise, labels, operands, rule
from .views import ViewLabels

__all__: list[str] = []

CLASSES = "cross entropy normalises over it: use parallel_cross_entropy"


def _reduction(kwargs: dict[str, Any]) -> str:
    """Returns "none", "sum", "mean" or "batchmean", also from the old arguments `size_average` and `reduce`."""
    if kwargs.get("size_average") is None and kwargs.get("reduce") is None:
        reduction_name = kwargs.get("reduction", "mean")
        return reduction_name if isinstance(reduction_name, str) else ("none", "mean", "sum")[reduction_name]
    if kwargs.get("reduce") is False:
        return "none"
    return "sum" if kwargs.get("size_average") is False else "mean"


def _ended(spec: Spec, reduction: str) -> Spec:
    """Spec of one loss per element, with its dims reduced."""
    if reduction == "none":
        return spec
    over = {label for dim in spec.outs[0] for label in dim}
    reduced = dict.fromkeys(over, "sum" if reduction == "batchmean" else reduction)
    if reduction == "batchmean" and spec.outs[0] and spec.outs[0][0]:
        reduced[spec.outs[0][0][0]] = "mean"
    return spec._replace(outs=((),), reduced=reduced)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: str) -> dict[str, Any]:
    return {**dict(zip(names.split(), args)), **kwargs}


def _elementwise(names: str, default: str = "mean") -> Callable[..., Spec]:
    """Builder for a loss of each element; `names`: of the arguments; `default`: the reduction if a call names none."""

    def spec(*args: Any, **kwargs: Any) -> Spec:
        shapes = [x.shape for x in operands(args, kwargs)]
        return _ended(elementwise(*shapes), _reduction({"reduction": default, **_named(args, kwargs, names)}))

    return spec


_OLD = "input target size_average reduce reduction"
rule(F.mse_loss, F.l1_loss, F.soft_margin_loss)(_elementwise(_OLD))
rule(F.smooth_l1_loss)(_elementwise(_OLD + " beta"))
rule(F.gaussian_nll_loss)(_elementwise("input target var full eps reduction"))
rule(F.huber_loss)(_elementwise("input target reduction delta weight"))
rule(F.kl_div)(_elementwise(_OLD + " log_target"))
rule(F.poisson_nll_loss)(_elementwise("input target log_input full size_average eps reduce reduction"))
rule(F.hinge_embedding_loss)(_elementwise("input target margin size_average reduce reduction"))
rule(F.margin_ranking_loss)(_elementwise("input1 input2 target margin size_average reduce reduction"))
# the functions under these in torch, where the reduction is a number; without a number there is none
_OF_TORCH: dict[Callable[..., Any], str] = {
    torch.kl_div: "input target reduction",
    torch.hinge_embedding_loss: "input target margin reduction",
    torch.margin_ranking_loss: "input1 input2 target margin reduction",
    torch.poisson_nll_loss: "input target log_input full eps reduction",
    torch.binary_cross_entropy_with_logits: "input target weight pos_weight reduction",
}
for _function, _names in _OF_TORCH.items():
    rule(_function)(_elementwise(_names, "none"))


rule(F.binary_cross_entropy, F.binary_cross_entropy_with_logits)(
    _elementwise("input target weight size_average reduce reduction pos_weight")
)

_CLASSES = "input target weight size_average ignore_index reduce reduction label_smoothing"


def _by_class(args: tuple[Any, ...], kwargs: dict[str, Any], why: str, looked_up: bool) -> Spec:
    """Spec of a loss of scores `[N, C, ...]` (or `[C]`) and targets `[N, ...]`, or a target score for each class."""
    named = _named(args, kwargs, _CLASSES)
    input, target = named["input"], named["target"]
    builder = ViewLabels()
    scores = builder.dims(input.shape)
    at = 0 if input.dim() == 1 else 1
    classes = scores[at]
    builder.fixed[classes[0]] = why
    rest = scores[:at] + scores[at + 1 :]
    if looked_up:
        builder.looked_up.add(classes[0])
    ins = [scores, scores if target.dim() == input.dim() else rest]
    for value in operands(args, kwargs)[2:]:
        ins.append([classes] * value.dim())
    reduction = _reduction(named)
    probabilities = target.dim() == input.dim() and target.is_floating_point()
    if reduction == "mean" and not probabilities:  # over the targets that are not ignored, weighted
        reduction = "mean_of_valid" if named.get("weight") is None else "weighted_mean"
    return _ended(builder.spec(ins, [rest]), reduction)


@rule(F.cross_entropy)
def cross_entropy(*args: Any, **kwargs: Any) -> Spec:
    return _by_class(args, kwargs, CLASSES, False)


@rule(F.nll_loss, linear=((0,),))
def nll_loss(*args: Any, **kwargs: Any) -> Spec:
    return _by_class(args, kwargs, "the targets index all classes: use parallel_cross_entropy", True)


def _over_last(names: str, count: int, why: str) -> Callable[..., Spec]:
    """Builder for a loss of each row of `count` operands; others have one value per row, or are reduced too."""

    def spec(*args: Any, **kwargs: Any) -> Spec:
        tensors = operands(args, kwargs)
        elementwise_spec = elementwise(*(x.shape for x in tensors[:count]))
        ndim = len(elementwise_spec.outs[0])
        rows = labels(ndim - 1)
        ins = elementwise_spec.ins + tuple(rows[len(rows) - x.dim() :] if x.dim() else () for x in tensors[count:])
        spec = elementwise_spec._replace(ins=ins, outs=(rows,), fixed={ndim - 1: why})
        return _ended(spec, _reduction(_named(args, kwargs, names)))

    return spec


_MARGINS = "anchor positive negative margin p eps swap size_average reduce reduction"
rule(F.triplet_margin_loss)(_over_last(_MARGINS, 3, "distances are measured over it"))
rule(F.cosine_embedding_loss)(
    _over_last("input1 input2 target margin size_average reduce reduction", 2, "the cosine is taken over it")
)
rule(F.multilabel_margin_loss)(_over_last(_OLD, 2, "the classes are compared with each other"))


@rule(F.multi_margin_loss)
def multi_margin_loss(*args: Any, **kwargs: Any) -> Spec:
    """Spec of multi_margin_loss: no target is ignored, and the mean is over all samples, whatever their weights."""
    named = _named(args, kwargs, "input target p margin weight size_average reduce reduction")
    unreduced = {name: named[name] for name in ("input", "target", "weight") if name in named} | {"reduction": "none"}
    return _ended(_by_class((), unreduced, "the classes are compared with each other", True), _reduction(named))


def _ctc(*args: Any, **kwargs: Any) -> Spec:
    """Spec of ctc_loss, where only samples are independent: `log_probs` is [T, N, C], `targets` [N, S]."""
    named = _named(args, kwargs, "log_probs targets input_lengths target_lengths blank reduction zero_infinity")
    builder = ViewLabels()
    why = "ctc_loss sums over all paths through it"
    batch = named["log_probs"].dim() == 3
    samples = (builder.new(named["log_probs"].shape[1]),) if batch else ()
    ins: list[Any] = []
    for number, x in enumerate(operands(args, kwargs)):
        at = 1 if number == 0 else 0
        by_sample = (
            batch and x.dim() > at and x.shape[at] == named["log_probs"].shape[1] and not (number == 1 and x.dim() < 2)
        )
        ins.append([samples if by_sample and dim == at else (builder.new(n, why),) for dim, n in enumerate(x.shape)])
    if named["targets"].dim() < 2:
        counted = "ctc_loss counts where a sample's targets begin in those of all samples"
        builder.fixed.update(dict.fromkeys(samples, counted))
    return _ended(builder.spec(ins, [[samples] if batch else []]), _reduction(named))


rule(F.ctc_loss)(_ctc)
