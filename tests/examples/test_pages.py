"""Pages of docs/ run as they are written, on ranks as threads; the pictures of the site are what its script draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import neuronx_dist as nxd
from neuronx_dist.optimizer import LossScaler
from neuronx_dist.planner import plans
from tests.checkpoint.small_run import Net, Run
from tests.support import site_pictures
from tests.support.llama import tiny_llama
from tests.support.pages import blocks_of, patched, run_page
from tests.support.paths import DOCS
from tests.support.pipeline_models import Block, Model, batch

pytestmark = pytest.mark.slow

LLAMA = tiny_llama(use_cache=False)
MIXTRAL = MixtralConfig(**tiny_llama().to_dict(), num_local_experts=4, num_experts_per_tok=2)


def losses(results: list[dict[str, Any]], name: str = "loss") -> list[torch.Tensor]:
    return [one[name].detach() for one in results if one[name] is not None]


def assert_one_value(values: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    assert all(abs(x - values[0]) <= tolerance * abs(values[0]) for x in values), values


def test_nnscalers_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Checkpoints are where the page says, and the losses of both ranks are one."""
    monkeypatch.chdir(tmp_path)
    trainers = [names["trainer"] for names in run_page("nnscaler-trainer.md", tp=2)]
    assert [trainer.train_status.finished_train_steps for trainer in trainers] == [8, 8]
    assert trainers[0].train_status == trainers[1].train_status
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "0000-0004",
        "0001-0008",
        "best",
        "last",
    ]


def test_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "problem_of", lambda *args: "")  # tests/planner/test_plan_check.py has type checks
    (names,) = run_page("planner.md")
    assert len(names["plans"]) == 10 and {plan.layout.tp for plan in names["plans"]} <= {4, 8}
    loaded = names["LayoutPlan"].load("llama.plan.json", "llama-70b", names["cluster"])
    assert loaded.words() == names["plans"][0].words()


@pytest.mark.filterwarnings("ignore:swap. Model")
def test_start_a_loop_and_its_two_diffs_have_one_loss_and_the_check_finds_what_was_forgotten():
    (_, loop), (_, tensor_parallel), _, _, (_, pipeline) = blocks_of("start.md")
    runs = [
        run_page("start.md", code=loop),
        run_page("start.md", code=patched(loop, tensor_parallel), tp=2),
        run_page("start.md", code=patched(loop, pipeline), pp=2),
    ]
    assert_one_value([x for results in runs for x in losses(results)])
    added = [line for line in tensor_parallel.splitlines() if line[0] == "+"]
    assert len(added) == 5
    printed: list[str] = []
    run_page("start.md", printed=printed)
    assert 'on dp it is P("avg")' in printed[0] and "reduce_gradients(model)" in printed[0]


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_the_loop_saves_the_weights_of_one_process(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_llama(tie_word_embeddings=tied)).save_pretrained(tmp_path / "in")
    rows = torch.randint(96, (32, 16))
    saved = []
    for mesh in ({}, dict(tp=2, dp=2)):
        out = tmp_path / f"out{len(saved)}"
        replace = {"path/to/folder": str(tmp_path / "in"), '"out")': f'"{out}")'}
        names = {"rows": rows}
        results = run_page("hugging-face.md", names, replace=replace, **mesh)
        assert torch.equal(results[0]["sample"], results[-1]["sample"])
        saved.append(AutoModelForCausalLM.from_pretrained(out).state_dict())
    for name, weight in saved[0].items():
        assert (saved[1][name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_own_block_has_one_loss_and_one_norm():
    runs = [run_page("own-block.md", **mesh)[0] for mesh in ({}, dict(tp=2))]
    assert_one_value([one["loss"].detach() for one in runs])
    assert_one_value([one["norm"] for one in runs])


@pytest.mark.parametrize(("page", "mesh"), [("long-context.md", dict(cp=2)), ("experts.md", dict(ep=2))])
def test_the_mean_loss_is_that_of_one_process(page: str, mesh: dict[str, int]):
    names = {"config": LLAMA, "mixtral": MIXTRAL}
    assert_one_value([x for sizes in ({}, mesh) for x in losses(run_page(page, names, **sizes), "mean")])


def test_layout_and_concepts(capsys: pytest.CaptureFixture[str]):
    printed: list[str] = []
    run_page("layout.md", {"config": LLAMA}, printed=printed)
    peaks = [float(x) for x in re.findall(r"([\d.]+) MiB", printed[0])]
    assert len(peaks) == 4 and peaks[0] > peaks[1]  # ZeRO-1
    run_page("concepts.md")


def test_checkpoints(tmp_path: Path):
    def prepared(code: dict[str, Any]) -> None:
        run = Run()
        run.train()
        code.update({name: getattr(run, name) for name in ("model", "optimizer", "scheduler")})

    (names,) = run_page("checkpoints.md", {"folder": tmp_path, "build_model": Net}, before=prepared)
    assert len(blocks_of("checkpoints.md")) == 8 and names["step"] == 100


def llama_of_recomputation(names: dict[str, Any]) -> None:
    """The block on recomputation has the words of a Llama."""
    module = LlamaForCausalLM(tiny_llama(num_hidden_layers=4))
    options = dict(num_microbatches=2, output_loss_value_spec={"loss": True, "logits": False}, auto_partition=True)
    ids = torch.randint(0, module.config.vocab_size, (4, 8))
    names["model"] = nxd.NxDPPModel(module, transformer_layer_cls=LlamaDecoderLayer, **options)
    names["batch"] = {"input_ids": ids, "labels": ids}


def test_pipelines():
    blocks = [code for _, code in blocks_of("pipelines.md")]
    recompute = next(code for code in blocks if "nxd.recompute(" in code)
    of_llama = {"nxd": nxd, "F": F, "MyBlock": LlamaDecoderLayer}
    run_page("pipelines.md", of_llama, code=recompute, before=llama_of_recomputation)
    others = "\n".join(code for code in blocks if code != recompute)
    (names,) = run_page("pipelines.md", {"Model": Model, "Block": Block, "batch": batch()}, code=others)
    assert len(blocks) == 9 and torch.isfinite(names["loss"]) and len(names["outputs"]) == 4


def small_step(names: dict[str, Any]) -> None:
    """Names that short blocks use: a model on two ranks of tp, and the loss of a batch."""
    torch.manual_seed(0)
    model = names["build"]()
    names |= {"model": model, "params": [*model.parameters()], "loss_of": lambda x: model(x).square().mean()}
    names["loss"] = names["loss_of"](names["first"])


def small_model() -> torch.nn.Module:
    up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
    return torch.nn.Sequential(up, nxd.RowParallelLinear(16, 8, input_is_parallel=True))


@pytest.mark.parametrize(("page", "count"), [("optimizer.md", 4), ("debugging.md", 3)])
def test_short_blocks_run_each_by_itself(page: str, count: int):
    names = {"torch": torch, "nxd": nxd, "build": small_model, "LossScaler": LossScaler}
    names |= dict.fromkeys(("first", "last", "next"), torch.ones(4, 8))
    blocks = blocks_of(page)
    for _, code in blocks:
        run_page(page, names, code=code, before=small_step, tp=2, dp=2)
    assert len(blocks) == count


ELSEWHERE = {"parallelize.md", "shard-tensor.md", "type-system.md", "checked-code.md"}
ELSEWHERE |= {
    "accelerate.md",
    "data.md",
    "launchers.md",
    "lightning.md",
    "metrics.md",
    "trainer.md",
}  # pages that have tests with their rooms
# Blocks that need devices, processes or another package: read, not run.
NOT_RUN = {"devices.md", "other-libraries.md", "timeline.md", "from-nxd.md", "xla.md"}


def test_no_page_has_python_that_no_test_runs():
    tests = Path(__file__).read_text()
    pages = {path.name for path in DOCS.glob("*.md") if blocks_of(path.name)}
    assert {page for page in pages - ELSEWHERE - NOT_RUN if f'"{page}"' not in tests} == set()
    assert pages >= ELSEWHERE | NOT_RUN


@pytest.mark.parametrize("name", ["mesh", "message", "timeline", pytest.param("memory", marks=pytest.mark.full)])
def test_pictures_are_what_the_script_draws(name: str):
    """`make pictures` writes them anew."""
    assert site_pictures.PICTURES[name]() == (DOCS / "images" / f"{name}.svg").read_text()
