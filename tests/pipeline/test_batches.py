"""Batches that change, what evaluation returns, losses that are not finite, modes that reach every stage."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.errors import RemoteRankError
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.pipeline.test_parity import DictOutput
from tests.support.pipeline_models import SEQ, VOCAB, Block, Model, batch, cut, error, make, on_ranks, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)
TRAIN: dict[str, Any] = {"output_loss_value_spec": True, "num_microbatches": 2}


def recordings(pipeline: NxDPPModel) -> list[Any]:
    """The shapes of `ids` of each recording from here on."""
    seen: list[Any] = []
    record = pipeline.recorder

    def counting(module: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
        seen.append(tuple(inputs["ids"].shape))
        return record(module, inputs, *args)

    pipeline.recorder = counting
    return seen


def of_length(length: int, rows: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randint(0, VOCAB, (rows, length), generator=generator) for name in ("ids", "labels")}


@pytest.mark.parametrize("options", [{}, {"virtual_pipeline_size": 2}], ids=str)
def test_each_new_shape_is_recorded_once(options: dict[str, Any]) -> None:
    """Two epochs whose last batch is smaller, and sequences that grow: gradients are those of one process."""
    model = make()
    epoch = [batch(), batch(seed=1), batch(rows=4), of_length(SEQ + 1), of_length(SEQ + 3)]

    def use(pipeline: NxDPPModel) -> Any:
        shapes = recordings(pipeline)
        steps = []
        for inputs in epoch * 2:
            pipeline.zero_grad()
            loss = pipeline.run_train(**copy.deepcopy(inputs))
            steps.append((loss, {n: p.grad.clone() for n, p in pipeline.local_named_parameters()}))
        return shapes, steps

    for rank, (shapes, steps) in enumerate(on_ranks(PP2, model, use, **TRAIN, **options)):
        assert shapes == [(4, SEQ), (2, SEQ), (2, SEQ + 1), (2, SEQ + 3)]
        for (loss, grads), inputs in zip(steps, epoch * 2):
            expected, whole = reference(model, inputs, 2)
            assert rank == 0 or error(loss, expected) < 1e-10
            assert all(error(grad, whole[name]) < 1e-10 for name, grad in grads.items())


def test_a_last_batch_that_does_not_divide_is_refused_on_every_rank() -> None:
    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch())
        with pytest.raises(ValueError, match=r"\['ids'\] has 3 rows, .* 2 microbatches: nearest are 2 and 4"):
            pipeline.run_train(**batch(rows=3))
        with pytest.raises(ValueError, match="no rows, so its mean would be nan"):
            pipeline.run_train(**batch(rows=0))
        pipeline.num_microbatches = 3  # another number of microbatches, from here on
        pipeline.run_train(**batch(rows=3))

    on_ranks(PP2, make(), use, **TRAIN)


def test_recordings_that_were_not_used_for_longest_are_dropped_with_one_warning() -> None:
    model = make()

    def use(pipeline: NxDPPModel) -> Any:
        shapes = recordings(pipeline)
        assert pipeline.recordings_kept == 128
        with pytest.raises(ValueError, match="recordings_kept must be an integer of at least 1, got 0"):
            pipeline.recordings_kept = 0
        pipeline.recordings_kept = 2
        seen = []
        for length in (2, 3, 2, 4, 2, 3, 4, 3):
            before = len(shapes)
            loss = pipeline.run_train(**of_length(length))
            seen.append(len(shapes) - before)
            assert loss is None or error(loss, reference(model, of_length(length), 2)[0]) < 1e-10
        return seen

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        results = on_ranks(PP2, model, use, **TRAIN)
    #                          2, 3, 2, 4 for 3, 2, 3 for 4, 4 for 2, 3
    assert results == [[1, 1, 0, 1, 0, 1, 1, 0]] * 2
    lines = [str(warning.message) for warning in said if "recordings" in str(warning.message)]
    assert len(lines) == 2 and lines[0].startswith("more than 2 recordings of this pipeline model"), lines
    assert "Pad batches to fewer shapes" in lines[0]


class Masked(Model):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.loss(x, labels)


@pytest.mark.parametrize("rows", [1, 8, None], ids=["of all samples", "of each sample", "of one microbatch"])
def test_a_tensor_of_one_row_goes_whole_to_every_microbatch(rows: int | None) -> None:
    model = make(Masked)
    mask = torch.randn(rows or 8, SEQ, SEQ, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    microbatches = 4 if rows else 1
    inputs = {**batch(), "mask": mask}
    expected, whole = reference(model, {**inputs, "mask": mask.expand(8, SEQ, SEQ)}, microbatches)

    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_train(**inputs), {n: p.grad for n, p in pipeline.local_named_parameters()}

    for rank, (loss, grads) in enumerate(on_ranks(PP2, model, use, **{**TRAIN, "num_microbatches": microbatches})):
        assert rank == 0 or error(loss, expected) < 1e-10
        assert all(error(grad, whole[name]) < 1e-10 for name, grad in grads.items())


@pytest.mark.parametrize("run", ["run_train", "run_eval"])
def test_inputs_with_different_numbers_of_rows_are_refused(run: str) -> None:
    """With one microbatch nothing is cut, and what the model does with them is its own affair."""
    message = (
        r"inputs \['ids'\] and \['mask'\] have 8 and 6 rows, so each of 2 microbatches would get 4 and 3\. "
        r"Pass one row for each sample .*, or a single row, \[1, \.\.\.\], for a tensor that all "
        r"microbatch"
    )
    inputs = {**batch(), "mask": torch.zeros(SEQ, SEQ, dtype=torch.float64)}

    def use(pipeline: NxDPPModel) -> None:
        with pytest.raises(ValueError, match=message):
            getattr(pipeline, run)(**inputs)
        pipeline.num_microbatches = 1
        getattr(pipeline, run)(**inputs)

    on_ranks(PP2, make(Masked), use, **TRAIN)


def test_a_batch_of_one_row_is_cut_as_any_other() -> None:
    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch(rows=1))
        pipeline.num_microbatches = 2
        with pytest.raises(ValueError, match=r"\['ids'\] has 1 rows, which is not divisible into 2 microbatches"):
            pipeline.run_train(**batch(rows=1))

    on_ranks(PP2, make(), use, **{**TRAIN, "num_microbatches": 1})


# --- what evaluation returns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"return_mb_loss": True}, {"broadcast_and_average_loss": True}], ids=str)
def test_evaluation_returns_loss_and_outputs(pp: int, options: dict[str, Any]) -> None:
    model = make(DictOutput)
    expected, _ = reference(model, batch(), 2, {"loss": True})

    def use(pipeline: NxDPPModel) -> Any:
        shapes = recordings(pipeline)
        plain = pipeline.run_eval(**batch())
        both = pipeline.run_eval(return_outputs=True, **batch())
        assert pipeline.run_eval(return_outputs=True, **batch()) is not None and len(shapes) == 2
        return plain, both

    results = on_ranks(
        Mesh(pp, pp=pp), model, use, num_microbatches=2, output_loss_value_spec={"loss": True}, **options
    )
    for rank, (plain, (loss, outputs)) in enumerate(results):
        last = rank == pp - 1
        assert (outputs is not None) == last
        if last or options.get("broadcast_and_average_loss"):
            losses = loss if options.get("return_mb_loss") else [loss]
            assert error(torch.stack(losses).mean(), expected) < 1e-10
            torch.testing.assert_close(plain, loss, rtol=0, atol=0)
        else:
            assert plain is loss is None
    for found, piece in zip(results[-1][1][1], cut(batch(), 2)):
        whole = {key: x if x is None else x.detach() for key, x in model(**piece).items()}
        assert list(found) == list(whole)
        torch.testing.assert_close(found, whole)


def test_outputs_without_a_loss() -> None:
    results = on_ranks(PP2, make(), lambda p: p.run_eval(return_outputs=True, **batch()), num_microbatches=2)
    assert results[0] == (None, None)
    loss, outputs = results[1]
    assert loss is None and error(torch.stack(outputs).mean(), reference(make(), batch(), 2)[0]) < 1e-10


# --- losses that are not finite ---------------------------------------------------------------------------------------


class Breaking(Model):
    """NaN in the rows whose first id is 0: made by the layer `at`, or by the loss."""

    at = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        bad = (self.ids[:, 0] == 0)[:, None, None]
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.where(bad, x * math.nan, x) if number == self.at else x
        return x

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.ids = ids
        loss = super().forward(ids, labels)
        return loss.masked_fill((ids[:, 0] == 0).any(), math.inf) if self.at < 0 else loss


BEFORE = r"this stage received a tensor of shape \[2, 6, 8\] that was not finite already: look at the earlier stages"
HERE = "all tensors that this stage received were finite, so the fault is on this stage"


@pytest.mark.parametrize("at,loss,origin", [(0, "nan", BEFORE), (3, "nan", HERE), (-1, "inf", HERE)])
@pytest.mark.parametrize("run", ["run_train", "run_eval"])
def test_a_loss_that_is_not_finite_is_reported(run: str, at: int, loss: str, origin: str) -> None:
    model = make(Breaking)
    model.at = at
    inputs = batch()
    inputs["ids"][:, 0] = 1

    def use(pipeline: NxDPPModel) -> Any:
        finite = getattr(pipeline, run)(**inputs)
        assert finite is None or math.isfinite(finite)
        bad = {**inputs, "ids": inputs["ids"].clone()}
        bad["ids"][5, 0] = 0  # in microbatch 2 of 4
        return getattr(pipeline, run)(**bad)

    options = {**TRAIN, "num_microbatches": 4}
    assert not math.isfinite(on_ranks(PP2, model, use, **options)[1]), "nobody looks without it"
    message = rf"^F2 on stage 1 of 2: the loss of microbatch 2 is {loss} \(check_finite=True\); {origin}"
    with pytest.raises(FloatingPointError, match=message):
        on_ranks(PP2, model, use, check_finite=True, **options)


def test_it_ends_all_ranks_and_every_data_parallel_rank_looks_at_its_own() -> None:
    inputs = batch()
    inputs["ids"][:, 0] = 1
    ended = []

    def use(pipeline: NxDPPModel) -> None:
        # A copy: of a view, a write by one rank changes the version of what autograd has saved on another.
        pieces = copy.deepcopy(cut(inputs, 2)[comm.rank("dp")])
        if comm.rank("dp") == 1:
            pieces["ids"][0, 0] = 0
        try:
            while True:
                pipeline.run_train(**pieces)
                pipeline.zero_grad()
        except (FloatingPointError, RemoteRankError) as error:
            ended.append((comm.rank("world"), type(error)))
            raise

    with pytest.raises(FloatingPointError, match="microbatch 0 is nan"):
        on_ranks(Mesh(4, pp=2), make(Breaking), use, check_finite=True, **TRAIN)
    assert len(ended) == 4 and [kind for _, kind in ended].count(FloatingPointError) == 1


# --- modes ------------------------------------------------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.dropout(super().forward(x, mask), 1.0, self.training)


class DroppingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping() for _ in range(4))


@pytest.mark.parametrize("off", range(4))
def test_train_and_eval_reach_every_stage(off: int) -> None:
    """With all dropped in training, the loss tells whether layer `off` is in the mode that it was set to."""
    model = make(DroppingModel).eval()
    expected, _ = reference(model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        assert pipeline.eval() is pipeline
        losses = [pipeline.run_train(**batch())]
        pipeline.train()
        pipeline.eval()
        pipeline.original_module.layers[off].train()
        losses.append(pipeline.run_train(**batch()))
        pipeline.eval()
        losses.append(pipeline.run_train(**batch()))
        return losses

    options = {**TRAIN, "transformer_layer_cls": Dropping}
    *_, (before, dropped, after) = on_ranks(Mesh(4, pp=4), model, use, **options)
    assert error(before, expected) < 1e-10 and error(after, expected) < 1e-10
    assert error(dropped, expected) > 1e-3


def test_a_container_that_is_checkpointed_later_is_recorded_anew() -> None:
    class Pair(nn.Sequential):
        pass

    class Paired(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Pair(Block(), Block()) for _ in range(2))

    model = make(Paired)
    _, expected = reference(model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        shapes = recordings(pipeline)
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        nxd.recompute(pipeline, Pair)
        calls = []
        for layer in pipeline.local_modules():
            if isinstance(layer, Block):
                layer.up.register_forward_hook(lambda *_: calls.append(1))
        pipeline.run_train(**batch())
        assert len(shapes) == 2 and len(calls) >= 2 * 2 * 2
        return {n: p.grad for n, p in pipeline.local_named_parameters()}

    for grads in on_ranks(PP2, model, use, pipeline_cuts=["layers.0.1"], auto_partition=False, **TRAIN):
        assert all(error(grad, expected[name]) < 1e-10 for name, grad in grads.items())


def test_gradient_checkpointing_that_is_switched_in_a_container_is_recorded_anew() -> None:
    """Hugging Face's name of it; each layer then runs once more for every microbatch."""

    class Switched(Model):
        gradient_checkpointing = False

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.gradient_checkpointing else layer(x)
            return x

    model = make(Switched)
    _, expected = reference(model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        calls: list[int] = []
        layers = [layer for layer in pipeline.local_modules() if isinstance(layer, Block)]
        for layer in layers:
            layer.up.register_forward_hook(lambda _, args, out: calls.append(type(out) is torch.Tensor))
        counts = []
        for switched in (False, True, False):
            pipeline.original_module.gradient_checkpointing = switched
            pipeline.zero_grad()
            calls.clear()
            pipeline.run_train(**batch())
            counts.append(sum(calls) / 2 / len(layers))
        return counts, {n: p.grad for n, p in pipeline.local_named_parameters()}

    for counts, grads in on_ranks(PP2, model, use, **TRAIN):
        assert counts == [1, 2, 1]
        assert all(error(grad, expected[name]) < 1e-10 for name, grad in grads.items())
