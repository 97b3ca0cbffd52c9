"""Comparison of values that the layout says are equal: the part of the types that only a running job can see.

The checker infers from the layout that a norm's weight is equal on all tensor-parallel ranks, and every parameter on
all data-parallel ones. `verify(model, batch)` compares: all ranks call it once, after the weights are loaded and before
the first step. Checksums are exact to the bit, made where the tensors are, and exchanged as Python objects.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import accelerator, comm
from ..comm import context
from ..comm.generators import get_state
from ..mesh import part_of
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import pytree
from ..weights.partial_model import is_partial, partial_model
from ..weights.shard_spec import restamp, spec_of
from .axes import runs_of_parts
from .errors import SpmdTypeError

__all__ = ["Verified", "verify"]

AXES = ("tp", "dp", "cp", "edp")
_CHUNK = 1 << 20
_FACTOR = 0x1E3779B97F4A7C15  # odd: a value counts differently at each position
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 10


@dataclass(frozen=True)
class Verified:
    """Result of a comparison without differences.

    Attributes:
        compared: number of values on this rank that were compared over each axis.
        hints: findings that are allowed but rarely intended; each was a warning.
        skipped: names of tensors without values to compare (meta, fake or sparse tensors).
    """

    compared: dict[str, int]
    hints: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = (
            ", ".join(f"{count} over {axis}" for axis, count in self.compared.items() if count) or "nothing to compare"
        )
        text = f"verified: {counts}"
        if self.skipped:
            text += f"; not compared: {len(self.skipped)} without values ({', '.join(self.skipped[:3])}...)"
        return "\n".join([text, *(f"hint: {hint}" for hint in self.hints)])


class _Digest(NamedTuple):
    sums: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    constant: bool = False


class _Value(NamedTuple):
    name: str
    value: Any  # a tensor, or another object in an input
    equal: frozenset[str]  # axes over which it must be equal
    usually_equal: frozenset[str] = frozenset()  # axes over which a difference is reported as a hint
    usually_different: frozenset[str] = frozenset()  # axes over which equality is reported as a hint
    hint: str = ""


class _Finding(NamedTuple):
    axis: str
    text: str
    wrong: bool  # or only a hint


def verify(model: nn.Module | None, inputs: Any = None, *, axes: Sequence[str] | None = None) -> Verified:
    """Compares, over the axes of the mesh, values that the layout says are equal. Every rank of the job calls it.

    These must be equal: parameters over dp and cp, and over tp those not sharded over tp; experts over edp;
    weights tied between stages, over their stages; inputs over tp. A warning is given for shards of different tp ranks
    that are equal and not constant (one shard loaded everywhere?), for inputs that are equal over dp (a loader that
    does not know its rank?) or differ over pp, and for a default random stream that differs over tp.

    Args:
        model: any module, `NxDPPModel` included; this rank's part of it is compared.
        inputs: tensors in any containers, as this rank's loader returns them.
        axes: the axes to compare over, of tp, dp, cp, edp and pp; None: all.

    Raises:
        SpmdTypeError: on every rank, if some values differ; with their names, the ranks, and the values there.
        ValueError: an axis is none of these.
    """
    chosen = tuple(axes) if axes is not None else (*AXES, "pp")
    if unknown := [axis for axis in chosen if axis not in (*AXES, "pp")]:
        raise ValueError(f"verify: {unknown[0]!r} is not one of the axes {', '.join((*AXES, 'pp'))}")
    input_values = list(_inputs(inputs))
    everything = [*_parameters(model), *input_values, *_random_states()]
    values = [value for value in everything if _has_values(value.value)]
    digests = dict(zip((value.name for value in values), _digests([value.value for value in values])))
    if batch := [digests[value.name] for value in input_values if value.name in digests]:
        values.append(_BATCH)
        sums = tuple(number for digest in batch if not digest.constant for number in digest.sums)
        digests[_BATCH.name] = _Digest(sums, (), "", not sums)
    compared: dict[str, int] = {}
    findings: list[_Finding] = []
    of_tp = context.current().typed_mesh.tp_parts
    parts = {"tp": ("tp", *of_tp)} if len(of_tp) > 1 else {}
    for axis in (part for name in chosen for part in parts.get(name, (name,))):
        if comm.size(axis) > 1:
            concerned = {v.name: v for v in values if axis in v.equal | v.usually_equal | v.usually_different}
            compared[axis] = sum(axis in value.equal for value in concerned.values())
            findings += _compare(axis, axis, concerned, digests)
    if "pp" in chosen and model is not None:
        findings += _tied(model, digests, compared)
    all_findings = list(dict.fromkeys(finding for of_rank in _exchange(findings, "world") for finding in of_rank))
    hints = [f"{finding.text}" for finding in all_findings if not finding.wrong]
    for hint in hints:
        warnings.warn(f"verify: {hint}", stacklevel=2)
    if any(finding.wrong for finding in all_findings):
        raise _error([finding for finding in all_findings if finding.wrong])
    return Verified(compared, hints, [value.name for value in everything if value.name not in digests])


def _tied(model: nn.Module, digests: dict[str, _Digest], compared: dict[str, int]) -> list[_Finding]:
    """Weights that several stages hold: this stage's copies and the other holders, by a pipeline's `tied_groups()`."""
    names = {id(param): name for name, param in _named(model)}
    findings: list[_Finding] = []
    pp = frozenset(["pp"])
    for part in (module for module in model.modules() if is_partial(module)):
        later = not part.tied_weights_synced
        for param, holders in part.tied_groups():
            value = _Value("a tied weight", param.detach(), frozenset() if later else pp, pp)
            if later:
                value = value._replace(hint="the pipeline makes the copies equal in its first step")
            digest = digests.get(names.get(id(param), ""))
            known = {value.name: digest} if digest is not None else {}
            compared["pp"] = compared.get("pp", 0) + len(known)
            label = f"{names.get(id(param))} "
            findings += _compare("pp", holders, {value.name: value} if known else {}, known, label)
    return findings


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns this rank's parameters: of a pipeline, those of its stage."""
    yield from partial_model(model).local_named_parameters()


def _parameters(model: nn.Module | None) -> Iterator[_Value]:
    if model is None:
        return
    restamp(model)
    atoms = runs_of_parts(context.current().typed_mesh.tp_parts)
    for name, param in _named(model):
        spec = spec_of(param)
        experts = spec.axis == "ep" or bool(getattr(param, "expert_model_parallel", False)) and comm.size("ep") > 1
        copies = (spec.replicated_over,) if isinstance(spec.replicated_over, str) else spec.replicated_over
        compared = [part for name in copies for part in ((name,) if name == "tp" else atoms.get(name, (name,)))]
        equal = frozenset([*compared, *(["edp"] if experts else ["dp", "cp"])])
        shards = (
            spec.axis is not None and part_of(spec.axis).axis == "tp" and spec.num_partitions == comm.size(spec.axis)
        )
        yield _Value(
            name,
            param.detach(),
            equal - {spec.axis},
            usually_different=frozenset([spec.axis] if shards and spec.axis else []),
            hint="perhaps all ranks loaded, or initialised, the same shard",
        )


def _inputs(inputs: Any) -> Iterator[_Value]:
    for path, leaf in pytree.tree_flatten_with_path(inputs)[0]:
        if leaf is not None:
            value = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            hint = "the first stage takes the inputs and the last stage the labels of the same batch"
            yield _Value(f"input{pytree.keystr(path)}", value, frozenset(["tp"]), frozenset(["pp"]), hint=hint)


_BATCH = _Value(
    "the whole batch",
    None,
    frozenset(),
    usually_different=frozenset(["dp"]),
    hint="perhaps the loader does not know its rank: use DistributedSampler(num_replicas=..., rank=...) of the dp axis",
)


def _random_states() -> Iterator[_Value]:
    for state, device in zip(get_state(), ("cpu", accelerator.in_use() or "device")):
        hint = (
            "tp ranks with different random states would drop different elements of equal activations: use one seed "
            "for all tp ranks"
        )
        yield _Value(f"the default random stream ({device})", _short(state), frozenset(), frozenset(["tp"]), hint=hint)


def _short(state: torch.Tensor) -> str:
    return hashlib.sha1(bytes(state.tolist())).hexdigest()[:12]


def _has_values(x: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return True
    return not (x.is_meta or isinstance(x, FakeTensor)) and x.layout is torch.strided


def _digests(values: Sequence[Any]) -> list[_Digest]:
    """Returns exact checksums that depend on the order of elements, transferred from the device at once."""
    sums = [_sums(x) if isinstance(x, torch.Tensor) else None for x in values]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in sums:
        if one is not None:
            by_device.setdefault(one.device, []).append(one)
    numbers = {device: iter(torch.stack(checksums).tolist()) for device, checksums in by_device.items()}
    digests = []
    for x, one in zip(values, sums):
        if one is None:
            digests.append(_Digest((), (), repr(x)))
        else:
            first, second, varies = next(numbers[one.device])
            digests.append(_Digest((first, second), tuple(x.shape), str(x.dtype).removeprefix("torch."), not varies))
    return digests


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the elements' bits, the sum weighted by position, and whether elements differ."""
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros(3, dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=x.device)
        total += torch.stack([part.sum(), (part * (places * _FACTOR)).sum(), (part != bits[0]).any().long()])
    return total


def _compare(
    axis: str, group: Any, values: dict[str, _Value], digests: dict[str, _Digest], label: str = ""
) -> list[_Finding]:
    """Returns the errors and hints of this rank's group, which are equal on its ranks.

    `label`: this rank's name for the values.
    """
    ranks = list(comm.communicator(group).ranks)
    tables = _exchange({name: digests[name] for name in values}, group)
    names = list(dict.fromkeys(name for table in tables for name in table))
    kinds = {name: _by_content([table.get(name) for table in tables], ranks) for name in names}
    findings = []
    unequal = []
    for name in names:
        contents, value = kinds[name], values.get(name)
        # A value that this rank lacks is reported by the other ranks of the group, too.
        if value is None or (axis in value.equal | value.usually_equal and len(contents) > 1):
            unequal.append(name)
        elif axis in value.usually_different:
            for digest, same in contents.items():
                if len(same) > 1 and digest is not None and not digest.constant:
                    what = f"{name} is the same on ranks {same} of {axis}: {value.hint}"
                    findings.append(_Finding(axis, what, False))
    for name, details in zip(unequal, _details(unequal, values, group, label)):
        parts = []
        for digest, same in kinds[name].items():
            what = details[ranks.index(same[0])] if digest is not None else "not there"
            parts.append(f"ranks {same}: {what}")
        value = values.get(name)
        wrong = value is None or axis in value.equal
        text = f"{name} over {axis}: {'; '.join(parts)}"
        findings.append(_Finding(axis, text if wrong or value is None else f"{text}: {value.hint}", wrong))
    return findings


def _by_content(digests: Sequence[_Digest | None], ranks: Sequence[int]) -> dict[_Digest | None, list[int]]:
    kinds: dict[_Digest | None, list[int]] = {}
    for digest, rank in zip(digests, ranks):
        kinds.setdefault(digest, []).append(rank)
    return kinds


def _details(names: Sequence[str], values: dict[str, _Value], group: Any, label: str) -> list[list[str]]:
    """Describes the values of each rank of the group; the group exchanges nothing if there are none."""
    if not names:
        return []
    mine = [label + _words(values[name].value) if name in values else "" for name in names]
    return [list(column) for column in zip(*_exchange(mine, group))]


def _words(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    what = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    first = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in x.reshape(-1)[:3].tolist())
    more = ", ..." if x.numel() > 3 else ""
    if x.numel() == 0 or x.is_complex():
        return f"{what} ({first}{more})"
    wide = x.double()
    return f"{what} ({first}{more}; sum {wide.sum().item():.9g}, largest {wide.abs().max().item():.9g})"


def _exchange(obj: Any, group: Any) -> list[Any]:
    return comm.gather_objects(obj, group)


def _error(findings: Sequence[_Finding]) -> SpmdTypeError:
    axes = ", ".join(dict.fromkeys(finding.axis for finding in findings))
    lines = [finding.text for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"... and {len(findings) - _SHOWN} more")
    return SpmdTypeError(
        f"verify: values that the layout declares equal over {axes} differ between ranks",
        where_from=lines,
        repairs=[
            "load or initialise them equally on all ranks: one checkpoint, materialize(model, seed), equal seeds "
            "and batches",
            "if they should differ, declare how they are sharded: spmd.set_spec(module, name, ShardSpec(...))",
        ],
        axis=findings[0].axis,
        rule="unequal_values",
    )
