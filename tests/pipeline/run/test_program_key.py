"""Reuse of a program, and recording anew; the communicator over which a message goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.pipeline.run.microbatches import Batch
from neuronx_dist.pipeline.run.stage_program import program_key, recorded
from neuronx_dist.pipeline.run.transport import Channels, located
from neuronx_dist.pipeline.schedule import Kind, Task
from neuronx_dist.program.recording import TracingError
from neuronx_dist.weights.module_tree import ModuleTree

CPU = torch.device("cpu")


def _key(change: Callable[[nn.Sequential], Any] = lambda model: None, rows: int = 4, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    change(model)
    batch = Batch({"x": torch.zeros(rows, 2)}, None, 2)
    return program_key(batch, ModuleTree(model), options.get("device", CPU), options.get("return_outputs", False))


def _under_autocast(dtype: torch.dtype) -> Any:
    with torch.autocast("cpu", dtype):
        return _key()


def _set(name: str, value: Any) -> Callable[[nn.Sequential], Any]:
    return lambda model: setattr(model[1], name, value)


def test_what_a_program_depends_on() -> None:
    different = [
        _key(),
        _key(rows=6),
        _key(device=torch.device("cuda")),
        _key(return_outputs=True),
        _under_autocast(torch.bfloat16),
        _under_autocast(torch.float16),
        _key(lambda model: model.eval()),
        _key(lambda model: model[1].eval()),
        _key(_set("forward", lambda x: x)),
        _key(_set("gradient_checkpointing", True)),
        _key(lambda model: model[0].bias.requires_grad_(False)),
        _key(lambda model: model.double()),
    ]
    for index, one in enumerate(different):
        assert [one == other for other in different].index(True) == index
        hash(one)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert _key() == _key(_set("gradient_checkpointing", False)) == different[0]


def test_what_a_forward_raises_says_what_it_was_given() -> None:
    def fail(error: Exception) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            assert arguments == (model, {"x": x}, [nn.Linear], CPU)
            raise error

        return record

    model, x = nn.Linear(2, 2), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"^Linear.forward, given \{'x': Tensor\[3, 2\]\}: no$"):
        recorded(fail(ValueError("no")), model, {"x": x}, [nn.Linear], CPU)
    with pytest.raises(TracingError, match="^no$"):  # which says it better
        recorded(fail(TracingError("no")), model, {"x": x}, [nn.Linear], CPU)
    assert recorded(lambda *arguments: arguments, model, {}, [], None) == (model, {}, [], None)


@pytest.mark.parametrize(
    "channels, expected",
    [
        (("f", "b"), ["f f", "f f", "b b", "b b"]),
        (("f", "b", "u", "d"), ["u f", "f u", "b d", "d b"]),
        ((None, None), ["None None"] * 4),
    ],
)
def test_the_communicator_of_a_message(channels: Any, expected: list[str]) -> None:
    """With stages of lower numbers, and of higher ones."""
    kinds = (Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
    assert [" ".join(map(str, Channels(*channels).of(kind))) for kind in kinds] == expected


def test_errors_say_where_they_happened() -> None:
    with pytest.raises(ValueError, match=r"^F3.1 on stage 1 of 4: no$"), located(Task(Kind.FORWARD, 1, 3), 1, 4):
        raise ValueError("no")
    with pytest.raises(KeyError) as error, located("a transfer", 0, 2):
        raise KeyError(3)
    assert error.value.args == (3,) and error.value.__notes__ == ["at a transfer on stage 0 of 2"]
    with pytest.raises(OSError) as failed, located("a transfer", 0, 2):
        raise OSError("no", 5)
    assert failed.value.args == ("a transfer on stage 0 of 2: no", 5)
