"""Muon for matrices and AdamW for all other parameters, in one optimizer: on one rank, or sharded by ZeRO-1.

    groups = muon_groups(model, adamw=dict(weight_decay=0.0))
    optimizer = NeuronZero1Optimizer(groups, MuonAdamW, lr=3e-4)

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest
orthogonal matrix, which Newton-Schulz iterations approximate: five times three products of matrices in bfloat16. The
steps are those of `torch.optim.Muon` and `torch.optim.AdamW`, bit for bit. Under ZeRO-1 each rank updates the momentum
of its rows, and `MatrixOwners` brings the rows of a matrix together for the iterations alone.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..nearest import nearest
from ..spmd.watching import active
from ..weights.partial_model import partial_model
from ..weights.shard_spec import restamp, spec_of
from .matrix_owners import MatrixOwners

__all__ = ["MuonAdamW", "is_muon_class", "muon_groups", "refuse_other_optimizer", "refuse_vectors"]

_KINDS = ("muon", "adamw")
_MUON = dict(
    lr=1e-3,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    ns_coefficients=(3.4445, -4.7750, 2.0315),
    eps=1e-7,
    ns_steps=5,
    adjust_lr_fn=None,
)
_ADJUST = (None, "original", "match_rms_adamw")
_ADAMW = inspect.signature(torch.optim.AdamW).parameters.keys() - {"params"}
_OPTIONS = {*_MUON, *_ADAMW, "optimizer", "params", "param_names", "initial_lr", "min_lr", "max_lr", "max_momentum"}
_HEADS = {"head", "lm_head", "score", "classifier", "qa_outputs"}  # names of layers, as transformers has them
_adamw_step = inspect.unwrap(torch.optim.AdamW.step)  # without its hooks: those of MuonAdamW run
_muon_step = inspect.unwrap(torch.optim.Muon.step)


def is_muon_class(optimizer_class: Any) -> bool:
    """Returns whether a class makes the steps of `torch.optim.Muon`, or is `MuonAdamW`."""
    step: Any = getattr(optimizer_class, "step", None)
    return inspect.unwrap(step) in (_muon_step, inspect.unwrap(MuonAdamW.step))


class MuonAdamW(torch.optim.AdamW):
    """Muon and AdamW by parameter groups, `dict(params=..., optimizer="muon")` or `"adamw"`; see `muon_groups`.

    A group may have any option of its optimizer. Plain on one rank it equals the two optimizers of torch; where
    matrices are sharded, pass the class to `NeuronZero1Optimizer` or `MasterWeightsOptimizer`.

    Args:
        params: the groups.
        lr: learning rate of both: with `adjust_lr_fn="match_rms_adamw"` one value fits both.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov, ns_coefficients, ns_steps: of Muon, as in torch; a group's `eps` is that of its iterations.
        adjust_lr_fn: "match_rms_adamw": `lr * 0.2 * sqrt(max(sizes))`, whose updates are as large as AdamW's;
            "original": `lr * sqrt(max(1, rows / columns))`. The sizes are those of the whole matrix.
        betas, eps: of AdamW.

    Raises:
        ValueError: a group has no `optimizer`, or a Muon group a parameter that is no matrix, or a value does not fit.
        TypeError: a group has an option that neither optimizer has, and that is spelled almost like one of theirs.
    """

    owners: MatrixOwners | None = None  # of shards
    _kind: str | None = None  # of groups that do not say it

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self._of_muon = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=_MUON["eps"],
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @classmethod
    def of_muon(cls, optimizer: torch.optim.Muon) -> MuonAdamW:
        """Returns an optimizer with the groups of a `torch.optim.Muon`."""
        result = cls([{**group, "optimizer": "muon"} for group in optimizer.param_groups])
        result.defaults, result._kind = optimizer.defaults, "muon"
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of one of the two optimizers."""
        kind = param_group.get("optimizer", self._kind)
        if kind not in _KINDS:
            raise ValueError(
                f"MuonAdamW: a parameter group has optimizer={kind!r}: pass groups dict(params=..., optimizer='muon') "
                "of matrices and dict(params=..., optimizer='adamw') of embeddings, heads and vectors, such as "
                "muon_groups(model)"
            )
        group = {**(self._of_muon if kind == "muon" else {}), **param_group, "optimizer": kind}
        for option in param_group.keys() - _OPTIONS:
            if similar := difflib.get_close_matches(option, _OPTIONS, cutoff=0.85):
                raise TypeError(
                    f"MuonAdamW: a parameter group has the unknown option {option}={param_group[option]!r}; nearest: "
                    f"{similar[0]}"
                )
        if kind == "muon":
            _check_values(group)
        super().add_param_group(group)
        if kind == "muon":
            refuse_vectors(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step; where matrices have owners, all ranks of the stage call it together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        by_kind = {kind: [group for group in groups if group["optimizer"] == kind] for kind in _KINDS}
        self.param_groups = by_kind["adamw"]
        try:
            _adamw_step(self)
        finally:
            self.param_groups = groups
        matrices = [(x, group) for group in by_kind["muon"] for x in group["params"]]
        if self.owners is not None and active() is None:
            self.owners.fill_gradients([x for x, _ in matrices])
        self._step_matrices([(x, group) for x, group in matrices if x.grad is not None])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of `MuonAdamW`, or one of `torch.optim.Muon` or `AdamW` whose groups are this optimizer's.

        Raises:
            ValueError: the groups are those of another optimizer.
        """
        saved_groups = state_dict["param_groups"]
        refuse_other_optimizer(saved_groups, self.param_groups)
        groups = [
            {**here, **saved, "optimizer": here["optimizer"]} for here, saved in zip(self.param_groups, saved_groups)
        ]
        groups += saved_groups[len(groups) :]  # torch refuses another number
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _step_matrices(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        params = [param for param, _ in matrices]
        if self.owners is None or active() is not None:
            # A type check sees an elementwise update of shards, which that of whole matrices is for the ranks.
            function = _orthogonalised if self.owners is None else _unchanged
            for param, group in matrices:
                _apply(param, group, function(self._momentum(param, group), group), param.shape)
        elif matrices:
            updates = self.owners.compute(
                params,
                lambda number: self._momentum(*matrices[number]).bfloat16(),  # as the iterations: nothing is lost
                lambda number, whole: _orthogonalised(whole, matrices[number][1]),
            )
            for (param, group), update, shape in zip(matrices, updates, self.owners.shapes(params)):
                _apply(param, group, update, shape)

    def _momentum(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        grad, state, momentum = param.grad, self.state[param], group["momentum"]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer: Tensor = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's looks for a step count of each parameter
        self.__dict__.setdefault("_of_muon", dict(_MUON))


def refuse_other_optimizer(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises a ValueError if saved groups are of Muon where an optimizer's groups are not, or the other way.

    Their states have other entries, of which torch loads any: Muon would begin without its momentum, silently.
    """
    there, here = [*map(_kind_of, saved)], [*map(_kind_of, groups)]
    if there != here and "muon" in (*there, *here):
        raise ValueError(
            f"the state is of {_name_of(saved)}, with parameter groups of {', '.join(there)}, and the optimizer is "
            f"{_name_of(groups)}, with groups of {', '.join(here)}: load the state into an optimizer with the saved "
            "groups, or load the model alone, so that the optimizer begins anew"
        )


def _kind_of(group: Mapping[str, Any]) -> str:
    kind = group.get("optimizer") or ("muon" if "ns_steps" in group else "adamw" if "betas" in group else "others")
    return str(kind)


def _name_of(groups: Sequence[Mapping[str, Any]]) -> str:
    if any("optimizer" in group for group in groups):
        return "MuonAdamW"
    return {"muon": "Muon", "adamw": "AdamW"}.get(_kind_of(groups[0]) if groups else "", "another optimizer")


def _check_values(group: Mapping[str, Any]) -> None:
    """Raises a ValueError for an option of a Muon group that its steps cannot follow."""
    steps, what = group["ns_steps"], "MuonAdamW: a Muon group has"
    if group["adjust_lr_fn"] not in _ADJUST:
        raise ValueError(f"MuonAdamW: adjust_lr_fn is {group['adjust_lr_fn']!r}; pass one of {_ADJUST}")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{what} ns_steps={steps!r}: pass a number of iterations, at least 1 (5 in torch)")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ValueError(f"{what} momentum={group['momentum']!r}: pass a number in [0, 1)")
    if group.get("maximize"):
        raise ValueError(f"{what} maximize=True, which Muon has not: negate the loss")


def refuse_vectors(group: dict[str, Any]) -> None:
    """Raises a ValueError, with its name, for a parameter of a group that is no matrix."""
    names = group.get("param_names") or [f"parameter {number} of the group" for number in range(len(group["params"]))]
    for name, param in zip(names, group["params"]):
        if param.dim() != 2:
            raise ValueError(
                f"Muon got {name} of shape {tuple(param.shape)}, which is no matrix [out, in]: pass AdamW's "
                "parameters in a group of their own, as NeuronZero1Optimizer(muon_groups(model), MuonAdamW, lr=...)"
            )


def muon_groups(
    model: nn.Module,
    *,
    muon: dict[str, Any] | None = None,
    adamw: dict[str, Any] | None = None,
    is_muon: Callable[[str], bool] | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups of `MuonAdamW`: Muon's matrices, and AdamW's all other parameters of this rank.

    Matrices are the parameters `[out, in]` of the model that require gradients. Of AdamW are embeddings, weights tied
    to them, heads, and everything that has not two dims, such as norms, biases and stacks of experts. Heads are what
    `get_output_embeddings()` returns, all layers of a Hugging Face model outside of its `base_model`, such as `score`,
    layers named "head", "lm_head", "score", "classifier" or "qa_outputs" (and what is inside), and matrices with as
    many rows as an embedding in a layer whose name ends in "head" or begins with "output".

    Args:
        muon, adamw: options of the groups, such as `dict(lr=2e-2)`.
        is_muon: returns, by name, whether a parameter with two dims is Muon's; None: as said.

    Returns:
        Two groups, with the names of the parameters; one may be empty, as on a stage without matrices: torch takes no
        names then.

    Raises:
        TypeError: an option is unknown, or `model` is no module, or `is_muon` no function.
        ValueError: the model has a module of `parallelize`, whose parts do not say which are embeddings, and `is_muon`
            is None.
    """
    if not isinstance(model, nn.Module) or not (is_muon is None or callable(is_muon)):
        raise TypeError(
            f"muon_groups takes a model, and is_muon=function of a name: got {type(model).__name__}, "
            f"is_muon={is_muon!r}"
        )
    options = {"muon": muon or {}, "adamw": adamw or {}}
    for kind, known in (("muon", _MUON), ("adamw", _ADAMW)):
        for option in options[kind]:
            if option not in known:
                raise TypeError(f"muon_groups: {kind} has no option {option!r}; nearest: {nearest(option, known)}")
    partial = partial_model(model)
    restamp(partial.original_module)
    if is_muon is None and any(hasattr(module, "STORED") for module in partial.original_module.modules()):
        raise ValueError(
            "muon_groups cannot see which parameters of a module of parallelize are embeddings, whose modules it has "
            "no more: pass is_muon=lambda name: 'embed' not in name and 'head' not in name, or as the names are"
        )
    embedded = {id(param) for param in _embedded(partial.original_module)}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in _KINDS}
    for name, param in partial.local_named_parameters():
        if param.requires_grad:
            is_matrix = param.dim() == 2 and not spec_of(param).experts
            chosen = is_matrix and (id(param) not in embedded if is_muon is None else is_muon(name))
            groups["muon" if chosen else "adamw"].append((name, param))
    with_names = all(groups.values())
    params = {kind: named if with_names else [param for _, param in named] for kind, named in groups.items()}
    return [{"params": params[kind], "optimizer": kind, **options[kind]} for kind in _KINDS]


def _embedded(model: nn.Module) -> Iterator[Tensor]:
    """The weights of embeddings and heads."""
    sizes: set[Any] = set()
    for module in model.modules():
        weight, rows = getattr(module, "weight", None), getattr(module, "num_embeddings", None)
        if rows is not None and isinstance(weight, Tensor):
            sizes.add(rows)
            yield weight
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        yield from head.parameters()
    base = getattr(model, "base_model", model) if hasattr(model, "base_model_prefix") else model
    backbone = {id(param) for param in base.parameters()}
    for name, param in model.named_parameters():
        layers = name.lower().split(".")[:-1]  # "lm_head" of "lm_head.weight"
        is_named = bool(layers) and (layers[-1].endswith("head") or layers[-1].startswith("output"))
        is_head = id(param) not in backbone or not _HEADS.isdisjoint(layers)
        if is_head or (is_named and param.dim() == 2 and spec_of(param).unpadded_shape[0] in sizes):
            yield param


def _orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz iterations in bfloat16, as in `torch.optim.Muon`, so that both have the same bits."""
    a, b, c = group["ns_coefficients"]
    rows, columns = matrix.shape
    x = matrix.to(torch.bfloat16, copy=True)
    if rows > columns:
        x = x.T
    x.div_(x.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if rows > columns else x


def _unchanged(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return matrix


def _apply(param: Tensor, group: dict[str, Any], update: Tensor, shape: Sequence[int]) -> None:
    """Makes the step of a shard, `[rows, columns]`; rows that `update` lacks are padding."""
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"])
    rows = param if len(update) == len(param) else param[: len(update)]
    rows.add_(update, alpha=-lr * _factor(group["adjust_lr_fn"], *shape))


def _factor(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for the sizes of the whole matrix."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
