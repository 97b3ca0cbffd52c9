"""Every python block of the README runs, as it is written and in the order of the page."""

import re
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import neuronx_dist as nxd
from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from tests.support.llama import tiny_llama
from tests.support.paths import ROOT
from tests.train.test_rank_exit import command

pytestmark = pytest.mark.slow

CONFIG = tiny_llama(use_cache=False)


def blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_its_blocks_run_in_the_order_of_the_page(tmp_path, capsys):
    loop, pipeline, check, check_of_stages, sharded, _ = blocks()
    names = {}
    try:
        exec(compile(loop.replace("range(100)", "range(3)"), "README, the loop", "exec"), names)
        assert "gradient norm" in capsys.readouterr().out

        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
        nxd.initialize_model_parallel()
        ids = torch.zeros(8, 16, dtype=torch.long)
        given = {
            "AutoModelForCausalLM": AutoModelForCausalLM,
            "LlamaDecoderLayer": LlamaDecoderLayer,
            "config": CONFIG,
            "ids": ids,
            "labels": ids.clone(),
        }  # what it does not import
        names.update(given)
        exec(compile(pipeline.replace("path/to/folder", str(tmp_path)), "README, the pipeline", "exec"), names)
        assert names["loss"].isfinite()
        nxd.destroy_model_parallel()

        exec(compile(check, "README, the check", "exec"), names)
        assert capsys.readouterr().out.startswith("check ok: ")

        exec(compile(check_of_stages, "README, the check of stages", "exec"), names)
        assert capsys.readouterr().out.startswith("check ok: ")

        exec(compile(sharded, "README, ShardTensor", "exec"), {})
        assert capsys.readouterr().out == "0 collectives, 0 bytes: nothing travels\n"  # in a world of one
    finally:
        if nxd.parallel_state.model_parallel_is_initialized():
            nxd.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_block_of_parallelize(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = compile(blocks()[-1], "README, parallelize", "exec")

    def rank():
        names = {}
        exec(code, names)
        return names["parallel"]

    first, second = threads.run(Mesh(2, tp=2), rank)
    assert first.SOURCE == second.SOURCE and "spmd." in first.SOURCE
    assert all(torch.isfinite(parameter).all() for parameter in first.parameters())


def test_the_check_is_of_the_model_above():
    """The check finds the mistake that the README's reader makes first: whole logits."""
    loop, _, check, *_ = blocks()
    definitions = loop.partition("device = ")[0]
    names = {}
    exec(compile(definitions.replace("bias=False, gather_output=False", "bias=False"), "README", "exec"), names)
    exec(compile(check.replace("print(", "report = ("), "README", "exec"), names)
    assert not names["report"].ok and "gather_output=False" in str(names["report"])


@pytest.mark.parametrize("processes", [1, 2])
def test_the_readme_example_trains(processes, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(blocks()[0])
    assert len(list(filter(None, blocks()[0].splitlines()))) <= 35
    words, env = command([str(script)], processes)
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    assert max(map(float, re.findall(r"loss (\d+\.\d+),", done.stdout))) < 3.5, done.stdout


def test_the_page_of_names_has_those_of_the_package():
    section = (ROOT / "docs" / "names.md").read_text()
    named = set(re.findall(r"`(\w+)`", section))
    assert named == set(nxd.__all__) - {"__version__"}
    for name in nxd.__all__:
        assert getattr(nxd, name) is not None
