"""NxD's messages between neighbouring stages."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.comm import recv_from, recv_python_object, send, send_python_object


def exchange_by_hand(objects: bool = False) -> None:
    """Passes a tensor, or also an object, along three stages of two data-parallel ranks, and others back."""
    forward = SimpleNamespace(shape=torch.Size([2, 3]), dtype=torch.float64, requires_grad=True)
    backward = SimpleNamespace(shape=torch.Size([1, 2]), dtype=torch.float32, requires_grad=False)

    def main() -> None:
        stage, column = comm.rank("pp"), comm.rank("dp")
        x = torch.full((2, 3), 1.0 + column, dtype=torch.float64)
        obj = {"column": column, "text": "a" * 1000}
        if stage:
            x = recv_from(forward)
            assert x.requires_grad and x.tolist() == [[1.0 + column] * 3] * 2
            if objects:
                obj = recv_python_object(method="gloo")
            assert obj == {"column": column, "text": "a" * 1000}
        if stage < 2:
            assert send(x) is x
            if objects:
                send_python_object(obj)
            assert recv_from(backward, recv_prev=False).tolist() == [[5.0 + column, 7.0]]
            assert not objects or recv_python_object(recv_prev=False) == [column]
        if stage:
            send(torch.tensor([[5.0 + column, 7.0]]), send_next=False)
            if objects:
                send_python_object([column], send_next=False)

    comm.threads.run(Mesh(6, pp=3), main)


def test_tensors_and_objects_go_to_neighbours() -> None:
    exchange_by_hand(objects=True)
