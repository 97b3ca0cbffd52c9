"""Every call site that communicates is covered: made wrong, in three ways, it turns the case that it names red.

A call site without a case fails here, and so does a case without its call site: whoever adds a collective adds its case
to `mutation_table.CASES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from neuronx_dist.comm.backends import c10d, message_lists
from neuronx_dist.comm.doctor import probe
from tests.parity.mutation_cases import values_of_every_verb
from tests.parity.mutation_table import CASES, MESSAGES, VERBS
from tests.support.call_sites import MUTATIONS, Mutant, find_sites, hidden_imports, mutate
from tests.support.pool import processes

SITES = find_sites()
FULL = os.environ.get("NXD_FULL") == "1"

_ORDER = "a barrier has no value: it orders reads and writes of files"
_END = "a barrier has no value: a rank leaves the job after the others"
_NCCL = "NCCL only: torch's own collective, called with the buffers as they are"
_LACKING = "backends that lack calls only: tests/devices compares the values with those of other backends"
_PROBE = "a call that `neuronx-dist doctor` tries, and whose values it compares itself"
_XLA = "on XLA only: tests/comm/test_exchange.py compares the permutes"
_SHAPES = "no group: shapes only"
_PASSED_ON = "as it was called, to the communicator underneath; tests/comm/backends compares the values"
_COMPARED = (
    "in a check, which compares it with the function's body (tests/checking/mutation), and in tests of torch.func"
)
_SILENT = "R to I communicates in neither direction: tests/shard_tensor/test_parallel.py is red without it"
_MASK = "a rank's own piece of a mask, which has no gradient: nothing is communicated"
_MEASURES = "predicts memory: a stand-in whose values are not used"
_CLOCKS = "no tensors: ranks agree on file and clock of a trace (tests/pipeline/run/test_trace.py)"
_TIMES = "seconds of ranks, which are measured"
_SEEDS = "seeds, and those of threads are one (tests/parallelize/test_dropout.py has processes, each with its own)"
_FILES = "files, whose digests are compared (tests/parallelize/generated/test_generation.py)"
_STATES = (
    "no tensors: which values there are, without which ranks disagree (tests/parallelize/train/test_state_dicts.py)"
)
_RESULTS = "no tensors: what forward returns, into which the results are put (tests/parallelize/train/test_pipeline.py)"
_LIGHTNING = "no tensors: an object of Lightning's (tests/lightning/test_lightning.py)"
_SHAPES_OF = "no tensors: a shape, without which the broadcast after it fails (tests/hf/test_trainer.py)"
_ENDED = "no tensors: whether a rank's sequences have ended (tests/hf/test_experts.py)"
_TRAINS = "no tensors: folder, refusal or words of a run (tests/train)"
_LAYOUT = "no tensors: whether a file fits a rank, without which ranks disagree (tests/parallelize/cli/test_trainer.py)"
_ERRORS = "no tensors: whether a rank could write (tests/hf/test_save_errors.py)"
EXEMPT = {
    "Pipelined._everywhere:comm.broadcast_object#1": _RESULTS,
    "C10dCommunicator.start_all_gather:_all_gather_single#1": _NCCL,
    "C10dCommunicator.start_reduce_scatter:_reduce_scatter_single#1": _NCCL,
    "C10dCommunicator.start_exchange:dist.batch_isend_irecv#1": _NCCL,
    "C10dCommunicator.start_all_to_all:dist.all_to_all_single#1": _NCCL,
    "C10dCommunicator.start_all_reduce:dist.all_reduce#1": f"complex numbers (test_c10d.py), and {_NCCL}",
    **{
        f"Substitutes.{call}#1": _LACKING
        for call in (
            "_exchange_padded:self.start_all_gather",
            "_exchange_padded:self.start_all_to_all",
            "start_all_reduce:?.start_all_reduce",
            "start_all_reduce:self.start_all_gather",
            "start_all_to_all:self.start_all_gather",
            "start_broadcast:?.start_broadcast",
            "start_broadcast:self.start_all_gather",
            "start_exchange:?.start_exchange",
            "start_permute:?.start_permute",
            "start_permute:pair.start_broadcast",
            "start_recv:?.start_broadcast",
            "start_recv:?.start_recv",
            "start_reduce_scatter:self.start_all_reduce",
            "start_send:?.start_broadcast",
            "start_send:?.start_send",
        )
    },
    "XlaCommunicator.start_exchange:self.start_permute#1": _XLA,
    "ShapesCommunicator.start_reduce_scatter:self.start_all_reduce#1": _SHAPES,
    "CheckCommunicator.start_reduce_scatter:ShapesCommunicator.start_all_reduce#1": _SHAPES,
    **{
        f"CheckCommunicator.start_{verb}:?.start_{verb}#1": _SHAPES
        for verb in ("all_reduce", "all_gather", "all_to_all", "permute", "exchange")
    },
    **{f"Watched.start_{verb}:?.start_{verb}#1": _PASSED_ON for verb in VERBS},
    "_any_rank_is_unfinished:comm.all_reduce#1": _ENDED,
    "_written_together:comm.gather_objects#1": _ERRORS,
    "_on_rank_0:comm.broadcast_object#1": _FILES,
    "_read_on_all:comm.gather_objects#1": _FILES,
    "_send:comm.broadcast_object#1": _FILES,
    "_send:comm.broadcast_object#2": _FILES,
    "_send:comm.gather_objects#1": _FILES,
    "_send:comm.barrier#1": _ORDER,
    "_send_file:comm.broadcast#1": _FILES,
    "whole_values:comm.broadcast_object#1": _SEEDS,
    "_load_deduped_optimizer:comm.gather_objects#1": _STATES,
    "_load_optimizer:comm.gather_objects#1": _STATES,
    **{
        f"{composition}#1": _COMPARED
        for composition in (
            "ColumnLinear._linears:spmd.all_gather",
            "ColumnLinear._linears:spmd.convert",
            "RowLinear.composition:spmd.all_reduce",
            "RowLinear.composition:spmd.reduce_scatter",
        )
    },
    "RowParallelLinear.used_weight:spmd.convert#1": _MASK,
    "graded:spmd.reinterpret#1": _SILENT,
    "_MeasuringCommunicator.start_all_gather:?.start_all_gather#1": _MEASURES,
    "_MeasuringCommunicator.start_reduce_scatter:?.start_reduce_scatter#1": _MEASURES,
    "Cluster.measure:comm.gather_objects#1": _TIMES,
    "_seconds:comm.barrier#1": _TIMES,
    "_agreed_seconds:comm.gather_objects#1": _TIMES,
    "TrainingJob.timed:comm.barrier#1": _TIMES,
    "TrainingJob.measure:comm.gather_objects#1": _TIMES,
    "open_together:comm.gather_objects#1": _CLOCKS,
    "open_together:comm.gather_objects#2": _CLOCKS,
    "DistributedManager.cleanup:comm.barrier#1": _END,
    "_ProfiledSteps.write:comm.barrier#1": _ORDER,
    "_move_in_turns:comm.barrier#1": _ORDER,
    "save_adapters:comm.barrier#1": _ORDER,
    **{f"save:comm.barrier#{number}": _ORDER for number in (1, 2, 3)},
    "read:comm.gather_objects#1": _LAYOUT,
    "save_adapters:comm.gather_objects#1": _FILES,
    "load_adapters:comm.gather_objects#1": _FILES,
    "MeshStrategy.barrier:comm.barrier#1": _ORDER,
    "MeshStrategy.broadcast:comm.broadcast_object#1": _LIGHTNING,
    "from_last_stage:comm.broadcast_object#1": _SHAPES_OF,
    **{
        f"{call}#1": _TRAINS
        for call in (
            "RunCheckpoints.resume:comm.broadcast_object",
            "_run_in_folder:comm.broadcast_object",
            "_say_memory:comm.gather_objects",
            "_stages_not_finite:comm.gather_objects",
            "choose_folder:comm.broadcast_object",
            "choose_folder:comm.gather_objects",
            "compare_layouts:comm.broadcast_object",
            "make_folder:comm.broadcast_object",
            "make_folder:comm.gather_objects",
        )
    },
    **{
        f"{function}:comm.barrier#1": _END
        for function in ("_end_after_step", "_run_in_folder", "leave_together", "run_rank")
    },
    "NeuronZero1Optimizer.load_sharded_state_dict:comm.barrier#1": _ORDER,
    "NeuronZero1Optimizer.save_sharded_state_dict:comm.barrier#1": _ORDER,
}
# Below this communicator is torch.distributed: its call sites are run on two processes.
ON_PROCESSES = sorted(
    name for name, site in SITES.items() if (site.is_in(c10d) or site.is_in(message_lists)) and name not in EXEMPT
)


DOCTOR = {name: _PROBE for name, site in SITES.items() if site.is_in(probe)}


def mutations_of(name: str) -> tuple[str, ...]:
    """Objects are not numbers: they are exchanged or they are not. Signs and orders have no scale."""
    without_scale = ("gather_objects", "update_bias", "whole_logits:comm.all_gather#2")
    return ("drop",) if any(part in name for part in without_scale) else MUTATIONS


def in_turn(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """One mutation of each call site, the three in turn; all with NXD_FULL=1."""
    all_of = {name: mutations_of(name) for name in names}
    return all_of if FULL else {name: (all_of[name][i % len(all_of[name])],) for i, name in enumerate(all_of)}


@pytest.mark.slow
def test_every_call_site_names_a_case() -> None:
    named = [*CASES, *EXEMPT, *DOCTOR, *ON_PROCESSES]
    assert len(named) == len(set(named))
    without_case, without_site = sorted(set(SITES) - set(named)), sorted(set(named) - set(SITES))
    assert not without_case, f"call sites that no case covers (add them to mutation_table.CASES): {without_case}"
    assert not without_site, f"cases for call sites that are not there any more: {without_site}"
    assert not hidden_imports(), "import the module (`from .. import comm`), so that its calls are seen"


def test_lines_tell_the_call_sites_apart() -> None:
    places = [
        (site.file, site.verb, line) for site in SITES.values() for line in range(site.first_line, site.last_line + 1)
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("name", {repr(run): name for name, run in CASES.items()}.values())
def test_cases_are_green(name: str) -> None:
    CASES[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name, mutations", in_turn(CASES).items(), ids=[*CASES])
def test_mutants_are_red(name: str, mutations: tuple[str, ...]) -> None:
    for mutation in mutations:
        with mutate(SITES[name], mutation) as hits:
            try:
                CASES[name]()
                noticed = False
            except AssertionError:  # values; a case that falls over has not noticed anything
                noticed = True
            except ValueError as error:
                noticed = "and have different inputs of" in str(error)  # of ranks that must have equal ones
        assert hits, f"{name}: its case does not reach it"
        assert noticed, f"{name}: {mutation} is not noticed by its case"


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["pp_forward", "pp_backward"])
@pytest.mark.parametrize("call", MESSAGES)
def test_wrong_messages_of_one_direction_are_red(call: str, direction: str) -> None:
    """Activations and gradients go through one line of code: each by itself has to be noticed."""

    def wrong(original: Any, x: Any, channel: Any, **options: Any) -> Any:
        verb = call.rpartition(".")[2]
        return original(x, Mutant(channel, "scale", verb) if channel.axis == direction else channel, **options)

    name = f"Messages.{call}#1"
    with mutate(SITES[name], wrong) as hits, pytest.raises(AssertionError):
        CASES[name]()
    assert hits


def _on_this_rank(mutations: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], tuple[int, list[str]]]:
    sites = find_sites()
    found: dict[tuple[str, str], tuple[int, list[str]]] = {("", ""): (1, values_of_every_verb())}
    for name in mutations:
        for mutation in mutations[name]:
            with mutate(sites[name], mutation) as hits:
                wrong = values_of_every_verb()
            found[name, mutation] = (len(hits), wrong)
    return found


def test_mutants_of_torch_distributed_are_red() -> None:
    results: list[dict[Any, Any]] = processes(2).run(_on_this_rank, in_turn(ON_PROCESSES), mesh={})
    assert [result.pop(("", "")) for result in results] == [(1, []), (1, [])]
    for name, mutation in results[0]:
        hits, wrong = zip(*(result[name, mutation] for result in results))
        assert all(hits), f"{name} is not reached"
        assert any(wrong), f"{name}: {mutation} is not noticed"
