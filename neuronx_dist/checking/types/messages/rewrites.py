"""Repairs other than an operator on one operand: another order of calls, another function, a change in another line.

Each function takes a violation of one rule and yields repairs, as code where the source of the call allows it.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_

from ....gradients.norm import clip_grad_norm
from ....rules import RULES
from ....spmd.errors import Violation
from ....spmd.tensor_type import Origin, origins_of, type_of
from ....spmd.types import DIFFERING, SAME, I, P, R, Shard, SpmdType, V
from ....torch_internals.fake_tensors import FakeTensor
from ....torch_internals.tensors import DisableTorchFunction
from .provenance import Named, Site, editable, value_of
from .syntax import syntax_tree
from .trials import Change, Edit, JudgedCall, Repair, call_of, contracted, edit_of, legal, misfit, on_meta, written

__all__ = ["SPECIAL", "clipping", "declared", "fitting_sizes", "local_code", "origin_repair", "otherwise", "seeds"]

_BLOCKS = ("chunk", "split", "unflatten", "tensor_split", "view", "reshape")


def _bias(
    mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named], here: Site | None, size: Any
) -> Any:
    """Yields the repair of a bias added to a sum that is not reduced yet: add the bias afterwards."""
    axis = violation.axis
    added = [index for index in violation.operands if index < len(call.tensors) and index >= 2]
    if not added or call.rule.name not in ("linear", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"):
        return
    bias = added[0]
    added_code = names[bias].code + ("[" + ", ".join([":"] + ["None"] * int(call.rule.name[-2])) + "]"
                                     if call.rule.name.startswith("conv") else "")  # fmt: skip
    spmd_types = [operand.type.get(axis) for operand in call.operands]
    if any(spmd_types[index] is None or spmd_types[index].letter not in DIFFERING for index in (0, 1)):  # type: ignore[union-attr]
        return
    without = JudgedCall(call.rule, call.function, call.args[:2], {}, call.tensors[:2], call.operands[:2], None)
    with DisableTorchFunction():
        spec = call.rule.spec(*call.args[:2]) if call.rule.spec is not None else None
    results = legal(without._replace(spec=spec), axis, {}, result=True)
    if not results or not (results[0] is P or results[0] is V):
        return
    dst: SpmdType = I if spmd_types[bias] is not None and spmd_types[bias].letter == "I" else R  # type: ignore[union-attr]
    node = here.node if here is not None and isinstance(here.node, ast.Call) else None
    function = here.text(node.func) if here is not None and node is not None else "F.linear"
    options = []
    if here is not None and node is not None:
        place = next((i for i, part in enumerate(node.args) if part is names[bias].node), len(node.args))
        if place < len(node.args) - 1:
            options = ["None", *map(here.text, node.args[place + 1 :])]
        options += [f"{k.arg}={here.text(k.value)}" for k in node.keywords if k.arg not in ("weight", "bias")]
    without_bias = f"{function}({', '.join([names[0].code, names[1].code, *options])})"
    direct = here is not None and isinstance(here.node, ast.Call) and names[0].node in here.node.args
    if here is not None and direct:
        moved = _added_after(here, without_bias, added_code, dst)
        if moved is not None:
            yield moved
            return
    code = f"{call_of('all_reduce', without_bias, axis, None, dst)} + {added_code}"
    yield Repair(code, edit_of(here, here.node, f"({code})") if here is not None and direct else None)


def _added_after(here: Site, remaining: str, added: str, dst: SpmdType) -> Repair | None:
    """The repair `reduce(remaining) + added`, where a reduction to `dst` is around the expression here; else None."""
    call = here.enclosing_call()
    function = here.text(call.func) if call is not None else ""
    if call is None or "reduce" not in function:
        return None
    stated = next((here.text(k.value).rpartition(".")[2] for k in call.keywords if k.arg == "dst"), "")
    if (stated or ("I" if "reduce_from" in function else "R" if function.startswith("comm.") else "")) != str(dst):
        return None
    options = [here.text(part) for part in call.args[1:]] + [f"{k.arg}={here.text(k.value)}" for k in call.keywords]
    code = f"{function}({', '.join([remaining, *options])}) + {added}"
    return Repair(code, edit_of(here, call, f"({code})"))


def _plus(
    mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named], here: Site | None, size: Any
) -> Any:
    """Yields the repair of an addition to a sum before its reduction: add after the reduction."""
    if here is None or not isinstance(here.node, ast.BinOp) or not isinstance(here.node.op, ast.Add) or len(names) != 2:
        return
    spmd_types = [operand.type.get(violation.axis) for operand in call.operands]
    pending = next((i for i, spmd_type in enumerate(spmd_types) if spmd_type is P), None)
    other = spmd_types[1 - pending] if pending is not None else None
    if pending is not None and other is not None and other.letter in SAME:
        moved = _added_after(here, names[pending].code, names[1 - pending].code, other)
        if moved is not None:
            yield moved


def _invariant(mode: Any, violation: Violation, call: JudgedCall, names: Any, here: Site | None, size: Any) -> Any:
    yield from _bias(mode, violation, call, names, here, size)
    yield from _plus(mode, violation, call, names, here, size)
    axis = violation.axis
    for index in violation.operands:
        if index >= len(call.tensors):
            yield Repair("draw the numbers outside of fork(): the default stream is the same on all ranks of tp")
            continue
        type_ = type_of(call.tensors[index])
        origin = origins_of(call.tensors[index]).get(axis)
        spmd_type = type_.get(axis) if type_ is not None else None
        if spmd_type is R and origin is not None and origin.letter == "R":
            repair = origin_repair(origin, I)
            change = Change("", I, tuple(call.tensors[index].shape), 0)
            if repair is not None and legal(call, axis, {index: change}):
                yield repair


def origin_repair(origin: Origin, dst: SpmdType) -> Repair | None:
    """The repair that changes `dst` of the collective in which a type began."""
    operator, _, _ = origin.what.partition("(")
    if operator not in ("all_reduce", "all_gather") or not origin.what.endswith((", R)", ", I)")):
        return None
    file, _, line = origin.where.rpartition(":")
    text = f"{operator}(..., dst={written(dst)}) at {origin.where}"
    tree = syntax_tree("".join(linecache.getlines(file)))
    if tree is None:
        return Repair(text)
    for node in ast.walk(tree):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        for keyword in node.keywords if isinstance(node, ast.Call) and name == operator else ():
            if keyword.arg != "dst" or not node.lineno <= int(line) <= (node.end_lineno or 0):  # type: ignore[attr-defined]
                continue
            value = keyword.value
            new = f"{ast.unparse(value.value)}.{dst}" if isinstance(value, ast.Attribute) else str(dst)
            if new == ast.unparse(value):  # another one on the same line
                continue
            start, end = (value.lineno, value.col_offset), (value.end_lineno or 0, value.end_col_offset or 0)
            return Repair(text, Edit(file, start, end, new) if editable(file) else None)
    return Repair(text)


def _fixed(
    mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named], here: Site | None, size: Any
) -> Any:
    """Repairs for a sharded dim along which values mix, or that is cut or looked up."""
    index = violation.operands[0]
    axis, name, x = violation.axis, names[index], call.tensors[index]
    spmd_type = call.operands[index].type.get(axis)
    if not isinstance(spmd_type, Shard):
        return
    words = call.rule.name
    if words in ("cross_entropy", "nll_loss") and len(names) > 1 and index == 0 and spmd_type.dim == x.dim() - 1:
        node, labels = here.node if here is not None else None, names[1].code
        loss = f"nxd.parallel_cross_entropy({name.code}, {labels})"
        code = f"{loss}.sum() / nxd.global_num_items({labels}, shift=False)"
        replaceable = isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords
        yield Repair(code, edit_of(here, node, f"({code})") if replaceable else None)
        yield Repair(f"{loss}.mean(), if every label counts")
    elif words == "rms_norm" and spmd_type.dim == x.dim() - 1 and index == 0:
        squares = call_of("all_reduce", f"{name.code}.pow(2).sum(-1, keepdim=True)", axis, None, R)
        node = here.node if here is not None else None
        words_of = node.keywords if isinstance(node, ast.Call) else []
        eps_texts = [here.text(k.value) for k in words_of if k.arg == "eps"] if here is not None else []
        eps = eps_texts[0] if eps_texts else f"torch.finfo({name.code}.dtype).eps"
        code = f'{name.code} * torch.rsqrt({squares} / ({name.code}.shape[-1] * comm.size("{axis}")) + {eps})'
        code += f" * {names[1].code}" if len(names) > 1 else ""
        yield Repair(code, edit_of(here, here.node if here is not None else None, f"({code})"))
    elif words in ("layer_norm", "group_norm", "normalize"):
        yield Repair(f"{call_of('all_gather', name.code, axis, spmd_type, I)} before it, and its weight whole")
    elif words == "embedding" and spmd_type.dim == 0:
        yield Repair("ParallelEmbedding: each rank looks up the ids whose rows it holds, masks the others, and the sum "
                     "over the ranks is the row")  # fmt: skip
    elif spmd_type.stride == 1 and words in _BLOCKS and x.requires_grad:  # otherwise no weight made it
        for blocks in range(2, 9):
            change = Change("", Shard(spmd_type.dim, blocks), tuple(x.shape), 0)
            if x.shape[spmd_type.dim] % blocks == 0 and legal(call, axis, {index: change}):
                text = f"shard the weight that {name.label or 'it'} comes from in {blocks} blocks, stride={blocks} "
                text += f"(ColumnParallelLinear(..., stride={blocks})): each rank then holds its part of each"
                yield Repair(text)
                break


_PICKING = frozenset("topk sort argsort msort kthvalue median argmax argmin cumsum cumprod".split())


def local_code(violation: Violation, call: JudgedCall, names: Sequence[Named]) -> Iterator[Repair]:
    """Yields a `local_map` for code that selects positions of this rank's shard."""
    picks = call.spec is not None and bool(call.spec.selected or call.spec.looked_up)
    if violation.rule == "fixed" and (picks or call.rule.name in _PICKING):
        meant = "if this rank's own positions are meant: it declares what the results are"
        yield Repair(f"{_mapped(violation, call, names)}, {meant}")
    if violation.rule == "shards" and violation.axis == "cp":
        code = 'spmd.local_map(function, out_types={"cp": ...}, in_types={"cp": ...})'
        yield Repair(f"{code} around the loop, if the other ranks' pieces come in turn, as in a ring")
    if violation.rule == "shards" and violation.axis.startswith("ep"):
        code = f'spmd.local_map(function, out_types={{"{violation.axis}": ...}}, in_types=[...])'
        yield Repair(f"{code} around it, if each rank combines its own rows with its own slots")


def _mapped(violation: Violation, call: JudgedCall, names: Sequence[Named]) -> str:
    """A call on this rank's shard in a `local_map`, as far as the call can be written again."""
    axis, index = violation.axis, violation.operands[0]
    spmd_type = call.operands[index].type.get(axis)
    more = [*map(repr, call.args[1:]), *(f"{key}={value!r}" for key, value in call.kwargs.items())]
    plain = all(x.__class__ in (int, float, bool, str, type(None)) for x in (*call.args[1:], *call.kwargs.values()))
    dims = call.spec.ins[index] if call.spec is not None else None
    known = call.rule.name in _PICKING and isinstance(spmd_type, Shard) and len(call.tensors) == 1
    if call.spec is None or dims is None or not (plain and known):
        return f'spmd.local_map(function, out_types={{"{axis}": ...}}) around it'
    keeps_rank = all(len(out) == len(dims) for out in call.spec.outs)
    types = f'out_types={{"{axis}": spmd.{spmd_type if keeps_rank else V}}}, in_types={{"{axis}": spmd.{spmd_type}}}'
    return f"spmd.local_map(lambda x: x.{call.rule.name}({', '.join(more)}), {types})({names[index].code})"


def otherwise(mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named]) -> Iterator[Repair]:
    """Yields repairs without an operator: another rule, another layout, an exception from the check."""
    function = call.rule.name
    if call.rule.spec is None and call.rule.kind == "op" and call.function not in RULES:
        yield Repair(f"@spmd.register_rule({function}, linear=((0,),)) on a function that returns its effect on dims, "
                     "if it is linear")  # fmt: skip
    for index in violation.operands:
        if index < len(call.tensors) and isinstance(call.tensors[index], nn.Parameter):
            spmd_type = call.operands[index].type.get(violation.axis)
            if violation.rule == "whole" and spmd_type is not None and spmd_type.letter in SAME:
                yield from _undeclared_shard(call, index, violation.axis, names[index])
            of_tp = violation.rule == "invariant" and spmd_type is I and violation.axis == "tp"
            if of_tp and not contracted(call, violation.axis):
                yield Repair(f"{names[index].code}.sequence_parallel_enabled = True, if it sees a part of the "
                             "sequence: reduce_gradients then sums its gradient")  # fmt: skip
    if violation.rule == "whole":
        code = f'spmd.convert(whole, "{violation.axis}", src=spmd.R, dst=spmd.S(dim))'
        yield Repair(f"take this rank's piece of the whole: {code} instead of a slice that is the same on all")
    if violation.rule == "scalar":
        index = violation.operands[0]
        label = names[index].label or "value"
        if not isinstance(call.tensors[index], FakeTensor):  # a fake tensor has no value to print
            yield Repair(f"with spmd.no_typecheck(): around it, if this rank's own {label} is meant (to print it)")


def _undeclared_shard(call: JudgedCall, index: int, axis: str, name: Named) -> Iterator[Repair]:
    """Yields the declaration that makes an undeclared parameter a shard, if the call is then legal."""
    for dim in range(call.tensors[index].dim()):
        if legal(call, axis, {index: Change("", Shard(dim), tuple(call.tensors[index].shape), 0)}):
            if axis == "tp":
                code = f"nxd.parallel_layers.utils.set_tensor_model_parallel_attributes({name.code}, True, {dim}, 1)"
            else:
                code = f'spmd.assert_type({name.code}, {{"{axis}": spmd.S({dim})}})'
            yield Repair(f"{code} where it is made, if it is an undeclared shard")
            return


def _own_rows(mode: Any, violation: Violation, call: JudgedCall, names: Any, here: Site | None, size: Any) -> Any:
    """Yields the operator for this rank's rows among those of all ranks."""
    index = violation.operands[0]
    code = call_of("all_gather", names[index].code, violation.axis, call.operands[index].type.get(violation.axis), I)
    yield Repair(f"{code} in place of the gather and of this line: in backward each rank gets the gradient of its rows")


def _scalar(mode: Any, violation: Violation, call: JudgedCall, names: Any, here: Site | None, size: Any) -> Any:
    """Yields the repair for a number read from a tensor without values: leave it out of the checked step."""
    if isinstance(call.tensors[violation.operands[0]], FakeTensor):
        yield Repair("leave printing and logging out of the step that is checked: return the tensor instead")


def seeds(call: JudgedCall, axis: str) -> list[Repair]:
    """The repair of random numbers from seeds that differ by rank, beside values that are equal on all ranks."""
    if not any((operand.type.get(axis) or R).letter in SAME for operand in call.operands):
        return []
    origins = [origins_of(x).get(axis) for x, o in zip(call.tensors, call.operands) if o.type.get(axis) is V]
    places = [origin.where for origin in origins if origin is not None and "seed that differs by rank" in origin.what]
    return [Repair(f"one seed on all ranks of {axis} for the numbers drawn at {where}") for where in places[:1]]


def clipping(here: Site | None) -> list[Repair]:
    """The repair of clipping before gradients are reduced, or by torch's function, which does not see shards."""
    node = here.node if here is not None else None
    functions = (clip_grad_norm_, clip_grad_norm)
    if here is None or not isinstance(node, ast.Call) or value_of(node.func, here.frame) not in functions:
        return []
    given = ", ".join(here.text(part) for part in (*node.args, *(keyword.value for keyword in node.keywords)))
    return [Repair(f"nxd.clip_grad_norm({given}) after nxd.reduce_gradients(model): it counts every element once")]


def declared(
    call: JudgedCall, axis: str, violation: Violation, names: Sequence[Named], here: Site | None
) -> list[Repair]:
    """Repairs that declare a type for an operand without one on an axis, with which the call is legal."""
    repairs = []
    for index in violation.operands:
        x = call.tensors[index]
        spmd_types: list[SpmdType] = [R, *(Shard(dim) for dim in range(x.dim())), I, V]
        sharded = [spmd_type for spmd_type in spmd_types if isinstance(spmd_type, Shard)]
        if any(isinstance(operand.type.get(axis), Shard) for operand in call.operands) and x.dim():
            spmd_types = [*sharded, R, I, V]
        for spmd_type in spmd_types:
            if legal(call, axis, {index: Change("", spmd_type, tuple(x.shape), 0)}):
                code = f'spmd.assert_type({names[index].code}, {{"{axis}": {written(spmd_type)}}})'
                repairs.append(Repair(code, edit_of(here, names[index].node, code)))
    return repairs


def fitting_sizes(
    call: JudgedCall, axis: str, size: int | None, names: Sequence[Named], here: Site | None
) -> Iterator[Repair]:
    """Yields the repair of a view or split of a shard with a global size: divide the size by the ranks."""
    if not size or len(call.tensors) != 1 or not isinstance(call.operands[0].type.get(axis), Shard):
        return
    args, kwargs = on_meta(call)
    packed = len(args) == 2 and isinstance(args[1], (tuple, list))
    sizes = list(args[1]) if packed else list(args[1:])
    nodes: list[Any] = []
    if here is not None and isinstance(here.node, ast.Call):
        nodes = list(here.node.args) if names[0].node not in here.node.args else list(here.node.args[1:])
        if packed and nodes and isinstance(nodes[0], (ast.Tuple, ast.List)):
            nodes = nodes[0].elts
    shard: Any = call.operands[0].type.get(axis)
    before = math.prod(call.tensors[0].shape[: shard.dim])
    # First the size where the sharded dim begins, then any other that fits.
    for index in sorted(range(len(sizes)), key=lambda index: math.prod(sizes[:index]) != before):
        number = sizes[index]
        if type(number) is not int or number <= 0 or number % size:
            continue
        new = [*sizes[:index], number // size, *sizes[index + 1 :]]
        tried = call._replace(args=(args[0], type(args[1])(new)) if packed else (args[0], *new), kwargs=kwargs)
        if misfit(tried, tried.args, kwargs) is not None:
            continue
        with DisableTorchFunction():
            spec = call.rule.spec(*tried.args, **kwargs) if call.rule.spec is not None else None
        if legal(tried._replace(spec=spec, tensors=[args[0]]), axis, {}):
            node = nodes[index] if len(nodes) == len(sizes) else None
            text = here.text(node) if here is not None and node is not None else str(number)
            code = f'{text} // comm.size("{axis}")'
            yield Repair(f"{code} instead of {text}: this rank has its part", edit_of(here, node, code))
            return


SPECIAL: dict[str, Callable[..., Any]] = {
    "bias": _bias,
    "invariant": _invariant,
    "partial_plus": _plus,
    "fixed": _fixed,
    "own_rows": _own_rows,
    "scalar": _scalar,
}
