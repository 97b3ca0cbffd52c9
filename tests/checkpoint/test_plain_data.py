"""Values as bytes and back, without running code."""

import logging

import pytest
import torch

from neuronx_dist.checkpoint.dcp.plain_data import packed, unpacked
from neuronx_dist.checkpoint.errors import CheckpointCorrupted


def test_plain_data_comes_back():
    value = {"a": [1, 2.5, None, "b"], 3: torch.arange(4)}
    back = unpacked("value", packed("value", value))
    assert back["a"] == value["a"] and torch.equal(back[3], value[3])


def test_messages_name_the_innermost_key():
    with pytest.raises(ValueError, match=r"^value\['a'\]\[2\] holds a object that cannot be read back as plain data"):
        packed("value", {"a": {1: 0, 2: object()}, "b": 1})
    with pytest.raises(ValueError, match=r"^value\[1\]\['a'\] holds a LogRecord .*: .*Unsupported global.*LogRecord"):
        packed("value", [0, {"a": logging.makeLogRecord({})}])
    with pytest.raises(CheckpointCorrupted, match="file is no file of torch.save, or is damaged: its 8 bytes"):
        unpacked("file", b"nonsense")
