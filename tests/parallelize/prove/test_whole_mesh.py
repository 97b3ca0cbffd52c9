"""Steps of whole jobs whose sums over the units or messages are wrong are refused before they run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallelize import EmittedProgramError, parallelize
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.prove.verify import check_types
from neuronx_dist.parallelize.prove.whole_mesh import check_mesh
from neuronx_dist.parallelize.train import optimizer as optimizer_module
from neuronx_dist.parallelize.train import reducer as reducer_module
from neuronx_dist.parallelize.train.pipelined import Pipelined
from neuronx_dist.parallelize.train.reducer import Reducer
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.pipeline.run.message_transport import Messages
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from tests.parallelize.support.models import model
from tests.parallelize.support.pipelines import config, module, samples

pytestmark = pytest.mark.slow

PP: dict[str, Any] = {"pipeline_nstages": 2}
# A model, and the arguments of `config`.
JOBS: dict[str, tuple[str, ComputeConfig, str]] = {
    "tp2 dp2": ("mlp", config(2, 2, pipeline_nstages=1), "4 ranks, level G: gradients and collectives agree"),
    "dp2 zero": ("mlp", config(1, 2, zero=True), "2 ranks, level G"),
    "dp2 async": ("skip", config(1, 2, reducer=True), "2 ranks, level G"),
    "pp2": ("gpt", config(2, **PP), "pipeline messages agree.*, 2 stages by '1f1b' in 4 microbatches$"),
    "pp2 tp2": ("skip", config(4, **PP), "4 ranks, level G.* 2 stages"),  # results are gathered
    "pp2 dp2 zero": ("skip", config(2, 2, zero=True, **PP), "4 ranks, .* 2 stages"),
    "interleaved dp2 zero": (
        "skip",
        config(2, 2, zero=True, pipeline_nstages=4, pp_size=2, pipeline_scheduler="1f1b_interleaved"),
        "4 stages by 'interleaved'",
    ),
    "two axes pp2 dp2": ("mlp", config(8, 2, tp_size=2, **PP), "16 ranks, level G.* 2 stages"),
    "gpipe pp4 dp2": ("gpt", config(4, 2, pipeline_nstages=4, pipeline_scheduler="gpipe"), "8 ranks, .* 4 stages by"),
}
GROUPS = ComputeConfig(1, 4, use_end2end=True, use_zero=True, zero_ngroups=2, pas_config={"pipeline_nmicros": 4})


class Job:
    """A source, and what it is checked by."""

    def __init__(self, name: str, settings: ComputeConfig) -> None:
        whole, self.given = module(name), {"data": samples(name, 1)[0]}
        program = decomposed(record_program(whole, self.given, training=True))
        self.config, self.division = settings, divide(program, "hybrid", settings)
        signature = inspect.signature(whole.forward)
        self.source = emit(self.division, stored=stored_of(whole, self.division), signature=signature)

    def checked(self) -> str:
        return check_mesh(self.source, [self.division], self.config, self.given)

    def edited(self, pattern: str, text: str) -> None:
        self.source, count = re.subn(pattern, text, self.source, count=1)
        assert count, pattern


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", JOBS)
def test_right_jobs(name: str) -> None:
    of, settings, text = JOBS[name]
    report = Job(of, settings).checked()
    assert re.search(text, report) and "check ok" in report and "assumption" not in report


def test_groups_of_units_and_one_unit() -> None:
    assert re.search("level G.*; check ok: 4 ranks, types not checked: collectives agree", Job("mlp", GROUPS).checked())
    assert Job("mlp", config(2, pipeline_nstages=1)).checked() == "one unit without stages"


def test_the_proof_says_what_was_checked(tmp_path: Path) -> None:
    given = {"data": samples("skip", 1)[0]}
    parallelize(module("skip"), given, "hybrid", config(2, 2, **PP), gen_savedir=tmp_path, load_module=False)
    proof = next(tmp_path.rglob("proof.txt")).read_text()
    assert re.search(r"^mesh: check ok: 4 ranks, .*pipeline messages agree", proof, re.MULTILINE)


def test_modules_inside_others_and_inference(tmp_path: Path) -> None:
    whole, arguments = model("gpt")
    parallelize(whole, arguments, "tp", ComputeConfig(2, 4), gen_savedir=tmp_path, load_module=False)
    assert "mesh: check ok: 4 ranks" in next(tmp_path.rglob("proof.txt")).read_text()
    settings = ComputeConfig(2, 2, use_end2end=True, inference_only=True, pas_config={"pipeline_nmicros": 2, **PP})
    given, folder = {"data": samples("gpt", 1)[0]}, tmp_path / "inference"
    parallelize(module("gpt"), given, "hybrid", settings, gen_savedir=folder, load_module=False)
    proof = next(folder.rglob("proof.txt")).read_text()
    assert re.search("mesh: check ok: 2 ranks, .*pipeline messages agree", proof)


# --- sums over the units ----------------------------------------------------------------------------------------------

_REDUCE = Reducer.reduce


def _twice(self: Reducer) -> None:
    _REDUCE(self)
    _REDUCE(self)


def _mean(*args: Any, **kwargs: Any) -> Any:
    return _START(*args, **kwargs, scale=1 / comm.size("dp"))


_START: Any = vars(reducer_module)["start_sum"]


def _averaging(*args: Any, **options: Any) -> Any:
    return NeuronZero1Optimizer(*args, **{**options, "average": True})


@pytest.mark.parametrize("job", ["tp2 dp2", "dp2 async", "gpipe pp4 dp2"])
@pytest.mark.parametrize(
    ("owner", "attribute", "wrong", "text"),
    [
        (Reducer, "reduce", lambda self: None, "norm.* on dp operand 0 is P"),
        (Reducer, "reduce", _twice, "all_reduce.* on dp"),
        (reducer_module, "start_sum", _mean, "on dp operand 0 is R/N: every rank has 1/N of what one process has"),
    ],
    ids=["left out", "doubled", "a mean"],
)
def test_wrong_sums_over_units_are_refused(
    owner: Any, attribute: str, wrong: Any, text: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(EmittedProgramError, match=rf"a step of the whole job is wrong(.*\n)*1.*{text}"):
        Job(*JOBS[job][:2]).checked()


@pytest.mark.parametrize("job", ["dp2 zero", "pp2 dp2 zero"])
def test_means_by_zero_are_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_sharded", _with_average(vars(optimizer_module)["_sharded"]))
    with pytest.raises(EmittedProgramError, match=r"divides by the size of dp itself: it is too small"):
        Job(*JOBS[job][:2]).checked()


def _with_average(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        namespace = right.__globals__
        before, namespace["NeuronZero1Optimizer"] = namespace["NeuronZero1Optimizer"], _averaging
        try:
            return right(*args)
        finally:
            namespace["NeuronZero1Optimizer"] = before

    return wrong


def test_a_tied_weight_that_is_not_summed_over_its_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, *args: Any) -> Any:
        tied, self.tied = self.tied, {}
        try:
            return right(self, *args)
        finally:
            self.tied = tied

    right = Pipelined.train
    monkeypatch.setattr(Pipelined, "train", wrong)
    with pytest.raises(EmittedProgramError, match=r"norm.* on pp operand 0 is P"):
        Job(*JOBS["pp2"][:2]).checked()


# --- messages between stages ------------------------------------------------------------------------------------------


def test_messages_to_a_wrong_peer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, channel: Any, *, dst: int, **options: Any) -> Any:
        other = next(stage for stage in range(4) if stage not in (dst, comm.rank("pp")))
        return right(x, channel, dst=other, **options)

    right = comm.send
    monkeypatch.setattr("neuronx_dist.pipeline.run.message_transport.comm.send", wrong)
    with pytest.raises(EmittedProgramError, match=r"(no (send|receive) for it|sends .* expects)"):
        Job(*JOBS["gpipe pp4 dp2"][:2]).checked()


@pytest.mark.parametrize("inference", [False, True])
def test_a_message_that_is_left_out_is_refused(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Messages, send: Any) -> None:
        if send.microbatch != 2 or torch.is_grad_enabled() == inference:
            right(self, send)

    right: Any = vars(Messages)["_send"]
    monkeypatch.setattr(Messages, "_send", wrong)
    with pytest.raises(EmittedProgramError, match="and rank 0 has no send for it"):
        Job(*JOBS["pp2 dp2 zero"][:2]).checked()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r'("stage_1": \{\n\s+"\w+": \(\[2, 8, )16', r"\g<1>8"),
        (r'("stage_1": \{\n\s+"\w+": \(\[.*\]), torch.float64', r"\1, torch.float32"),
        (r'("stage_1": \{\n)(\s+"\w+".*\n)(\s+"\w+".*\n)', r"\1\3\2"),
        (r'("stage_1": \{\n\s+"\w+": \(\[.*\]), torch.float64, True', r"\1, torch.float64, False"),
    ],
    ids=["shape", "dtype", "order", "gradient"],
)
def test_wrong_tables_of_messages_are_refused(pattern: str, text: str) -> None:
    job = Job("gpt", config(4, **PP))
    check_types(job.source, job.division, job.given)
    job.edited(pattern, text)
    with pytest.raises(EmittedProgramError, match=r"which stage_1 receives.*the table of messages has"):
        check_types(job.source, job.division, job.given)
    if "False" not in text:
        with pytest.raises(
            EmittedProgramError, match=r"sends torch.float64 .*expects torch.float|Mismatch in shape|to return gradient"
        ):
            job.checked()
