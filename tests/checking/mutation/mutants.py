"""The program that uses each call site, and running the mutants: the checker's answer, and that of the values."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from neuronx_dist import (
    attention,
    checking,
    checkpoint,
    comm,
    parallelize,
    planner,
    shard_tensor,
    spmd,
    train,
    xla_replay,
)
from neuronx_dist.checking.types.handlers import autograd
from neuronx_dist.comm.backends import threads
from neuronx_dist.planning import fake_rank, memory
from neuronx_dist.spmd.axes import mesh_of
from tests.checking.mutation.edits import Call, Edit, edits_of, edits_of_function, recorder
from tests.checking.mutation.programs import PROGRAMS
from tests.support.call_sites import Site, find_sites, mutate

__all__ = [
    "EQUIVALENT",
    "EXEMPT",
    "FUNCTIONS",
    "PROGRAM_OF",
    "OUTSIDE",
    "SITES",
    "UNSEEN",
    "Verdict",
    "checked",
    "edits_at",
    "some",
    "table",
    "values_differ",
]

_REDUCTIONS = ("_reduce_params", "_reduce_list", "reduce_gradients")
_MARKS = ("set_spec", "mark_partial_gradients")
_PARALLEL = ("ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding")
FUNCTIONS = (*_REDUCTIONS, *_MARKS, *_PARALLEL)
SITES: dict[str, Site] = find_sites(also=FUNCTIONS)

_EMBEDDING = "ParallelEmbedding.forward:spmd."
_REGIONS = {
    "copy_to_tensor_model_parallel_region:spmd.convert": "tensor parallel",
    "reduce_from_tensor_model_parallel_region:spmd.all_reduce": "tensor parallel",
    "scatter_to_tensor_model_parallel_region:spmd.convert": "last dim",
    "gather_from_tensor_model_parallel_region:spmd.all_gather": "last dim",
    "scatter_to_sequence_parallel_region:spmd.convert": "megatron",
    "gather_from_sequence_parallel_region:spmd.all_gather": "megatron",
    "reduce_scatter_to_sequence_parallel_region:spmd.reduce_scatter": "megatron",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim:spmd.reduce_scatter": "with dim",
    "gather_from_tensor_model_parallel_region_with_dim:spmd.all_gather": "with dim",
    "scatter_input_channels_to_tensor_model_parallel_region:spmd.convert": "channels",
    "all_gather_last_dim_from_tensor_parallel_region:spmd.all_gather": "last dim",
    "reduce_scatter_last_dim_to_tensor_parallel_region:spmd.reduce_scatter": "last dim",
    "reduce_from_context_model_parallel_region:spmd.all_reduce": "context",
    "all_to_all:spmd.all_to_all": "all to all",
    **{
        f"{way}_expert_parallel_region:spmd.{operator}": "experts" if operator == "all_to_all" else "experts, scattered"
        for way in ("enter", "exit")
        for operator in ("convert", "all_to_all", "all_gather")
    },
}
PROGRAM_OF: dict[str, str] = {
    **{f"{region}#1": program for region, program in _REGIONS.items()},
    "ColumnLinear.forward:comm.all_gather#1": "sequence",
    "ColumnLinear.backward:comm.all_gather#1": "sequence",
    "ColumnLinear.backward:comm.all_reduce#1": "fused",
    "ColumnLinear.backward:comm.reduce_scatter#1": "sequence",
    "RowLinear.forward:comm.all_reduce#1": "mlp",
    "RowLinear.forward:comm.reduce_scatter#1": "sequence",
    "RowLinear.backward:comm.all_gather#1": "sequence",
    "gathered:spmd.all_gather#1": "gathered blocks",
    "gathered:spmd.all_gather#2": "gathered",
    "used_parameter:spmd.reinterpret#1": "llama, one key/value head",
    "RowParallelLinear.used_weight:spmd.convert#1": "llama, one key/value head",
    "RowParallelLinear.forward:spmd.convert#1": "split",
    "RowParallelLinear.forward:spmd.convert#2": "partial",
    f"{_EMBEDDING}all_gather#1": "embedding, columns",
    f"{_EMBEDDING}all_to_all#1": "embedding, columns, sequence",
    f"{_EMBEDDING}all_reduce#1": "embedding",
    f"{_EMBEDDING}reduce_scatter#1": "embedding, sequence",
    "_ParallelCrossEntropy.forward:comm.all_reduce#1": "cross entropy",
    "_ParallelCrossEntropy.forward:comm.all_reduce#2": "cross entropy, smooth",
    "_loss_of:comm.all_reduce#1": "linear cross entropy",
    "_loss_of:comm.all_reduce#2": "linear cross entropy",
    "_Gradients.take:comm.all_reduce#1": "linear cross entropy",
    "_Gradients.take:comm.reduce_scatter#1": "linear cross entropy, sequence",
    "_gathered:comm.all_gather#1": "linear cross entropy, sequence",
    "norm_of:comm.all_reduce#1": "llama, example",
    "global_num_items:comm.all_reduce#1": "items",
    "reduce_gradients:_reduce_params#1": "sequence",
    "reduce_gradients:_reduce_params#2": "llama, tied stages",
    "reduce_gradients:_reduce_params#3": "mlp",
    "complete_reduction:_reduce_params#1": "trainer",
    "complete_reduction:_reduce_params#2": "trainer",
    "bucket_allreduce_gradients:_reduce_list#1": "names of nxd, experts",
    "bucket_allreduce_gradients:_reduce_list#2": "names of nxd",
    "bucket_allreduce_gradients:_reduce_list#3": "names of nxd, context and data",
    "allreduce_sequence_parallel_gradients:_reduce_list#1": "names of nxd",
    "allreduce_context_parallel_gradients:_reduce_list#1": "names of nxd, context",
    "start_sum:comm.all_reduce#1": "mlp",
    "_Norm.__init__:set_spec#1": "sequence",
    "_ParallelLinear.__init__:set_spec#1": "mlp",
    "_ParallelLinear.__init__:set_spec#2": "sequence",
    "ParallelEmbedding.__init__:set_spec#1": "embedding",
    "OutputChannelParallelConv2d.forward:spmd.convert#1": "convolutions",
    "OutputChannelParallelConv2d.forward:spmd.convert#2": "convolution of groups",
    "OutputChannelParallelConv2d.forward:spmd.all_gather#1": "convolutions",
    "InputChannelParallelConv2d.forward:spmd.convert#1": "convolution of groups",
    "InputChannelParallelConv2d.forward:spmd.convert#2": "convolutions",
    "InputChannelParallelConv2d.forward:spmd.all_reduce#1": "convolutions",
    "BaseParallelConv._register:set_spec#1": "convolutions",
    "GQAQKVColumnParallelLinear._register:set_spec#1": "attention",
    "GQAQKVColumnParallelLinear._register_parameters:ColumnParallelLinear#1": "attention",
    **dict.fromkeys(
        (
            "ExpertFusedLinear._add:set_spec#1",
            "ExpertFusedLinear._used_bias:spmd.convert#1",
            "MoE.forward:spmd.all_reduce#1",
            "MoE.forward:spmd.convert#2",
            "MoE.forward:spmd.convert#3",
            "SharedExperts.__init__:ColumnParallelLinear#1",
            "SharedExperts.__init__:ColumnParallelLinear#2",
            "SharedExperts.__init__:RowParallelLinear#1",
            "load_balancing_loss_func:spmd.all_reduce#1",
            "load_balancing_loss_func:spmd.all_reduce#2",
            "router_z_loss_func:spmd.all_reduce#1",
            "router_z_loss_func:spmd.all_reduce#2",
        ),
        "mixture",
    ),
    "MoE.forward:spmd.all_gather#1": "mixture, sequence",
    "MoE.forward:spmd.convert#1": "mixture, sequence",
    "MoE.forward:spmd.reduce_scatter#1": "mixture, sequence",
    **{
        f"{site}#1": "adapters, sequence"
        for site in (
            "LoraParallelLinear._row:spmd.reduce_scatter",
            "WholeLinear.__init__:set_spec",
            "_whole_input:spmd.all_gather",
        )
    },
    "LoraParallelLinear._row:spmd.all_reduce#1": "adapters",
    "_whole_input:spmd.convert#1": "adapters",
    "_replicated:spmd.convert#1": "adapters",
    "LoraParallelLinear._row:spmd.convert#1": "adapter, split",
    "LoraParallelLinear._row:spmd.convert#2": "adapter, partial",
    "mark_partial_gradients:set_spec#1": "llama, sequence",
    "apply_sequence_parallel:mark_partial_gradients#1": "llama, sequence",
    "apply:mark_partial_gradients#1": "qwen",
    "_install:set_spec#1": "llama",
    "_embedding:ParallelEmbedding#1": "llama, sequence",
    "_column:ColumnParallelLinear#1": "llama, sequence",
    "_row:RowParallelLinear#1": "llama, sequence",
    "_embedding_columns:ParallelEmbedding#1": "T5",
    "_share:set_spec#1": "shared bias",
    "ParallelConv1D.__init__:set_spec#1": "GPT-2, sequence",
    "ParallelConv1D.summed:spmd.all_reduce#1": "GPT-2",
    "ParallelConv1D.used_input:spmd.reinterpret#1": "GPT-2",
    "ParallelConv1D.summed:spmd.reduce_scatter#1": "GPT-2, sequence",
    "_take:spmd.convert#1": "Phi 3, sequence",
    "_gather:spmd.all_gather#1": "Phi 3, sequence",
    "_scatter_embedding.scatter:spmd.reduce_scatter#1": "llama, sequence",
    "_gather_sequence.gather:spmd.all_gather#1": "llama, sequence",
    "_gather_vocabulary:spmd.all_gather#1": "llama, logits",
    "start_reduce_scatter:comm.reduce_scatter#1": "llama, example",
    "finish_reduce_scatter:comm.all_reduce#1": "zero, groups",
    "start_all_gather:comm.all_gather#1": "llama, example",
    "NxDPPModel.run_train:reduce_gradients#1": "llama",
    "report_loss:comm.all_reduce#1": "llama",
    "report_loss:comm.broadcast#1": "llama, stages",
    **{f"Messages.{call}#1": "llama, stages" for call in ("_post:comm.recv", "_send:comm.send")},
}


# Sites that are no part of a training step, or not of the program.
EXEMPT = {
    "_ProfiledSteps": "reads files",
    "save_pretrained": "writes weights",
    "MatrixOwners": "a type check sees an elementwise step; tests/parity/test_mutation.py sees values",
    "_written_together": "writes weights",
    "save:comm.gather_objects": "writes files",
    "full_state_dict": "gives tests and files the whole of the weights",
    "NeuronZero1Optimizer.save_sharded_state_dict": "writes files",
    "NeuronZero1Optimizer.load_sharded_state_dict": "reads files",
    "gather_full": "gives tests and files the whole of a tensor",
    "reshard": "marks the weights of other sizes, before training",
    "gather_python_object": "Python objects",
    "load_adapters": "reads files",
    "save_adapters": "writes files",
    "_any_rank_is_unfinished": "generates text, which no step does",
    **dict.fromkeys(
        ("LoraParallelConv1D.__init__", "LoraParallelLinear.__init__"), "only the parameters of these layers are used"
    ),
    "MeshStrategy": "decisions and metrics of Lightning's, beside the step",
    "_gather_over_data": "states of torchmetrics, after the steps",
    "Accelerator": "metrics of accelerate's, beside the step",
    "NxDStrategy": "steps of Lightning's Trainer, which no checked program is: tests/lightning compares weights",
    "rows_of_all": "metrics of accelerate's, beside the step",
    **dict.fromkeys(
        (
            "ParallelTrainerMixin",
            "by_data_rank",
            "compare_batches",
            "from_last_stage",
            "mean_over_data",
            "whole_logits",
        ),
        "around transformers' loop, which no check plays: tests/hf/test_trainer.py compares values",
    ),
    **dict.fromkeys(("send:comm.send", "recv_from"), "scripts' own messages between stages"),
    "_move_in_turns": "before the first step: ranks wait for each other",
    **dict.fromkeys(
        (
            "all_to_all:comm.all_to_all",
            "collective_broadcast",
            "collective_permute",
            "mesh_reduce",
            "optimizer_step",
            "rendezvous",
        ),
        "scripts' own collectives, by torch_xla's arguments",
    ),
    **{
        f"{verb}:comm.{verb}": "scripts' own collectives, by torch_xla's arguments"
        for verb in ("all_reduce", "all_gather", "reduce_scatter")
    },
    **dict.fromkeys(
        ("Dispatch", "_Journey", "exchange_rows"), "tokens with values: tests/parity/mutation_table.py makes it wrong"
    ),
    "GroupLimitedRouter.update_bias": "after the step, with values",
    "all_to_all_for_shuffle": "random permutations: tests/parity/mutation_table.py makes it wrong",
    "distribute_experts:set_spec": "of experts, whose code reads values",
    **dict.fromkeys(
        ("_add_once", "_identity_expert", "_sum_of_parts", "_with_summed_gradient", "shard_parameter"),
        "of experts, whose code reads values: tests/parity/mutation_table.py makes them wrong",
    ),
    "open_together": "Python objects: clocks, when a trace is opened",
    "Lockstep": "in place of the messages of the runtime, where there are none (XLA)",
    "StageModule.sync_tied_weights": "before the first step; a check has no values",
    "ColumnLinear._linears": "what the layer is compared with under a check; second derivatives have a test",
    "RowLinear.composition": "what the layer is compared with, under a check only",
    "_by_operators": "under torch.func only",
    **dict.fromkeys(
        (
            "_OneNode.backward:spmd.all_reduce",
            "_merged:spmd.all_gather",
            "_with_total:spmd.convert",
            "_update_channels:spmd.all_gather",
            "entropy_of_shard:spmd.all_reduce",
            "for_shards:spmd.convert",
            "merged_moments:spmd.all_gather",
            "scaled_by_rms:spmd.all_reduce",
        ),
        "called by ShardTensors and emitted code: values show its mutants (tests/parity/mutation_table.py)",
    ),
    "_Highest": "under torch.func only",
    "share_found_inf": "under torch.amp.GradScaler, which reads values: tests/parity/mutation_table.py makes it wrong",
}
# Everything else is part of a training step, in whatever folder it is. Calls of ShardTensors and of their attention are
# made wrong in tests/parity/mutation_table.py, where values show it.
OUTSIDE = (attention, checking, checkpoint, comm, fake_rank, memory, parallelize)
OUTSIDE += (planner, shard_tensor, spmd, train, xla_replay)

# Mutants that numbers show and types do not.
_WHICH = "which rank has the value: types say that the ranks differ, and not in what"
UNSEEN = {
    ("all_to_all:spmd.all_to_all#1", "twice"): "V -> V: of what varies no order is known",
    ("router_z_loss_func:spmd.all_reduce#1", "over dp,tp"): "a tensor of ones has no type on tp",
    ("report_loss:comm.broadcast#1", "from 0"): _WHICH,
    ("report_loss:comm.broadcast#1", "over pp,dp"): _WHICH,
}
# Mutants that compute the same: neither numbers nor types show them.
_REPEATED = "doing it twice is doing it once"
EQUIVALENT = {
    ("copy_to_tensor_model_parallel_region:spmd.convert#1", "reinterpret(I, R)"): "a synonym",
    ("OutputChannelParallelConv2d.forward:spmd.convert#1", "reinterpret(I, R)"): "a synonym",
    ("used_parameter:spmd.reinterpret#1", "convert(I, R)"): "the gradient is summed as well",
    ("used_parameter:spmd.reinterpret#1", "reinterpret(I, R)"): "a synonym of that",
    **{
        (
            "GQAQKVColumnParallelLinear._register_parameters:ColumnParallelLinear#1",
            option,
        ): "only its parameters are used"
        for option in ("not input_is_replicated", "not sequence_parallel_enabled")
    },
    ("RowParallelLinear.used_weight:spmd.convert#1", "convert(I, S(0))"): "a mask has no gradient",
    ("MoE.forward:spmd.convert#1", "reinterpret(R, I)"): "a synonym",
    ("MoE.forward:spmd.convert#2", "reinterpret(I, R)"): "a synonym",
    ("MoE.forward:spmd.convert#3", "reinterpret(I, R)"): "a synonym",
    **{
        (f"SharedExperts.__init__:{layer}", "not sequence_parallel_enabled"): "nothing is gathered or scattered"
        for layer in ("ColumnParallelLinear#1", "ColumnParallelLinear#2", "RowParallelLinear#1")
    },
    ("load_balancing_loss_func:spmd.all_reduce#1", "all_reduce(P, I)"): "a count has no gradient",
    ("router_z_loss_func:spmd.all_reduce#1", "all_reduce(P, I)"): "a count has no gradient",
    ("_ParallelCrossEntropy.forward:comm.all_reduce#1", "twice"): _REPEATED,
    ("_loss_of:comm.all_reduce#1", "twice"): _REPEATED,
    ("reduce_gradients:_reduce_params#2", "over pp"): "all stages hold the weight",
    ("reduce_gradients:_reduce_params#3", "twice"): "the mean of equal values is the value",
    ("complete_reduction:_reduce_params#2", "twice"): "the mean of equal values is the value",
    ("_install:set_spec#1", "delete"): "the parameter comes with it, unless it is padded",
    ("_share:set_spec#1", "delete"): "the parameter has it; it is for later copies",
    ("report_loss:comm.broadcast#1", "twice"): _REPEATED,
}


@dataclass(frozen=True)
class Verdict:
    """The answer: the kind of the first problem ("types", "collectives", "program", ...; "" if there is none)."""

    kind: str
    text: str
    seconds: float
    reached: bool


@functools.cache
def edits_at(name: str) -> list[Edit]:
    """All mutants of a site, from how it is called in a right run."""
    site, program = SITES[name], PROGRAMS[PROGRAM_OF[name]]
    mesh = mesh_of(program.mesh)
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if mesh.size(axis) > 1]
    axes.append(",".join(axis for axis in axes if axis != "ep"))
    calls: list[Call] = []
    with mutate(site, recorder(calls)):
        program.play()
    assert calls, f"{name}: {PROGRAM_OF[name]!r} does not use it"
    call = max(calls, key=lambda call: call.dims)
    axes = [axis for axis in axes if mesh.groups(tuple(axis.split(","))) != _groups(mesh, call)]
    make = edits_of_function if site.verb in FUNCTIONS else edits_of
    return list(make(site.verb, call, axes))


def _groups(mesh: Any, call: Call) -> Any:
    axis = "pp,dp,cp,tp" if call.axis == "world" else call.axis
    try:
        return mesh.groups(tuple(axis.split(",")) if axis else ())
    except ValueError:  # a group of its own, which is not along an axis
        return None


def some(edits: Sequence[Edit]) -> list[Edit]:
    """The first of each kind."""
    return list({edit.kind: edit for edit in reversed(edits)}.values())[::-1]


@functools.cache
def checked(name: str, edit: Edit) -> Verdict:
    """Returns the answer of `spmd.check` for a mutant."""
    autograd._flavours.clear()  # what is known of functions' backwards, which may be the mutant
    begin = time.perf_counter()
    with mutate(SITES[name], edit.change) as hits:
        report = PROGRAMS[PROGRAM_OF[name]].check()
    autograd._flavours.clear()
    problem = report.problems[0] if report.problems else None
    kind, text = (problem.kind, problem.message) if problem is not None else ("", "")
    return Verdict(kind, text, time.perf_counter() - begin, bool(hits))


HANGS = 20.0  # seconds, for tables of mutants of which many hang


@functools.cache
def values_differ(name: str, edit: Edit, timeout: float = 240.0) -> bool:
    """Whether numbers show a mutant: they are others than in one process, or it cannot run.

    `timeout`: seconds that a rank waits for the others, whatever the program says; after that the mutant is taken for
    one that hangs. Ranks wait for those that build their model: where others use the cores, 20 s may not be enough.
    """
    original = threads.run

    def run(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "timeout": timeout})

    with mutate(SITES[name], edit.change), mock.patch.object(threads, "run", run):
        try:
            return not PROGRAMS[PROGRAM_OF[name]].values_are_right()
        except Exception:  # noqa: B902 - whatever it is, it shows
            return True


def table(values: bool) -> Iterator[str]:
    """A line for each mutant: what the checker says, and with `values` what numbers say."""
    counts: Counter[str] = Counter()
    for name in PROGRAM_OF:
        for edit in edits_at(name):
            verdict = checked(name, edit)
            numbers = ("values differ" if values_differ(name, edit, HANGS) else "values equal") if values else ""
            counts[f"{verdict.kind or 'not seen'} {numbers}".strip()] += 1
            first = verdict.text.split("\n")[0][:100]
            yield f"{verdict.kind or '-':12} {numbers:14} {name:95} {edit.kind:10} {edit.name:35} {first}"
    yield from (f"{count:5} {what}" for what, count in sorted(counts.items()))


if __name__ == "__main__":  # a table of all mutants: python -m tests.checking.mutation.mutants [--values]
    for line in table("--values" in sys.argv):
        print(line, flush=True)
