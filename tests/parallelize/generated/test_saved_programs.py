"""Recorded programs as text, and `ReuseType.GRAPH`, which reads them in the place of recording again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, ReuseType, parallelize
from neuronx_dist.parallelize import example as example_module
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.emit.source_text import constants_from_text, constants_text, program_text
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.generated import saved_programs
from neuronx_dist.parallelize.generated.saved_programs import programs_from_text, programs_text
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.train.stored import constants_of
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import Program
from neuronx_dist.program.record import record_program
from tests.parallelize.support.hf_models import HF_MODELS, hf_model
from tests.parallelize.support.models import BATCH, MODELS, WIDTH, model

pytestmark = pytest.mark.slow


def _recorded(module: nn.Module, arguments: dict[str, Any]) -> list[Program]:
    return [decomposed(record_program(module, arguments, training=mode)) for mode in (True, False)]


def _assert_equal_after_reading(module: nn.Module, arguments: dict[str, Any]) -> None:
    config = ComputeConfig(2)
    programs = _recorded(module, arguments)
    divisions = [divide(program, "tp", config) for program in programs]
    names = constants_of(*divisions)
    text = programs_text(programs, names)
    assert text is not None
    constants = constants_from_text(constants_text({name: value.constant for value, name in names.items()}))
    again = programs_from_text(text, Example(module, arguments), constants)
    assert again is not None
    for program, read, division in zip(programs, again, divisions, strict=True):
        assert program_text(read) == program_text(program)
        assert (read.structure, read.output_structure) == (program.structure, program.output_structure)
        assert read.training == program.training and len(read.arguments) == len(program.arguments)
        for call, read_call in zip(program.calls, read.calls, strict=True):
            fields = vars(call).keys() - {"args", "kwargs", "results"}
            assert {name: getattr(read_call, name) for name in fields} == {name: getattr(call, name) for name in fields}
            assert [value.producer for value in read_call.results] == [read_call] * len(call.results)
        assert emit(divide(read, "tp", config)) == emit(division)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_was_recorded(name: str) -> None:
    _assert_equal_after_reading(*model(name))


# These models have every function, class of argument and class of result that the others have.
COVERING = ("t5", "gemma2", "mamba", "resnet", "gpt2", "mixtral", "bert", "vit")


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in COVERING else pytest.param(name, marks=pytest.mark.full) for name in HF_MODELS]
)
def test_hugging_face_models(name: str) -> None:
    _assert_equal_after_reading(*hf_model(name))


WEIGHT = torch.full((WIDTH,), 2.0)


class Net(nn.Module):
    """Programs of its own in both modes, a constant, and arguments of many classes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * width), nn.Linear(2 * width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))[..., :WIDTH:1].clamp(max=float("inf")) * WEIGHT
        x = x.permute(*(0, 1)).to(torch.device("cpu"), torch.float32).contiguous(memory_format=torch.contiguous_format)
        return (x.T.T if self.training else x + 1).sum()


def _generated(
    folder: Path, policy: str = "tp", reuse: str = "graph", width: int = WIDTH, plan: int = 2, **config: Any
) -> str:
    torch.manual_seed(0)
    arguments = {"x": torch.zeros(BATCH, WIDTH)}
    options = {"use_end2end": True, **config}
    parallelize(
        Net(width),
        arguments,
        policy,
        ComputeConfig(plan, **options),
        gen_savedir=folder,
        reuse=reuse,
        load_module=False,
    )
    (file,) = folder.rglob("gencode0.py")
    return file.read_text()


@pytest.fixture
def recordings_made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The modes that were recorded."""
    calls: list[bool] = []

    def counted(*args: Any, training: bool) -> Program:
        calls.append(training)
        return record_program(*args, training=training)

    monkeypatch.setattr(example_module, "record_program", counted)
    return calls


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "now, modes",
    [
        ({}, []),
        ({"policy": "data"}, []),
        ({"use_zero": True}, []),
        ({"plan": 4, "pas_config": {"tp_size": 2}}, []),
        ({"policy": "pp", "pas_config": {"pipeline_nmicros": 2}}, []),
        ({"width": 8}, [True, False]),
        ({"inference_only": True}, []),
        ({"policy": "data", "reuse": "override"}, [True, False]),
        ({"policy": "data", "reuse": ReuseType.MOO}, [True, False]),
    ],
    ids=str,
)
def test_what_is_recorded_again(
    now: dict[str, Any], modes: list[bool], tmp_path: Path, recordings_made: list[bool]
) -> None:
    """The program is the one that a new folder gets, whatever was used again."""
    first = _generated(tmp_path / "a")
    assert recordings_made == [True, False] and "eval_forward" in first
    del recordings_made[:]
    again = _generated(tmp_path / "a", **now)
    assert recordings_made == modes
    assert again == _generated(tmp_path / "b", **now)
    assert again != first or not now or "use_zero" in now


def test_a_program_for_inference_is_none_for_training(tmp_path: Path, recordings_made: list[bool]) -> None:
    _generated(tmp_path / "a", inference_only=True)
    assert recordings_made == [False]
    assert _generated(tmp_path / "b") == _generated(tmp_path / "a")
    assert recordings_made == [False, True, False, True, False]


@pytest.mark.parametrize("why", ["sources", "missing", "damaged", "a function that is gone"])
def test_what_cannot_be_used_is_recorded_again(
    why: str, tmp_path: Path, recordings_made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "missing":
        monkeypatch.setattr(saved_programs, "_name", refusing)
    elif why == "a function that is gone":
        monkeypatch.setattr(saved_programs, "_name", lambda function: ["", "module_that_is_gone", "function"])
    first = _generated(tmp_path)
    files = [*tmp_path.rglob("programs.json")]
    assert len(files) == (why != "missing")
    if why == "sources":
        monkeypatch.setattr(saved_programs, "package_digest", lambda: "other")
    elif why == "damaged":
        content = json.loads(files[0].read_text())
        content["programs"][0]["calls"].pop()
        files[0].write_text(json.dumps(content))
    assert _generated(tmp_path, policy="data") != first
    assert recordings_made == [True, False] * 2


def refusing(function: Any) -> Any:
    raise saved_programs._Unnamed
