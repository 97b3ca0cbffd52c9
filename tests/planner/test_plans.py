"""`nxd.plan` and its command: tables, explanations, files, and what it says of jobs that are impossible."""

from __future__ import annotations

import html
import importlib
import json
import random
import re
import runpy
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import neuronx_dist as nxd
from neuronx_dist import command_line
from neuronx_dist.__main__ import main
from neuronx_dist.comm import run_command
from neuronx_dist.planner import plans as planner_plans
from neuronx_dist.planner.cluster import Cluster
from neuronx_dist.planner.layout_plan import LayoutPlan
from neuronx_dist.planner.plans import CONSTRAINTS, Plans
from neuronx_dist.planner.predictor import Predictor
from neuronx_dist.planner.report import report, save_report
from neuronx_dist.planner.search import Job
from neuronx_dist.planner.seconds import StepSeconds
from neuronx_dist.planner.workload import workload_of
from neuronx_dist.planning.plan import Plan, PlanError
from neuronx_dist.train.command import arguments
from neuronx_dist.train.flags import layout_of
from tests.support import site_overflow
from tests.support.llama import tiny_llama
from tests.support.paths import DOCS, ROOT

SMALL: dict[str, Any] = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128)
JOB: dict[str, Any] = dict(global_batch=64, seq_len=4096, cluster="h100", devices=8, check=False)


def plans(model: Any = "llama-8b", **changes: Any) -> Plans:
    return nxd.plan(model, **{**JOB, **changes})


def test_a_plan_adds_up() -> None:
    found = plans()
    assert len(found) == 10 and [plan.seconds.total for plan in found] == sorted(plan.seconds.total for plan in found)
    for plan in found:
        plan.layout.check(found.workload.shape)
        assert plan.layout.world_size == 8 and plan.margin >= 0.05
        assert plan.seconds.total == pytest.approx(
            sum(getattr(plan.seconds, field.name) for field in fields(StepSeconds))
        )
        tokens = JOB["global_batch"] * JOB["seq_len"]
        assert plan.tokens_per_second == pytest.approx(tokens / plan.seconds.total / 8)
        # 6 operations per weight and token, and attention: of a model of 8 B parameters most are products of weights.
        flops = 6 * (found.workload.num_parameters - 128256 * 4096) * plan.tokens_per_second
        assert 1 < plan.mfu * 989.4e12 / flops < 1.2
        assert 0 < plan.mfu < 0.7
    text = found[0].explain()
    assert f"{found[0].seconds.total:.4g} s a step" in text and "matrix products" in text and "activations" in text


def test_the_flags_of_a_plan_are_its_layout() -> None:
    parser = arguments()
    for limits in (
        {},
        {"pp": 4, "schedule": ["interleaved", "zb_v"], "recompute": "norms"},
        {"tp": 4, "cp": 2},
        {"overlap": True},
    ):
        for plan in plans(constraints=limits, top_k=3):
            flags = parser.parse_args(plan.train_flags())
            layout = plan.layout if plan.layout.pp > 1 else replace(plan.layout, schedule=None)
            assert layout_of(flags, flags.nproc) == layout
            candidate = plan.candidate
            assert (flags.fused_loss, flags.recompute) == (candidate.fused_loss, candidate.recompute or "none")
            assert flags.overlap == candidate.overlap == ("overlap" in limits)
            assert plan.explain().endswith(f"neuronx-dist train --model FOLDER {' '.join(plan.train_flags())}")


def test_why_not_says_how_much_slower_and_by_what() -> None:
    found = plans()
    text = found.why_not(tp=4, pp=2)
    slower = plans(constraints={"tp": 4, "pp": 2})[0].seconds.total / found[0].seconds.total - 1
    assert text.startswith("tp 4, pp 2: at best tp 4, pp 2") and f"{slower:+.1%}" in text
    assert "collectives of tp" in text
    assert found.why_not(recompute="").startswith("recompute none: at best")
    assert len(plans(constraints={"tp": [8, 8], "schedule": "1f1b"}, top_k=50)) == len(
        {plan.candidate for plan in plans(constraints={"tp": [8], "schedule": "1f1b"}, top_k=50)}
    )
    assert "no layout of llama-8b on 8 x h100 is possible" in found.why_not(tp=3)
    with pytest.raises(PlanError, match="there is no constraint 'tensor'"):
        found.why_not(tensor=2)


@pytest.mark.slow
def test_the_front_has_less_memory_for_more_time() -> None:
    front = plans(top_k=1).pareto()
    assert len(front) > 3
    for one, other in zip(front, front[1:]):
        assert other.seconds.total >= one.seconds.total and other.peak < one.peak


def test_a_file_is_edited_loaded_and_refused(tmp_path: Path) -> None:
    path, where = tmp_path / "a.plan.json", Cluster.preset("h100", 8)
    best = plans(constraints={"tp": 2, "pp": 2})[0]
    best.save(path)
    assert LayoutPlan.load(path, "llama-8b", where) == best
    content = json.loads(path.read_text())
    content["job"]["recompute"] = "full"
    path.write_text(json.dumps(content))
    edited = LayoutPlan.load(path, "llama-8b", where)
    assert edited.candidate == replace(best.candidate, recompute="full") and edited.peak < best.peak
    content["job"]["recompute"], content["microbatches"] = "", 1
    path.write_text(json.dumps(content))
    assert re.search(r"GiB \(\d+%\) too much, it does not fit\n", LayoutPlan.load(path, "llama-8b", where).explain())
    with pytest.raises(PlanError) as refused:
        LayoutPlan.load(path, "llama-70b", where.of(16))
    assert "8,030,261,248 parameters in the plan, llama-70b with 70,553,706,496 here" in str(refused.value)
    assert "= 8 in the plan, 16 here" in str(refused.value)
    content["tp"], content["dp"] = 1, 4
    content["job"]["virtual_pipeline_size"], content["schedule"] = 32, "interleaved"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="cannot work:\n  - 2 pipeline stages with 32 chunks"):
        LayoutPlan.load(path, "llama-8b", where)
    Plan(tp=2).save(path)
    with pytest.raises(PlanError, match="a plan of `parallelize`"):
        LayoutPlan.load(path, "llama-8b", where)
    best.save(path)
    for name, value, message in (
        ("dp", None, "it has no 'dp', the data-parallel size"),
        ("dp", 4, "devices: tp=2 x pp=2 x cp=1 x dp=4 = 16 in the plan, 8 here"),
        ("microbatches", 5, "a global batch of 64 is not divisible by dp 2 × 5 microbatches = 10"),
        ("recompute", [[0, 2]], "recompute is of a plan of `parallelize`, and has no effect here: leave ()"),
        ("second", 2, "it has 'second', which is no key of a plan"),
        ("job", {**json.loads(path.read_text())["job"], "cp": "two"}, "job: cp has 'two', which is no int"),
    ):
        content = {key: x for key, x in {**json.loads(best.plan.text()), name: value}.items() if x is not None}
        path.write_text(json.dumps(content))
        with pytest.raises(PlanError, match=re.escape(message)):
            LayoutPlan.load(path, "llama-8b", where)


WITHOUT_EFFECT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"pad_heads": True}, "pad_heads pads no heads of llama-8b at tp 2: write false"),
    ({}, {"pad_vocab": True}, "pad_vocab pads no vocabulary of llama-8b at tp 2: write false"),
    ({"schedule": "zb_v", "pp": 1, "tp": 4}, {}, "schedule 'zb_v' is of a pipeline, and pp is 1: write '1f1b'"),
    ({"tp": 1, "dp": 4}, {"sequence_parallel": True}, "sequence_parallel shards along tp, and tp is 1: write false"),
]


@pytest.mark.parametrize("changes, of_job, message", WITHOUT_EFFECT)
def test_values_of_a_file_without_effect_are_refused(
    changes: dict[str, Any], of_job: dict[str, Any], message: str, tmp_path: Path
) -> None:
    best = plans(constraints={"tp": 2, "pp": 2, "cp": 1, "sequence_parallel": False}, top_k=1)[0].plan
    assert best.job is not None
    replace(best, **changes, job=best.job._replace(**of_job)).save(tmp_path / "a.json")
    with pytest.raises(PlanError, match=f"a.json has keys without effect:\n  - {re.escape(message)}$"):
        LayoutPlan.load(tmp_path / "a.json", "llama-8b", Cluster.preset("h100", 8))


def test_a_file_says_that_code_is_compiled(tmp_path: Path) -> None:
    """A file of version 1, which has no such key, is of code that is not."""
    path, cluster = tmp_path / "a.json", Cluster.preset("h100", 8)
    best = plans(constraints={"compiled": True}, top_k=1)[0]
    best.save(path)
    assert LayoutPlan.load(path, "llama-8b", cluster) == best and best.words().endswith(", compiled")
    content = json.loads(path.read_text())
    assert content["job"].pop("compiled") is True
    for name in ("axes", "later_calls"):
        del content[name]
    path.write_text(json.dumps({**content, "version": 1, "second": 1, "second_calls": []}))
    loaded = LayoutPlan.load(path, "llama-8b", cluster)
    assert not loaded.candidate.compiled and loaded.seconds.total > best.seconds.total


IMPOSSIBLE: list[tuple[dict[str, Any], list[str]]] = [
    (
        dict(constraints={"tp": 3}),
        [
            "no layout of llama-8b",
            "8 processes are not divisible by tp 3 × pp 1 = 3: start 6 or 9 processes, or use tp 2 or 4",
            "intermediate_size 14336 is not divisible by tp 3",
            "tp 3 excludes all; without it: ",
        ],
    ),
    (
        dict(constraints={"tp": 2, "dp": 3}),
        ["8 devices are not divisible by tp 2 x dp 3 = 6", "dp 3 excludes all; without it: tp 2"],
    ),
    (
        dict(constraints={"tp": 2, "pp": 1, "cp": 1, "dp": 2}),
        ["tp 2 x pp 1 x cp 1 x dp 2 are 4 ranks, and there are 8 devices", "dp 2 excludes all"],
    ),
    (
        dict(seq_len=4095, constraints={"cp": 2}),
        ["seq_len 4095 is not divisible by 2 × cp 2 = 4", "use seq_len 4092 or 4096", "cp 2 excludes all"],
    ),
    (
        dict(seq_len=4095, constraints={"tp": 2, "sequence_parallel": True}),
        ["seq_len 4095 is not divisible by tp 2, as sequence parallelism needs", "sequence_parallel True excludes"],
    ),
    (
        dict(constraints={"overlap": True, "zero1": False}),
        ["overlap True is of ZeRO-1's collectives, and zero1 is False: use zero1 True, or", "zero1 False excludes all"],
    ),
    (
        dict(constraints={"overlap": True, "dp": 1, "cp": 1}),
        ["overlap True is of ZeRO-1's collectives, and dp 1 x cp 1 ranks have none", "overlap True excludes all"],
    ),
    (
        dict(constraints={"sequence_parallel": True, "tp": 1}),
        ["sequence_parallel True has no effect with tp 1, along which it shards: use False", "tp 1 excludes all"],
    ),
    (dict(constraints={"ep": 2}), ["ep 2: this model has no experts; use ep 1", "ep 2 excludes all"]),
    (dict(constraints={"pp": 64}, devices=64), ["64 pipeline stages for 32 layers: use pp 32", "pp 64 excludes all"]),
    (
        dict(constraints={"virtual_pipeline_size": 2, "schedule": "1f1b"}),
        [
            "has 1 chunk on each stage, not 2 (virtual_pipeline_size): use 1",
            "schedule 1f1b excludes all; without it: pp 2",
        ],
    ),
    (
        dict(global_batch=10, constraints={"dp": 4}),
        ["a batch of 10 is not divisible by dp 4 x 1 microbatches of 1 = 4: use a batch of 8 or 12"],
    ),
    (dict(constraints={"tp": 8, "pp": 8}), ["tp 8 excludes all", "pp 8 excludes all; without it: tp 8"]),
    (dict(constraints={"num_microbatches": 128}), ["num_microbatches 128 excludes all"]),
    (dict(model="llama-70b"), ["does not fit: the smallest layout", "it fits on "]),
    (dict(model="llama-8b", constraints={"zero1": False, "tp": 1, "pp": 1, "cp": 1}), ["excludes all; without it"]),
    (dict(seq_len=200_000), ["is longer than the model's 131072 positions: use at most 131072"]),
    (
        dict(global_batch=3, seq_len=1024, constraints={"dp": 8}),
        ["a batch of 3 is smaller than dp 8 x 1 microbatches of 1 = 8: use a batch of 8", "dp 8 excludes all"],
    ),
    (dict(devices=296), ["no layout of llama-8b", "use 288 or 304 devices", "use a global batch of 74"]),
    (dict(constraints={"tp": 0}), ["tp must be a positive integer, got 0"]),
    (dict(constraints={"schedule": "1f1"}), ["schedule must be one of '1f1b'"]),
    (dict(constraints={"tp": []}), ["the constraint tp has no value"]),
    (dict(constraints={"dtypes": "float32"}), ["there is no constraint 'dtypes'; nearest: dtype"]),
    (dict(global_batch=0), ["global_batch must be a positive integer, got 0"]),
]


def _marked(changes: dict[str, Any], words: list[str]) -> Any:
    """Searches of other numbers of devices take a second."""
    is_slow = "model" in changes or changes.get("devices") == 296
    return pytest.param(changes, words, id=str(changes), marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize("changes, words", [_marked(*case) for case in IMPOSSIBLE])
def test_impossible_jobs(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        plans(**changes)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_no_reason_is_given_against_a_layout_that_is_possible() -> None:
    """Whichever of a plan's values are fixed."""
    generator, names = random.Random(0), [name for name in CONSTRAINTS if name not in ("compiled", "fused_loss")]
    for model, limits in (("llama-8b", {}), ("llama-8b", {"pp": [2, 8]}), ("mixtral-8x7b", {"ep": [2, 4]})):
        found = plans(model, devices=32, constraints={"recompute": "full", **limits}, top_k=20)
        predictor = Predictor(found.workload, found.cluster)
        for plan in found:
            values = {**asdict(plan.layout), "dp": plan.layout.dp, "micro_batch": plan.layout.micro_batch}
            values |= {"recompute": plan.candidate.recompute, "overlap": plan.candidate.overlap}
            for _ in range(20):
                fixed = {name: (values[name],) for name in generator.sample(names, generator.randint(1, len(names)))}
                fixed |= {name: (True,) for name in ("pad_heads", "pad_vocab") if name in fixed}
                job = Job(plan.layout.global_batch, plan.layout.seq_len, fixed)
                assert list(planner_plans._reasons(predictor, job)) == [], (plan.words(), fixed)


@pytest.mark.slow
def test_models_by_name_config_folder_and_module(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BertConfig, GemmaConfig, OPTConfig, Phi3Config

    config = tiny_llama(tie_word_embeddings=True, attention_bias=True)
    config.save_pretrained(tmp_path / "tiny")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
        other = AutoModelForCausalLM.from_config(OPTConfig(**SMALL, word_embed_proj_dim=64))
    of_module = workload_of(module)
    assert of_module == workload_of(config)
    assert replace(workload_of(tmp_path / "tiny"), name="llama") == of_module
    assert of_module.num_parameters == sum(param.numel() for param in module.parameters())
    with pytest.raises(ValueError, match="OPTForCausalLM cannot be planned: .*final_layer_norm.* before its layers"):
        workload_of(other)
    folder = tmp_path / "gemma"  # whose file leaves out that the head is tied
    GemmaConfig(**SMALL).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content.pop("tie_word_embeddings")
    (folder / "config.json").write_text(json.dumps(content))
    assert workload_of(folder).tied
    joined = workload_of(Phi3Config(**SMALL, pad_token_id=0))
    only: dict[str, Any] = {"micro_batch": 1, "recompute": "", "pp": 1}
    assert {plan.layout.tp for plan in plans(joined, seq_len=2048, constraints=only)} == {1}
    with pytest.raises(PlanError, match="tp is 1 for phi3: what tp sends of its joined weights, qkv_proj, is"):
        plans(joined, seq_len=2048, constraints={**only, "tp": 2})
    with pytest.raises(ValueError, match="BertLMHeadModel cannot be planned: .* is a matrix beside the layers"):
        workload_of(BertConfig(**SMALL))
    with pytest.raises(ValueError, match="there is no model 'lama-8b': .*nearest: llama-8b"):
        workload_of("lama-8b")
    with pytest.raises(ValueError, match="no causal language model can be built of object"):
        workload_of(object())


def test_weights_are_counted_in_models_of_other_forms() -> None:
    """Two matrices or three, joined projections, learned positions, biases, one to four norms in a layer."""
    for family, norms, gated in (
        ("GPT2", 2, False),
        ("GPTNeoX", 2, False),
        ("Phi", 1, False),
        ("Starcoder2", 2, False),
        ("Gemma2", 4, True),
        ("Gemma3Text", 4, True),
        ("Bloom", 2, False),
    ):
        config = getattr(transformers, f"{family}Config")(**SMALL, vocab_size=256, num_key_value_heads=2, head_dim=16)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config)
        workload = workload_of(module)
        assert workload.num_parameters == sum(param.numel() for param in module.parameters()), family
        assert (workload.layers, workload.blocks[0].norms, workload.blocks[0].gated) == (2, norms, gated)
    assert not workload_of(transformers.GPT2Config(**SMALL)).allows_sequence_parallel  # it has dropout
    assert not workload_of(transformers.BloomConfig(**SMALL)).allows_context_parallel  # its positions are in the scores


# --- the command

COMMAND = "plan --model llama-8b --devices 8 --cluster h100 --batch 64 --seq-len 4096 --no-check".split()


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*COMMAND, "--tp", "2", "4", "--top", "3", "--explain", "--save", str(path)]) == 0
    out = capsys.readouterr().out
    assert "llama-8b (8.0 B parameters) on 8 x h100" in out and out.count(" tp ") >= 3 and "plan 1: tp" in out
    assert Plan.load(path).tp in (2, 4)
    page = tmp_path / "plan.html"
    assert main([*COMMAND, "--pp", "2", "--top", "2", "--report", str(page)]) == 0
    text, out = page.read_text(), capsys.readouterr().out
    assert all(word in text for word in ("stage 1", "8 ranks = pp 2", "twice the batch", "<svg", "matrix products"))
    assert "src=" not in text and "href=" not in text  # no other file
    assert all(words in text for words in re.findall(r"^ *\d+  (.*?)  ", out, re.M))
    assert main([*COMMAND, "--json", "--top", "2", "--recompute", "full", "--no-zero1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["recompute"] for one in found] == ["full", "full"] and not found[0]["layout"]["zero1"]
    assert main([*COMMAND, "--why-not", "tp=4,pp=2"]) == 0
    assert "of the best plan" in capsys.readouterr().out
    assert main([*COMMAND, "--pareto", "--top", "1"]) == 0
    assert capsys.readouterr().out.count("GiB") > 3
    model = tmp_path / "model.py"
    model.write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def fn():\n    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))"
    )
    tiny_llama().save_pretrained(tmp_path / "a model")
    of_folder = ["plan", "--model", str(tmp_path / "a model"), *COMMAND[3:], "--seq-len", "64", "--explain"]
    assert main([*of_folder, "--batch", "8"]) == 0
    assert f"neuronx-dist train --model '{tmp_path / 'a model'}' --" in capsys.readouterr().out
    assert main(["plan", "--model", f"{model}:fn", *COMMAND[3:], "--seq-len", "2048", "--top", "1"]) == 0
    assert "llama (666.9 M parameters) on 8 x h100" in capsys.readouterr().out
    assert main([*COMMAND, "--json", "--why-not", "virtual_pipeline_size=5"]) == 0
    assert "interleaved (5 chunks)" in json.loads(capsys.readouterr().out)["why_not"]
    assert main([*COMMAND, "--tp", "3"]) == 1
    assert "tp 3 excludes all" in capsys.readouterr().err
    assert main(["plan", "--model", "none", *COMMAND[3:]]) == 2
    assert "there is no model 'none'" in capsys.readouterr().err
    assert main([*COMMAND, "--cluster", "h1000"]) == 2
    assert capsys.readouterr().err.startswith("neuronx-dist plan: there is no cluster")
    for words, said in (
        (["--model", f"{model}:json"], "has no 'json'"),
        (["--model", str(model)], "names a file: write "),
        (["--model", "meta-llama/None"], "the cache of the Hugging Face Hub has no config of it: run `hf download"),
        (["--cluster", "none.json"], "--cluster none.json: there is no such file"),
        (["--save", "none/a.json"], "there is no folder none (seen from "),
        (["--why-not", "tp"], "'tp' has no value: write name=value"),
    ):
        assert main([*COMMAND, "--tp", "2", "--pp", "1", "--top", "1", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "explain", "--plan", str(path), *COMMAND[1:5], "--cluster", "h100"]) == 0
    assert "to train in this layout: neuronx-dist train --model FOLDER --tp" in capsys.readouterr().out
    assert main([*COMMAND, "--why-not", "tp=4", "--save", str(path)]) == 0
    assert f"saved plan 1 as {path}" in capsys.readouterr().out


BROKEN: list[tuple[str, str]] = [
    ("def fn():\n    return 1 / 0", "fn: model.py:2: ZeroDivisionError: division by zero"),
    ("def fn():\n    import json\n    return json.loads('x')", "fn: model.py:3: JSONDecodeError: Expecting value"),
    ("def fn(:", "fn: model.py:1: SyntaxError: invalid syntax"),
    ("import no_such_module", "fn: model.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("def fn():\n    open('none.txt')", "fn: model.py:2: FileNotFoundError: [Errno 2] No such file"),
    ("def fn(size, depth=2): ...", "fn needs the argument size, and is called without any: give it a default"),
    ("def fn(): ...", "fn returned None: return a Hugging Face config or model"),
    ("fn = 3", "fn is 3: name a function that returns a config or a model"),
    ("def other(): ...", "has no 'fn'; it has other"),
    ("", "has no 'fn'; it has no functions"),
]


CONTRADICTIONS: list[tuple[str, str]] = [
    ("--plan a.json", "--plan has no effect: name a task: explain, measure, validate"),
    ("--steps 3", "--steps has no effect: name a task"),
    ("--why-not tp=2 --pareto", "--why-not and --pareto: give one of them"),
    ("--why-not tp=2 --explain", "--why-not and --explain: give one of them"),
    ("--save .", "--save . is a folder: name a file"),
    ("--report a.pdf", "--report a.pdf: the name must end in .html or .png"),
    ("--model ./none/config.txt", "--model ./none/config.txt: there is no such file or folder (seen from "),
]


@pytest.mark.parametrize(
    "words, said",
    [
        *((f"{' '.join(COMMAND)} {words}", said) for words, said in CONTRADICTIONS),
        (
            "plan explain --model llama-8b --cluster h100 --plan a --tp 2",
            "--tp has no effect: leave it out of",
        ),
        ("plan explain --model llama-8b --cluster h100 --plan .", "--plan . is a folder: name a file"),
        ("plan measure --model llama-8b", "--model has no effect: leave it out of `plan measure`"),
        ("plan validate --model llama-8b --cluster h100 --plan a --json", "--json has no effect: leave it out of"),
        ("plan explain --model llama-8b", "the following arguments are required: --cluster, --plan"),
    ],
)
def test_flags_that_have_no_effect_or_contradict_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuronx-dist plan: ") and said in error and error.count("\n") == 1, error


@pytest.mark.parametrize("text, said", [*BROKEN, (None, "there is no file none/model.py (seen from ")], ids=str)
def test_errors_of_a_user_s_file_are_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command_line, "_modules", {})
    monkeypatch.delitem(sys.modules, "model", raising=False)
    if text is not None:
        Path("model.py").write_text(text)
    name = "none/model.py:fn" if text is None else "model.py:fn"
    assert main(["plan", "--model", name, *COMMAND[3:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuronx-dist plan: ") and said in error and error.count("\n") == 1, error


@pytest.mark.parametrize("text, said", [broken for broken in BROKEN if "py:" in broken[1]])
@pytest.mark.parametrize("file", ["models/tiny.py", "models/tiny/__init__.py"])
def test_errors_of_a_user_s_module_are_named(
    text: str, said: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command_line, "_modules", {})
    for name in ("models", "models.tiny"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text(text)
    importlib.invalidate_caches()
    assert main(["plan", "--model", "models.tiny:fn", *COMMAND[3:]]) == 2
    error = capsys.readouterr().err
    said = said.partition("model.py:")[2] if "Module" not in said else "cannot import models.tiny: No module named 'no_"
    assert error.startswith("neuronx-dist plan: ") and said in error and error.count("\n") == 1, error
    assert "models.tiny" in error


# --- the report


def test_the_report_has_the_waiting_the_command_and_all_signs() -> None:
    found = plans(constraints={"tp": 2, "cp": 2, "pp": 2}, top_k=2)
    page = html.unescape(report(found))
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.S)
    header, *cells = ([re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>.*?</t[hd]>", row)] for row in rows)
    for plan, row in zip(found, cells[:2]):
        seconds = float(row[header.index("waiting")].split(" s ")[0])
        assert seconds == pytest.approx(plan.seconds.bubble, rel=0.01) and seconds > 0
        assert row[header.index("layout")] == plan.words()
    (command,) = re.findall(r'<pre class="command">neuronx-dist train --model FOLDER (.*)</pre>', page)
    flags = arguments().parse_args(command.split())
    assert layout_of(flags, flags.nproc) == found[0].layout
    (picture,) = re.findall(r"<pre>(.*?)</pre>", page, re.S)
    ranks, _, legend = picture.partition("└")
    assert all(sign in ranks and f"\n{sign}  " in legend for sign in "═┊")


def test_the_command_of_several_hosts_runs_on_each() -> None:
    command = plans(devices=16, top_k=1)[0].train_command().split()
    assert command[:2] == ["neuronx-dist", "run"]
    launch = run_command.arguments().parse_args(command[2:])
    assert (launch.nnodes, launch.nproc_per_node, launch.training_script) == ("2", "8", "neuronx_dist")
    assert "--nproc" not in launch.training_script_args


def test_a_png_without_a_browser_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="a.png: a PNG is drawn by one of chromium, .*: install one, or write .html"):
        save_report(plans(top_k=1), tmp_path / "a.png")


@pytest.mark.process
@pytest.mark.slow
def test_a_png_is_the_page_from_top_to_bottom(tmp_path: Path) -> None:
    browser = site_overflow.browser()
    if browser is None:
        pytest.skip("a PNG is drawn by Chromium, which is not installed here")
    found, path = plans(constraints={"tp": 2, "cp": 2, "pp": 2}, top_k=2), tmp_path / "a.png"
    with pytest.raises(FileNotFoundError):
        save_report(found, tmp_path / "none" / "a.png")
    save_report(found, path)
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width == 1200 and picture.height > 1000
        grey = picture.convert("L")
    paper = grey.getpixel((0, 0))
    ink = [not all(grey.getpixel((x, y)) == paper for x in range(0, 1200, 2)) for y in range(grey.height)]
    assert any(ink[:100]) and any(ink[-100:]) and not any(ink[-25:])  # title, last sentence, and the margin below it
    (tmp_path / "a.html").write_text(report(found))
    assert site_overflow.overflows(browser, [tmp_path]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, devices, batch, seconds",
    [("llama-70b", 1024, 1024, 2), pytest.param("deepseek-v3", 2048, 4096, 10, marks=pytest.mark.full)],
)
def test_large_searches_are_quick(model: str, devices: int, batch: int, seconds: float) -> None:
    """The bound is for a machine without load: here of CPU, twice as much, as two hardware threads share a core."""
    start = time.process_time()
    found = nxd.plan(model, global_batch=batch, seq_len=4096, cluster="h100", devices=devices, check=False)
    assert len(found) == 10 and time.process_time() - start < 2 * seconds


@pytest.mark.full
@pytest.mark.process
def test_a_large_search_takes_less_than_300_megabytes() -> None:
    """With torch, which takes 220 of them."""
    script = (
        "import neuronx_dist as nxd; nxd.plan('llama-70b', global_batch=1024, seq_len=8192, cluster='h100', "
        "devices=1024); print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    most = next(line for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    assert int(most.split()[1]) / 1024 < 300


# --- the page and the example


@pytest.mark.slow
def test_the_example_and_the_table_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        planner_plans, "problem_of", lambda *args: ""
    )  # tests/planner/test_plan_check.py has type checks
    runpy.run_path(str(ROOT / "examples" / "plan_llama.py"), run_name="__main__")
    assert "why not tp 8?" in capsys.readouterr().out
    rows = re.findall(
        r"^\| Llama (\d+B), ([\d,]+), ([\d,]+) \| [^|]* \| ([\d.]+) \|", (DOCS / "planner.md").read_text(), re.M
    )
    assert len(rows) == 3
    for size, devices, batch, seconds in rows:
        job = dict(global_batch=int(batch.replace(",", "")), devices=int(devices.replace(",", "")), seq_len=8192)
        best = nxd.plan(f"llama-{size.lower()}", cluster="h100", top_k=1, check=False, **job)[0]
        assert best.seconds.total == pytest.approx(float(seconds), rel=0.1), "write the table of docs/planner.md anew"


def test_overlap_without_zero1_is_refused_in_a_file(tmp_path: Path) -> None:
    cluster = Cluster.preset("h100", 8)
    options: dict[str, Any] = dict(global_batch=8, seq_len=8192, cluster=cluster, check=False, top_k=1)
    best = nxd.plan("llama-8b", **options, constraints={"overlap": True, "zero1": True})[0]
    best.save(tmp_path / "plan.json")
    assert LayoutPlan.load(tmp_path / "plan.json", "llama-8b", cluster).candidate.overlap
    replace(best.plan, zero1=False).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="overlap is of ZeRO-1's collectives, and zero1 is False"):
        LayoutPlan.load(tmp_path / "plan.json", "llama-8b", cluster)
