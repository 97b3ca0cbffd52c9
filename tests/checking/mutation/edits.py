"""Mutations of one collective or conversion: it is missing, done twice, or another one.

An edit is a function `(original, x, axis, **options)` for `call_sites.mutate`; it works on values and on fake tensors.
The edits of a call depend on what it was given; `recorder` notes that in a right run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from neuronx_dist import comm, spmd
from neuronx_dist.spmd.rows import ROWS

__all__ = ["Call", "Edit", "edits_of", "edits_of_function", "recorder"]

Change = Callable[..., Any]


class Edit(NamedTuple):
    """A mutant: its kind ("delete", "duplicate", "verb", ...), its name, and what is called instead."""

    kind: str
    name: str
    change: Change


class Call(NamedTuple):
    """A call of a site: number of dims of the tensor, label and size of the group, and the options."""

    dims: int
    axis: str
    size: int
    options: dict[str, Any]


def recorder(calls: list[Call]) -> Change:
    """A change that changes nothing, and notes the calls."""

    def note(original: Any, x: Any, *more: Any, **options: Any) -> Any:
        if isinstance(x, (torch.Tensor, list, tuple)):
            group = comm.communicator(more[0])
            calls.append(Call(x.dim() if isinstance(x, torch.Tensor) else 0, group.axis, int(group.size), options))
        else:
            calls.append(Call(0, "", 0, options))
        return original(x, *more, **options)

    return note


class _Done:
    """A handle of what is there already."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result


def _deliver(result: Any, options: dict[str, Any]) -> Any:
    """`result` in the way that the call was to give it: in `out`, as a handle."""
    out = options.get("out")
    if isinstance(result, list) and out is not None:
        result = [_deliver(one, {"out": place}) for one, place in zip(result, out)]
    elif out is not None and out is not result and out.shape == result.shape:
        with torch.no_grad():
            result = out.copy_(result)
    return _Done(result) if options.get("async_op") else result


def _each(change: Callable[[torch.Tensor], Any], x: Any) -> Any:
    """Applies a function to every tensor, if there is a list of them."""
    return [change(one) for one in x] if isinstance(x, (list, tuple)) else change(x)


def _plain(options: dict[str, Any], *more: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("out", "async_op", "inplace", *more)}


def _delete(original: Any, x: Any, axis: Any, **options: Any) -> Any:
    return _deliver(_each(lambda one: one, x), options)


def _twice(original: Any, x: Any, axis: Any, **options: Any) -> Any:
    once = original(x, axis, **_plain(options))
    return _deliver(original(once, axis, **_plain(options)), options)


def _with(**other: Any) -> Change:
    return lambda original, x, axis, **options: original(x, axis, **{**options, **other})


def _over(other: Any) -> Change:
    return lambda original, x, axis, **options: original(x, other, **options)


def edits_of(verb: str, call: Call, axes: Sequence[str]) -> Iterator[Edit]:
    """All mutants of a call. `axes`: the other ones that it could be over."""
    owner, _, name = verb.rpartition(".")
    yield Edit("delete", "delete", _delete)
    yield Edit("duplicate", "twice", _twice)
    yield from _of_operator(name, call) if owner == "spmd" else _of_verb(name, call)
    if name in ("send", "recv"):
        return
    for other in axes:
        yield Edit("axis", f"over {other}", _over(tuple(other.split(",")) if "," in other else other))


# --- verbs without types ----------------------------------------------------------------------------------------------


def _instead(other: str, *dropped: str, **given: Any) -> Edit:
    def change(original: Any, x: Any, axis: Any, **options: Any) -> Any:
        more = {**_plain(options, *dropped), **given}
        return _deliver(_each(lambda one: getattr(comm, other)(one, axis, **more), x), options)

    shown = ", ".join(f"{key}={value}" for key, value in given.items())
    return Edit("verb", f"{other}({shown})", change)


def _ring(original: Any, x: Any, axis: Any, **options: Any) -> Any:
    size = comm.size(axis) if not isinstance(axis, comm.Communicator) else axis.size
    ring = [(i, (i + 1) % size) for i in range(size)]
    return _deliver(_each(lambda one: comm.permute(one, axis, ring), x), options)


def _repeat(original: Any, x: Any, axis: Any, **options: Any) -> Any:
    size, dim = comm.communicator(axis).size, options.get("dim", 0)
    return _deliver(_each(lambda one: torch.cat([one] * size, dim), x), options)


def _own_piece(original: Any, x: Any, axis: Any, **options: Any) -> Any:
    group, dim = comm.communicator(axis), options.get("dim", 0)

    def own(one: torch.Tensor) -> torch.Tensor:
        count = one.shape[dim] // group.size
        return one.narrow(dim, group.rank * count, count).contiguous()

    return _deliver(_each(own, x), options)


def _of_verb(name: str, call: Call) -> Iterator[Edit]:
    dim = call.options.get("dim", 0)
    other_dims = [d for d in range(call.dims) if d != dim % max(1, call.dims)]
    if name == "all_reduce":
        for op in ("sum", "max", "min"):
            if op != call.options.get("op", "sum"):
                yield Edit("op", op, _with(op=op))
        yield _instead("broadcast", "op", "reduce_dtype")
        yield Edit("verb", "permute", _ring)
        if call.dims:
            yield _instead("all_gather", "op", "reduce_dtype")
            yield _instead("reduce_scatter")
            yield _instead("all_to_all", "op", "reduce_dtype")
    if name == "all_gather":
        yield Edit("verb", "repeat the own one", _repeat)
        yield _instead("all_reduce", "dim")
        yield _instead("reduce_scatter")
        for other in other_dims:
            yield _instead("all_to_all", "dim", split_dim=other, concat_dim=dim)
    if name == "reduce_scatter":
        yield Edit("op", "max", _with(op="max"))
        yield Edit("verb", "take the own piece", _own_piece)
        yield _instead("all_reduce", "dim")
        yield _instead("all_gather", "reduce_dtype")
        for other in other_dims:
            yield _instead("all_to_all", "dim", "reduce_dtype", split_dim=dim, concat_dim=other)
    if name in ("all_gather", "reduce_scatter"):
        for other in other_dims:
            yield Edit("dim", f"dim {other}", _with(dim=other))
    if name == "broadcast":
        for src in range(call.size):
            if src != call.options.get("src", 0):
                yield Edit("src", f"from {src}", _with(src=src))
        yield _instead("all_reduce", "src")
    if name in ("send", "recv"):
        yield Edit("tag", "another tag", _with(tag=call.options.get("tag", 0) + 1))
        end = "dst" if name == "send" else "src"
        for index in range(call.size):
            if index != call.options[end]:
                yield Edit("src", f"{end} {index}", _with(**{end: index}))


# --- typed operators --------------------------------------------------------------------------------------------------


def _of_operator(name: str, call: Call) -> Iterator[Edit]:
    """Every other row that shares a type with the call's; V is left out, which adds a dim."""
    src, dst = call.options["src"], call.options["dst"]
    own = next((kind for kind in (src, dst) if kind.letter == "S"), spmd.S(0))
    kinds = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": own}
    for other, a, b in ROWS:
        if (other, a, b) == (name, src.letter, dst.letter) or "V" in (a, b) or (a != src.letter and b != dst.letter):
            continue
        kind = "dst" if (other, a) == (name, src.letter) else "src" if (other, b) == (name, dst.letter) else "verb"
        yield _operator(kind, other, kinds[a], kinds[b])
    for side, shard in (("src", src), ("dst", dst)):
        if shard.letter == "S":
            for dim in range(call.dims):
                if dim != shard.dim % call.dims:
                    yield Edit("dim", f"{side} S({dim})", _with(**{side: spmd.S(dim)}))


def _operator(kind: str, name: str, src: Any, dst: Any) -> Edit:
    expert = {"expert_mode": True} if name in ("convert", "reinterpret") else {}

    def change(original: Any, x: Any, axis: Any, **options: Any) -> Any:
        return getattr(spmd, name)(x, axis, src=src, dst=dst, **expert)

    return Edit(kind, f"{name}({src}, {dst})", change)


# --- functions and layers that are called by the package itself ------------------------------------------------------


def edits_of_function(name: str, call: Call, axes: Sequence[str]) -> Iterator[Edit]:
    """Mutants of a call of one of the package's functions: `f(gradients or parameters, axis, ...)`, a mark, a layer."""
    if name in _LAYER_OPTIONS:
        for option in _LAYER_OPTIONS[name]:
            yield Edit("option", f"not {option}", _opposite(option))
        return

    def twice(original: Any, *args: Any, **options: Any) -> Any:
        original(*args, **options)
        return original(*args, **options)

    yield Edit("delete", "delete", lambda original, *args, **options: None)
    if name == "set_spec":
        yield Edit("mark", "the other mark", _other_mark)
    if name in ("set_spec", "mark_partial_gradients"):
        return
    yield Edit("duplicate", "twice", twice)
    for other in axes if name in ("_reduce_params", "_reduce_list") else ():
        to = tuple(other.split(","))
        yield Edit("axis", f"over {other}", lambda f, x, _, *more, _to=to, **kw: f(x, _to, *more, **kw))
    if name == "reduce_gradients":
        yield Edit("option", "not average_over_data", _opposite("average_over_data"))


_LAYER_OPTIONS = {
    "ColumnParallelLinear": ("input_is_replicated", "gather_output", "sequence_parallel_enabled"),
    "RowParallelLinear": ("input_is_parallel", "sequence_parallel_enabled"),
    "ParallelEmbedding": ("collect_output",),
}


def _opposite(option: str) -> Change:
    def change(original: Any, *args: Any, **options: Any) -> Any:
        return original(*args, **{**options, option: not options.get(option, False)})

    return change


def _other_mark(original: Any, module: Any, name: str, spec: Any) -> Any:
    return original(module, name, replace(spec, sequence_parallel=not spec.sequence_parallel))
