"""Counts of calls and of memory, against the tables in docs/architecture.md.

The tables are read from the page itself, so that neither it nor the code can change alone.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.hf import causal_lm_loss
from neuronx_dist.parallel_layers import autograd_linear
from tests.support.llama_training import SEQ, Case, batch, build, initial_state, inputs, make_optimizer, step_of
from tests.support.paths import DOCS

pytestmark = pytest.mark.slow

PAGE = (DOCS / "architecture.md").read_text()
Counts = Counter[str]


def table(first_header: str, columns: int) -> dict[str, list[str]]:
    """The rows of the table with these many columns in the section on communication, by their first cell."""
    section = PAGE.split("## What a step communicates")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return {
        row[0]: row[1:]
        for row in rows
        if len(row) == columns and row[0] != first_header and not set(row[0]) <= set("- ")
    }


def counts(cell: str) -> Counts:
    """`2 all_gather, 1 send` as a counter; `-` is nothing."""
    found = Counter({verb: int(number) for number, verb in re.findall(r"(\d+) (\w+)", cell)})
    assert found or cell == "-", f"{cell!r} is no count"
    return found


PER_MICROBATCH = table("part", 5)
PER_STEP = table("part", 4)


def verbs(calls: list[comm.Call]) -> Counts:
    return Counter(call.verb for call in calls)


def loaded(case: Case) -> Any:
    model = build(case)
    options = case.options
    hf.load_pretrained(model, initial_state(options.heads, options.tied, options.layers, options.dtype))
    return model


# --- per microbatch, over tp ------------------------------------------------------------------------------------------


def _passes(run: Any, *given: Any) -> tuple[list[comm.Call], list[comm.Call], Any]:
    """The collectives of a part's forward and of its backward, and its detached output."""
    with comm.record() as forward:
        out = run(*given)
    with comm.record() as backward:
        out.backward(torch.ones_like(out))
    return forward, backward, out.detach()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def _parts(case: Case) -> dict[str, tuple[list[comm.Call], list[comm.Call]]]:
    """Each part of the model run by itself, on what the part before gave."""
    module = loaded(case).original_module
    ids, labels = batch("even", 0)
    rows = torch.arange(SEQ).unsqueeze(0)
    found: dict[str, Any] = {}

    def layer(index: int, x: torch.Tensor) -> torch.Tensor:
        rotary = module.model.rotary_emb(x, rows)
        return module.model.layers[index](x, position_embeddings=rotary, attention_mask=None, position_ids=rows)

    # Under sequence parallelism the embedding's sum is done at the entry of the first layer: take that away again.
    first_forward, first_backward, x = _passes(lambda: layer(0, module.model.embed_tokens(ids)))
    *found["Llama layer"], x = _passes(layer, 1, _leaf(x))
    layer_forward, layer_backward = found["Llama layer"]
    found["embedding"] = _without(first_forward, layer_forward), _without(first_backward, layer_backward)
    *found["norm"], x = _passes(module.model.norm, _leaf(x))
    hidden, head = x, module.lm_head
    *found["head and loss, fused"], _ = _passes(lambda x: causal_lm_loss(head(x), labels, 60), _leaf(hidden))
    *found["head"], logits = _passes(head.eval(), _leaf(hidden))
    *found["loss"], _ = _passes(lambda z: causal_lm_loss(z, labels, 60), _leaf(logits))
    return found


def _without(calls: list[comm.Call], others: list[comm.Call]) -> list[comm.Call]:
    return list((Counter(calls) - Counter(others)).elements())


@pytest.mark.each_value
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", [2, 4])
def test_parts_of_a_model(tp: int, sequence_parallel: bool) -> None:
    case = Case(tp=tp, sequence_parallel=sequence_parallel)
    for parts in comm.threads.run(case.mesh, _parts, case):
        assert parts.keys() == PER_MICROBATCH.keys() - {"stage boundary", "key/value heads on several ranks"}
        for name, passes in parts.items():
            cells = PER_MICROBATCH[name][2:] if sequence_parallel else PER_MICROBATCH[name][:2]
            assert [verbs(calls) for calls in passes] == [counts(cell) for cell in cells], name
            assert all(call.axis == "tp" for calls in passes for call in calls)
            # The sum of products is [rows, seq, hidden]: no part sends more than that, or another shape.
            tokens = batch("even", 0)[0].numel()
            of_loss = [tokens * 8, 2 * tokens * 8] if "loss" in name else []
            sent = [call.bytes for calls in passes for call in calls]
            assert [size for size in sent if size != tokens * 32 * 8] == of_loss


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
def test_key_value_heads_on_several_ranks(sequence_parallel: bool) -> None:
    """A layer has the sums over the ranks that share a head, of its weights' gradients, and nothing else more."""
    case = Case(tp=4, heads="replicated", sequence_parallel=sequence_parallel)
    columns = slice(2, 4) if sequence_parallel else slice(0, 2)
    for parts in comm.threads.run(case.mesh, _parts, case):
        for name, expected in (("key/value heads on several ranks", "tp%2"), ("Llama layer", "tp")):
            passes = [[call for call in calls if call.axis == expected] for calls in parts["Llama layer"]]
            assert [verbs(calls) for calls in passes] == [counts(cell) for cell in PER_MICROBATCH[name][columns]], name
            if expected == "tp%2":
                assert {call.bytes for calls in passes for call in calls} == {4 * 24 * 8}
        assert {call.axis for calls in parts["Llama layer"] for call in calls} == {"tp", "tp%2"}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
def test_a_whole_model_is_the_sum_of_its_parts(sequence_parallel: bool) -> None:
    case = Case(tp=2, sequence_parallel=sequence_parallel)

    def rank_main() -> Any:
        module = loaded(case).original_module
        ids, labels = batch("even", 0)
        with comm.record() as forward:
            loss = module(input_ids=ids, labels=labels).loss
        with comm.record() as backward:
            loss.backward()
        return verbs(forward), verbs(backward)

    expected = []
    for column in (2, 3) if sequence_parallel else (0, 1):
        parts = [counts(PER_MICROBATCH[name][column]) for name in ("embedding", "norm", "head and loss, fused")]
        expected.append(
            sum([*parts, *[counts(PER_MICROBATCH["Llama layer"][column])] * case.options.layers], Counter())
        )
    assert comm.threads.run(case.mesh, rank_main)[1] == tuple(expected)


def test_the_backward_collective_starts_before_the_weight_gradient_and_is_awaited_after(monkeypatch: Any) -> None:
    """By order, not by time: what rank 0 had recorded when it came to compute the weight gradient."""
    original = autograd_linear._parameter_grads
    before: list[list[str]] = []
    calls_of_rank: dict[int, list[comm.Call]] = {}

    def noted(*args: Any) -> Any:
        if comm.rank("tp") == 0:
            before.append([call.verb for call in calls_of_rank[0]])
        return original(*args)

    def rank_main(sequence_parallel: bool) -> list[str]:
        layer = nxd.ColumnParallelLinear(
            4, 8, gather_output=False, dtype=torch.float64, device="meta", sequence_parallel_enabled=sequence_parallel
        )
        nxd.materialize(layer, 0)
        x = torch.ones(4, 2, 4, dtype=torch.float64, requires_grad=True)
        out = layer(x)
        with comm.record(waits=True) as calls:
            calls_of_rank[comm.rank("tp")] = calls
            out.sum().backward()
        return [call.verb for call in calls]

    monkeypatch.setattr(autograd_linear, "_parameter_grads", noted)
    after = comm.threads.run(nxd.Mesh(2, tp=2), rank_main, False)[0]
    assert before.pop() == ["all_reduce"] and after == ["all_reduce", "wait:all_reduce"]
    after = comm.threads.run(nxd.Mesh(2, tp=2), rank_main, True)[0]
    assert before.pop() == ["all_gather", "reduce_scatter", "wait:all_gather"]
    assert after == ["all_gather", "reduce_scatter", "wait:all_gather", "wait:reduce_scatter"]


# --- a stage boundary, and a step -------------------------------------------------------------------------------------


def _steps(case: Case) -> dict[str, Any]:
    """Two steps, the second recorded, in its parts."""
    model = loaded(case)
    params = [param for param in model.local_parameters() if param.requires_grad]
    optimizer = make_optimizer(case, "adamw", params)
    for step in range(2):
        with comm.record() as labels:
            given = inputs(case, step)
        with comm.record() as train:
            model.run_train(**given)
        with comm.record() as optimize:
            optimizer.step() if case.optimizer != "plain" else step_of(case, optimizer, params)
        grads = {name: (param.numel(), bool(spec.sequence_parallel)) for name, param, spec in _local_specs(model)}
        optimizer.zero_grad()
    tied = sum(param.numel() for param, _ in model.tied_groups())
    return dict(labels=labels, train=train, optimize=optimize, grads=grads, tied=tied, stage=comm.rank("pp"))


def _local_specs(model: Any) -> Any:
    for name, param in model.local_named_parameters():
        yield name, param, nxd.spmd.spec_of(param)


@pytest.mark.each_value
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_stage_boundaries(microbatches: int, sequence_parallel: bool) -> None:
    case = Case(tp=2, pp=4, sequence_parallel=sequence_parallel, microbatches=microbatches)
    (forward, backward) = (
        PER_MICROBATCH["stage boundary"][2:] if sequence_parallel else PER_MICROBATCH["stage boundary"][:2]
    )
    assert counts(forward) == counts(backward) == Counter(send=1, recv=1)
    size = 16 // microbatches * SEQ * 32 * 8 // (2 if sequence_parallel else 1)
    for found in comm.threads.run(case.mesh, _steps, case):
        messages = [call for call in found["train"] if call.verb in ("send", "recv")]
        neighbours = (found["stage"] > 0) + (found["stage"] < 3)  # of which each gets one message and gives one back
        assert verbs(messages) == Counter(send=microbatches * neighbours, recv=microbatches * neighbours)
        assert {call.bytes for call in messages} == {size}


STEPS = [
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, tied=True, optimizer=optimizer, clip=1.0, microbatches=2)
    for optimizer in ("plain", "zero1")
]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step(case: Case) -> None:
    """Everything that is not of a microbatch is in the table of the step, and the other way round."""
    zero1 = case.optimizer == "zero1"
    for rank, found in enumerate(comm.threads.run(case.mesh, _steps, case)):
        assert [(call.verb, call.axis, call.shape) for call in found["labels"]] == [("all_reduce", "dp,cp", ())]
        outside_tp = [call for call in found["train"] if call.axis != "tp" and call.verb not in ("send", "recv")]
        partial = [numel for numel, is_partial in found["grads"].values() if is_partial]
        every = [numel for numel, _ in found["grads"].values()]
        at_tp = [call for call in found["train"] if call.axis == "tp" and len(call.shape) == 1]
        of_loss = [call for call in at_tp if call.shape == (4 * SEQ,)]  # the tokens of a microbatch
        at_tp = [call for call in at_tp if call not in of_loss]
        seen = {
            "number of labels": found["labels"],
            "sequence-parallel gradients": at_tp,
            "tied weights": [call for call in outside_tp if call.axis.startswith("pp_tied")],
            "mean over data, without ZeRO-1": [
                call for call in outside_tp if call.axis == "dp,cp" and len(call.shape) == 1
            ],
            "`broadcast_and_average_loss`": [call for call in outside_tp if call.shape == ()],
            "ZeRO-1": [call for call in found["optimize"] if call.axis == "dp,cp"],
            f"norm, with{'' if zero1 else 'out'} ZeRO-1": [call for call in found["optimize"] if call.shape == ()],
        }
        # Nothing else: all that was recorded is in one of the parts.
        per_microbatch = [call for call in found["train"] if call.axis == "tp" and len(call.shape) > 1] + of_loss
        messages = [call for call in found["train"] if call.verb in ("send", "recv")]
        total = sum(map(len, (found["labels"], found["train"], found["optimize"])))
        assert total == len(per_microbatch) + len(messages) + sum(map(len, seen.values())), rank
        absent = (
            {"mean over data, without ZeRO-1", "norm, without ZeRO-1"} if zero1 else {"ZeRO-1", "norm, with ZeRO-1"}
        )
        assert seen.keys() | absent == PER_STEP.keys()
        for part, calls in seen.items():
            expected = Counter() if part in absent else counts(PER_STEP[part][0])
            if part.startswith("`") and found["stage"] == 0:
                expected = Counter(broadcast=1)
            assert verbs(calls) == expected, (rank, part)
            axes = {call.axis for call in calls}
            if "stages" not in PER_STEP[part][1]:
                assert axes <= set(PER_STEP[part][1].split("; ")), (rank, part, axes)
        # Sizes: every gradient once, and one element for each parameter.
        assert [call.bytes for call in at_tp] == [(sum(partial) + len(partial)) * 8]
        assert [call.bytes for call in seen["tied weights"]] == [(found["tied"] + 1) * 8]
        if zero1:
            scatter, gather = seen["ZeRO-1"]
            assert gather.bytes == scatter.bytes - 2 * len(every) * 8 and sum(every) * 8 <= gather.bytes
        else:
            assert [c.bytes for c in seen["mean over data, without ZeRO-1"]] == [(sum(every) + len(every)) * 8]


def test_one_process_communicates_nothing() -> None:
    (found,) = comm.threads.run(nxd.Mesh(1), _steps, Case(optimizer="zero1", clip=1.0, microbatches=2))
    assert found["labels"] == found["train"] == found["optimize"] == []


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("pp", [2, 4])
def test_activations_in_flight(pp: int, microbatches: int) -> None:
    """Seen from outside: of how many microbatches does autograd hold saved tensors at one time?"""

    class Saved:
        def __init__(self, tensor: torch.Tensor, microbatch: int) -> None:
            self.tensor, self.microbatch = tensor, microbatch

    case = Case(pp=pp, microbatches=microbatches)

    def rank_main() -> Any:
        model = loaded(case)
        alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        peak, microbatch = 0, -1
        first = next(m for m in model.local_modules() if isinstance(m, (nxd.ParallelEmbedding, LlamaDecoderLayer)))

        def next_microbatch(*_: Any) -> None:
            nonlocal microbatch
            microbatch += 1

        def pack(tensor: torch.Tensor) -> Saved:
            nonlocal peak
            saved = Saved(tensor, microbatch)
            alive.add(saved)
            peak = max(peak, len({other.microbatch for other in alive if other.microbatch >= 0}))
            return saved

        model.run_train(**inputs(case, 0))  # records
        first.register_forward_pre_hook(next_microbatch)
        for param in model.local_parameters():
            param.grad = None
        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            model.run_train(**inputs(case, 1))
        return comm.rank("pp"), peak, model.peak_in_flight, len(alive)

    for stage, peak, reported, left in comm.threads.run(case.mesh, rank_main):
        assert peak == reported == min(microbatches, pp - stage), stage
        assert left == 0


@pytest.mark.each_value
@pytest.mark.parametrize("heads", ["gqa", "padded"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_optimizer_state_is_one_dp_th_plus_padding(dp: int, heads: str) -> None:
    case = Case(dp=dp, tp=2, optimizer="zero1", heads=heads)

    def rank_main() -> tuple[int, int, int]:
        model = loaded(case)
        params = list(model.local_parameters())
        optimizer = make_optimizer(case, "adamw", params)
        model.run_train(**inputs(case, 0))
        optimizer.step()
        state = optimizer.base_optimizer.state.values()
        held = sum(x.numel() * x.element_size() for entry in state for x in entry.values() if x.ndim)
        whole = sum(2 * p.numel() * 8 for p in params)
        padding = sum(2 * (-p.shape[0] % dp) * p[0].numel() * 8 for p in params)
        return held, whole, padding

    for held, whole, padding in comm.threads.run(case.mesh, rank_main):
        assert held * dp == whole + padding
        assert padding == 0 if dp == 1 else padding < 0.2 * whole
