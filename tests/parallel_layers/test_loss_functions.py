"""The arguments of `parallel_cross_entropy`: which it refuses, and that a mode sees all of them."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import parallel_cross_entropy
from tests.parallel_layers.layer_parity import tp_mesh

K = 16


@pytest.mark.parametrize(
    "labels, options, kind, parts",
    [
        (torch.tensor([0, K]), {}, IndexError, ["16", "vocabulary of 16", "-100"]),
        (torch.tensor([0, -1]), {}, IndexError, ["-1"]),
        (torch.tensor([0, -100]), dict(ignore_index=-1), IndexError, ["-100", "ignore_index=-1"]),
        (torch.zeros(2), {}, TypeError, ["labels are torch.float32", "integers: labels.long()"]),
        (torch.zeros(2, K), {}, TypeError, ["shape (2, 16)", "Probabilities of classes are not supported"]),
        (torch.tensor([0]), {}, ValueError, ["(1,)", "(2, 8)", "(2,)"]),
        (torch.tensor([0, 1]), dict(label_smoothing=1.5), ValueError, ["1.5"]),
        (torch.tensor([0, 1]), dict(label_smoothing=-0.1), ValueError, ["-0.1"]),
    ],
)
def test_wrong_labels_are_refused(labels, options, kind, parts):
    with comm.as_rank(tp_mesh(2), 0), pytest.raises(kind) as error:
        parallel_cross_entropy(torch.zeros(2, K // 2), labels, **options)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_torch_function_mode_sees_every_option():
    class See(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is parallel_cross_entropy:
                seen.append((args[2:], kwargs))
            return function(*args, **(kwargs or {}))

    seen: list = []
    options = dict(ignore_index=-1, vocab_size=8, inplace_logits=True, tensor_model_parallel_group="cp")
    logits, labels = torch.randn(3, 4), torch.tensor([0, 1, -1])
    with comm.as_rank(Mesh(6, tp=3, cp=2), 0), See():
        parallel_cross_entropy(logits, labels, 0.25, **options)
        parallel_cross_entropy(torch.randn(3, 8 // 2), labels, 0.0, ignore_index=-1, tensor_model_parallel_group="cp")
    assert seen == [((0.25,), options), ((0.0,), dict(ignore_index=-1, tensor_model_parallel_group="cp"))]
