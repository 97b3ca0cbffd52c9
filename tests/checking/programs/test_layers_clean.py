"""No false alarms: every parallel layer in every option is ok at level G, and takes no more on trust than it must."""

from __future__ import annotations

import functools
import os
import re

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.gradients import buckets
from neuronx_dist.gradients import norm as grad_norm
from neuronx_dist.modules import qkv_linear
from neuronx_dist.optimizer import shard_buckets, shards
from neuronx_dist.parallel_layers import embedding, linear, loss_functions, mappings
from tests.checking.programs import layer_models as models
from tests.support.paths import declared_in, file_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank_of_a_kind_is_confirmed")]
FULL = os.environ.get("NXD_FULL") == "1"

X = torch.randn(models.ROWS, models.SEQ, models.HIDDEN)
IDS = torch.zeros(models.ROWS, models.SEQ, dtype=torch.long)
MESH = {"dp": 2, "cp": 2, "tp": 4}

# What cannot be proven, by file: each line here is a hole. Shapes and axes are left out.
FLAGS = {f"{file_name(buckets)}: that [] is P on *"}  # which ranks have a gradient
FLAGS |= {
    f"{file_name(file)}: local: sharding over * is not followed" for file in (shard_buckets, shards)
}  # flat buffers
MICROBATCHES = {  # as many as data-parallel ranks
    f'{file_name(models)}: div: that 2 is a number of the program, and does not stand for comm.size("{axis}"), to '
    "which it is equal"
    for axis in ("dp", "tp")
}
NORM = {f"{file_name(grad_norm)}: that [] is P on *"}  # gradients of one rank of several with the same
NORM |= {f"{file_name(grad_norm)}: local: sharding over * is not followed"}
MASKED = "that what it looks up for positions of other ranks over * is masked"
LOOKUP = {f"{file_name(embedding)}: that [] is P on *", f"{file_name(embedding)}: embedding: {MASKED}"}
TARGET = {f"{file_name(loss_functions)}: that [] is P on *", f"{file_name(loss_functions)}: gather: {MASKED}"}
EXPERTS = {
    f"{file_name(mappings)}: all_to_all: what varies over * is sharded on dim 0"
}  # parameters say ep, and not which dim


COPIES = {f"{file_name(linear)}: copies of a shard are the shards of the parameter with its rows repeated on *"}


def has_copies(name: str) -> bool:
    return "replicas" in name or "multiplier 2" in name


def _gathered_over_all_of_tp(param, replicas, reduce_dtype):
    return param if replicas == 1 else spmd.reinterpret(param, "tp", src=spmd.I, dst=spmd.V)


def holes(report) -> set[str]:
    found = set()
    for line in (*report.trusted, *report.assumed):
        place, text = declared_in(line)
        text = re.sub(r"\[[^\]]*\]", "[]", text)
        text = re.sub(r"\b(on|over) (?!a )[\w/%]+(, [\w/%]+)*( is| are|$)", r"\1 *\3", text)
        found.add(f"{place}: {text}")
    return found


def clean(report, allowed=frozenset(), needed=frozenset()) -> None:
    assert report.ok, str(report)
    assert needed <= holes(report) <= allowed | needed | FLAGS, (holes(report), allowed)


def sharded(mesh):
    """Inputs over cp: on the sequence."""
    return {"cp": spmd.S(1)} if "cp" in mesh else None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", models.LINEARS)
def test_linear_layers_and_norms(name):
    mesh = {**MESH, "tp": 2} if name.endswith("sequence 0") else MESH  # four rows there, over dp and tp
    report = spmd.check(models.LINEARS[name], X, mesh, in_types=sharded(mesh))
    clean(report, needed=COPIES if has_copies(name) else set())


@pytest.mark.parametrize("make", [lambda param, *_: param, _gathered_over_all_of_tp], ids=["dropped", "over tp"])
@pytest.mark.parametrize("name", filter(has_copies, models.LINEARS))
def test_a_wrong_sum_over_replicas_is_refused(name, make, monkeypatch):
    monkeypatch.setattr(linear, "used_parameter", make)
    monkeypatch.setattr(qkv_linear, "used_parameter", make)
    report = spmd.check(models.LINEARS[name], X, MESH, in_types=sharded(MESH))
    assert [problem.kind for problem in report.problems] == ["types"], str(report)


@pytest.mark.parametrize("name", models.EMBEDDINGS)
def test_embeddings(name):
    options, loss = models.EMBEDDINGS[name]
    mesh = {**MESH, "tp": 2} if name.endswith("sequence 0") else MESH
    if {"max_norm", "sparse"} & options.keys():
        mesh = {"tp": 2}  # data ranks would renormalise other rows of one table; sparse gradients are not reduced
    report = spmd.check(lambda: models.Embedded(loss, options), IDS, mesh, in_types=sharded(mesh))
    more = {hole for hole in holes(report) if "embedding_renorm_" in hole} if "max_norm" in options else set()
    clean(report, needed=set() if name.startswith("hidden") else LOOKUP, allowed=more)


@pytest.mark.each_value
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("options", models.LOSSES, ids=str)
def test_cross_entropy_and_tied_embeddings(options, sequence_parallel):
    model = functools.partial(models.CrossEntropy, sequence_parallel, **options)
    clean(spmd.check(model, IDS, MESH, in_types=sharded(MESH)), needed=LOOKUP | TARGET)


@pytest.mark.parametrize("name", models.MAPPINGS)
def test_region_functions(name):
    if name == "context":
        report = spmd.check(lambda: models.Mapped(name), X, {"cp": 2}, in_types={"cp": spmd.S(1)})
    else:
        report = spmd.check(lambda: models.Mapped(name), X, {"dp": 2, "tp": 2})
    summands = f"{file_name(models)}: all_reduce: the values that vary over * are summands"
    clean(report, needed={summands} if name == "all_to_all" else set())  # pieces change places: no shards any longer


@pytest.mark.parametrize("axis", ["dp", "group"])
def test_another_group_than_tp(axis):
    """An axis, whose parameters are then sharded over it (the data is not), or a group of ranks."""

    def model_fn():
        kind = dict(tensor_model_parallel_group=comm.communicator("tp") if axis == "group" else axis)
        return torch.nn.Sequential(
            nxd.ParallelEmbedding(models.VOCAB, models.HIDDEN, **kind),
            nxd.ColumnParallelLinear(8, 16, gather_output=False, **kind),
            torch.nn.GELU(),
            nxd.RowParallelLinear(16, 8, bias=False, input_is_parallel=True, **kind),
        )

    def step(model, optimizer, ids):
        if axis == "group":
            models.total(model(ids)).backward()
            nxd.reduce_gradients(model)
        else:
            model(ids).square().sum().backward()
        optimizer.step()

    if axis == "dp":
        clean(spmd.check(model_fn, IDS, {"dp": 2}, step=step, in_types={"dp": spmd.R}), needed=LOOKUP)
    else:
        clean(spmd.check(model_fn, IDS, {"dp": 2, "tp": 2}, step=step), needed=LOOKUP)


def _at_level_l():
    """Arguments of the check of each model above: (name, model_fn, inputs, mesh, in_types)."""
    for name, model_fn in models.LINEARS.items():
        mesh = {**MESH, "tp": 2} if name.endswith("sequence 0") else MESH
        yield name, model_fn, X, mesh, sharded(mesh)
    for name, (options, loss) in models.EMBEDDINGS.items():
        yield f"embedding, {name}", functools.partial(models.Embedded, loss, options), IDS, {"tp": 2}, None
    for options in models.LOSSES:
        for sequence_parallel in (False, True):
            model_fn = functools.partial(models.CrossEntropy, sequence_parallel, **options)
            yield f"loss, {options}, {sequence_parallel}", model_fn, IDS, MESH, sharded(MESH)
    for name in models.MAPPINGS:
        mesh = {"cp": 2} if name == "context" else {"dp": 2, "tp": 2}
        yield name, functools.partial(models.Mapped, name), X, mesh, sharded(mesh)


LEVEL_L = [case for case in _at_level_l() if FULL or case[0].startswith(("loss", "row"))]


@pytest.mark.parametrize(("name", "model_fn", "inputs", "mesh", "in_types"), LEVEL_L, ids=[case[0] for case in LEVEL_L])
def test_at_level_l_too(name, model_fn, inputs, mesh, in_types):
    report = spmd.check(model_fn, inputs, mesh, in_types=in_types, level="L")
    assert report.ok, str(report)


# --- recomputation and random numbers --------------------------------------------------------------------------------

SAME = {f"{file_name(models)}: random numbers are the same on every piece along tp: draw them inside of fork()"}


@pytest.mark.each_pair
@pytest.mark.parametrize("checkpointing", models.CHECKPOINTS)
@pytest.mark.parametrize("dropout", ["", "sharded whole"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_and_checkpoints(sequence_parallel, dropout, checkpointing):
    options = dict(sequence_parallel=sequence_parallel, dropout=dropout, checkpointing=checkpointing)
    report = spmd.check(models.net, X, {"dp": 2, "tp": 2}, options=options)
    listed = sequence_parallel and "whole" in dropout  # the mask of a shard of the sequence, from the common stream
    clean(report, needed=SAME if listed else set())


def test_a_checkpoint_communicates_once_more_than_none():
    counts = {}
    for name in models.CHECKPOINTS:
        report = spmd.check(models.net, X, {"tp": 2}, options=dict(checkpointing=name, sequence_parallel=True))
        counts[name] = report.collectives
    plain = counts.pop("")
    assert len(set(counts.values())) == 1 and plain < counts["spmd"], (plain, counts)


# --- optimizers ------------------------------------------------------------------------------------------------------

ZERO1, MASTER = nxd.NeuronZero1Optimizer, nxd.MasterWeightsOptimizer
ADAM, SGD = torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS = [
    dict(wrapper=None, cls=ADAM),
    dict(wrapper=ZERO1, cls=ADAM),
    dict(wrapper=ZERO1, cls=SGD),
    dict(wrapper=MASTER, cls=ADAM),
    dict(wrapper=ZERO1, cls=ADAM, use_grad_acc_hook=True),
    dict(wrapper=MASTER, cls=ADAM, use_grad_acc_hook=True),
    dict(wrapper=ZERO1, cls=ADAM, groups=True),
    dict(wrapper=ZERO1, cls=ADAM, lazy_init=True),
    dict(wrapper=MASTER, cls=ADAM, lazy_init=True),
    dict(wrapper=ZERO1, cls=ADAM, higher_cc_precision=True),
    dict(wrapper=ZERO1, cls=ADAM, grad_clipping=False),
    dict(wrapper=ZERO1, cls=ADAM, optimizer_dtype=torch.float64),
]


def _name(options) -> str:
    return " ".join(str(getattr(value, "__name__", f"{key}={value}")) for key, value in options.items())


@pytest.mark.one_in(3)
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIMIZERS, ids=_name)
def test_optimizers(options, dtype):
    step = models.accumulate if dtype == torch.bfloat16 else None
    report = spmd.check(models.trained, X.to(dtype), {"dp": 2, "tp": 2}, options=dict(options, dtype=dtype), step=step)
    clean(report, allowed=NORM | MICROBATCHES)


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("mesh", [dict(dp=2, ep=2), dict(dp=4, ep=2, tp=2), dict(dp=2, cp=2, ep=4)], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(scatter_gather=True), dict(wrapper=ZERO1)], ids=_name)
def test_experts(options, mesh):
    report = spmd.check(models.experts, X, mesh, options=options, in_types={"cp": spmd.S(0)} if "cp" in mesh else None)
    clean(report, allowed=NORM | EXPERTS)
