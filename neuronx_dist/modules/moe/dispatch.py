"""Tokens on their way to the ranks of their experts, and back.

    route = route_of(expert_index, num_experts, tokens)
    rows = route.to_experts(tokens)             # [rows, h], in order of this rank's experts: `route.sizes` of each
    rows, result = route.to_experts_beside(tokens, g)   # the same, and g() computed while rows travel
    out = route.to_tokens(f(rows), weights)     # [tokens, h]: each token's k rows, weighted and added

    Dispatch       uneven: each row once, to the rank of its expert; the host reads how many rows come from where
    Slots          even: the same number of slots for each expert and rank; no size depends on values

`Dispatch` costs one exchange of counts (an integer for each expert). `Slots` is for programs without values: those of
XLA, whose shapes are constant, and a check's. It sends empty slots too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import comm, spmd
from ...comm.context import AxisLike
from ...comm.rank_selection import in_one_program
from ...gradients.gradient import DATA_AXES
from ...parallel_layers.mappings import enter_expert_parallel_region, exit_expert_parallel_region
from ...spmd import S, V
from ...spmd.local_code import local_map, stamp_rows
from ...spmd.watching import active
from ...torch_internals.fake_tensors import FakeTensor

__all__ = ["Dispatch", "Slots", "exchange_rows", "experts_here", "has_values", "route_of"]


def experts_here(num_experts: int) -> int:
    """Returns the number of experts on one ep rank.

    Raises:
        ValueError: ep does not divide the number of experts.
    """
    ep = comm.size("ep")
    if num_experts % ep:
        raise ValueError(
            f"{num_experts} experts are not divisible by ep={ep}: choose an expert_model_parallel_size that divides "
            "their number"
        )
    return num_experts // ep


def _fits(expert_index: torch.Tensor, num_experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which choices are among the first `capacity` of their expert, and their number there: `[tokens, k]`."""
    chosen = torch.nn.functional.one_hot(expert_index, num_experts).sum(1)  # a token chooses an expert once
    position = chosen.cumsum(0).gather(1, expert_index) - 1
    return position < capacity, position


def route_of(
    expert_index: torch.Tensor, num_experts: int, tokens: torch.Tensor, capacity: int | None = None
) -> Dispatch | Slots:
    """Returns the route of tokens `[tokens, h]` to experts `[tokens, k]`; all ranks of ep call it at the same time.

    Args:
        num_experts: of all ranks.
        capacity: rows of one expert from this rank; further ones are dropped, and count 0. None: all of them.
    """
    if has_values(tokens):
        return Dispatch(expert_index, num_experts, capacity)
    return Slots(expert_index, num_experts, len(tokens) if capacity is None else capacity)


def has_values(tokens: torch.Tensor) -> bool:
    """Returns whether sizes may depend on values; not in a check or in one program for all ranks."""
    return not (in_one_program(tokens) or tokens.is_meta or isinstance(tokens, FakeTensor))


class Dispatch:
    """The rows of this rank's experts, in order of experts. All ranks of ep make one at the same time.

    Args:
        expert_index: the k experts of each token, `[tokens, k]`.
        num_experts: of all ranks.
        capacity: rows of one expert from this rank; further ones are dropped, and count 0. None: all of them.
        axis: over which the experts are divided, in place of ep.

    Attributes:
        sizes: number of rows of each expert of this rank.
    """

    def __init__(
        self, expert_index: torch.Tensor, num_experts: int, capacity: int | None = None, axis: AxisLike = "ep"
    ) -> None:
        self.top_k, self._axis = expert_index.shape[1], axis
        choices = expert_index.reshape(-1)
        if capacity is not None:
            fits, _ = _fits(expert_index, num_experts, capacity)
            choices = choices.where(fits.flatten(), num_experts)
        order = choices.argsort(stable=True)
        counts = torch.bincount(choices, minlength=num_experts + 1)[:num_experts].view(comm.size(axis), -1)
        received = comm.all_to_all(counts, axis)  # [ep, experts/ep], by the rank that sends
        sent, arrived = torch.stack((counts, received)).tolist()  # the one time that the host waits
        self._sent_sizes, self._received_sizes = list(map(sum, sent)), list(map(sum, arrived))
        self.sizes: list[int] = list(map(sum, zip(*arrived)))
        self._choices = order[: sum(self._sent_sizes)]
        numbers = torch.arange(received.numel(), device=choices.device).remainder_(received.shape[1])
        rows = numbers.repeat_interleave(received.flatten(), output_size=sum(self.sizes))
        self._by_expert = rows.argsort(stable=True)
        self._by_rank = self._by_expert.argsort()

    def numbers(self) -> torch.Tensor:
        """The number of each row's expert on this rank, `[rows]`."""
        device = self._choices.device
        counts = torch.tensor(self.sizes, device=device)
        return torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=sum(self.sizes))

    def to_experts(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, h] -> [rows, h]`."""
        rows = tokens.index_select(0, self._choices // self.top_k)
        return self._exchange(rows, self._sent_sizes, self._received_sizes).index_select(0, self._by_expert)

    def to_experts_beside(
        self, tokens: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `to_experts(tokens)` and `compute()`, which runs while rows travel, as its backward does."""
        journey = _Journey(self._sent_sizes, self._received_sizes)
        rows = tokens.index_select(0, self._choices // self.top_k)
        rows = _Start.apply(rows, journey)
        result = compute()
        return _Wait.apply(rows, journey).index_select(0, self._by_expert), result

    def to_tokens(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[rows, h] -> [tokens, h]`: the sum of the rows of each token's experts, weighted by `[tokens, k]`."""
        rows = self._exchange(rows.index_select(0, self._by_rank), self._received_sizes, self._sent_sizes)
        chosen = rows.new_zeros(weights.numel(), rows.shape[1]).index_copy(0, self._choices, rows)
        return (chosen.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    def _exchange(self, rows: torch.Tensor, sizes: list[int], received: list[int]) -> torch.Tensor:
        return exchange_rows(rows, sizes, received, self._axis)


def exchange_rows(rows: torch.Tensor, sizes: list[int], received: list[int], axis: AxisLike) -> torch.Tensor:
    """Sends `sizes` rows to each rank, and returns those that arrive: `received` from each."""
    return spmd.all_to_all(rows, axis, src=V, dst=V, input_split_sizes=sizes, output_split_sizes=received)


class _Journey:
    """Rows between the ranks of ep, from `start` to `wait`.

    Args:
        sizes, received: rows to each rank, and from each.
    """

    def __init__(self, sizes: list[int], received: list[int]) -> None:
        self.sizes, self.received = sizes, received
        self.back: _Journey | None = None  # of the gradients, while they travel
        self._handle: Any = None
        self._arriving: Any = None

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the memory into which rows arrive; its values are there after `wait`."""
        self._arriving = rows.new_empty(sum(self.received), *rows.shape[1:])
        sends, recvs = rows.contiguous().split(self.sizes), self._arriving.split(self.received)
        self._handle = comm.exchange(list(sends), list(recvs), "ep", async_op=True)
        return self._arriving

    def wait(self) -> torch.Tensor:
        """Returns the rows that have arrived."""
        self._handle.wait()
        arrived, self._handle, self._arriving = self._arriving, None, None
        return arrived


class _Start(torch.autograd.Function):
    """Starts to send rows, and returns them; `_Wait` returns those that have arrived.

    Backward runs in the reverse order: `_Wait` starts to send gradients back, and `_Start` waits for them. What was
    computed between the two has its backward between them too.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, journey: _Journey) -> torch.Tensor:
        ctx.journey = journey
        journey.start(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        back, ctx.journey.back = ctx.journey.back, None
        return (grad if back is None else back.wait()), None


class _Wait(torch.autograd.Function):
    """Takes what `_Start` returns, and returns the rows that have arrived."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, journey: _Journey) -> torch.Tensor:
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        journey = ctx.journey
        if torch.is_grad_enabled():  # create_graph: an exchange that can be differentiated again
            return exchange_rows(grad, journey.received, journey.sizes, "ep"), None
        journey.back = _Journey(journey.received, journey.sizes)
        return journey.back.start(grad), None


class Slots:
    """Slots for the rows of each expert, `capacity` from each ep rank.

    Args:
        expert_index: `[tokens, k]`.
        num_experts: of all ranks.
        capacity: slots of one expert for each rank; further rows are dropped, and count 0.
    """

    def __init__(self, expert_index: torch.Tensor, num_experts: int, capacity: int) -> None:
        self._index, self._shape = expert_index, (num_experts, capacity)
        self.sizes = [comm.size("ep") * capacity] * experts_here(num_experts)

    def numbers(self) -> torch.Tensor:
        """The number of each slot's expert on this rank, `[rows]`."""
        numbers = torch.arange(len(self.sizes), device=self._index.device)
        return numbers.unsqueeze(1).expand(-1, self.sizes[0]).flatten()

    def to_experts(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, h] -> [experts/ep * ep * capacity, h]`, zeros in slots without a token."""
        _same_rows(tokens, self._index)
        return enter_expert_parallel_region(_into_slots(tokens, self._index, *self._shape)).flatten(0, 2)

    def to_tokens(self, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[rows, h] -> [tokens, h]`, weighted by `[tokens, k]`; 0 of a dropped choice."""
        slots = exit_expert_parallel_region(slots.unflatten(0, (len(self.sizes), -1, self._shape[1])))
        tokens: torch.Tensor = _from_slots(slots, self._index, weights)
        like = _same_rows(weights, self._index)
        if like is not None:
            stamp_rows(tokens, like, DATA_AXES)
        return tokens


def _same_rows(x: torch.Tensor, expert_index: torch.Tensor) -> torch.Tensor | None:
    """Makes a check refuse rows in another order than their experts; returns a tensor with the rows of both."""
    return None if active() is None else x.detach()[:, :1] + expert_index[:, :1]


@local_map(out_types={DATA_AXES: S(1)})
def _into_slots(tokens: torch.Tensor, expert_index: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    fits, position = _fits(expert_index, num_experts, capacity)
    rows = (tokens.unsqueeze(1) * fits.unsqueeze(-1)).flatten(0, 1)
    slots = rows.new_zeros(num_experts * capacity, rows.shape[1])
    numbers = expert_index * capacity + position.clamp(max=capacity - 1)
    return slots.index_add(0, numbers.flatten(), rows).unflatten(0, (num_experts, capacity))


@local_map(out_types={DATA_AXES: S(0)})
def _from_slots(slots: torch.Tensor, expert_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_experts, capacity, _ = slots.shape
    fits, position = _fits(expert_index, num_experts, capacity)
    numbers = expert_index * capacity + position.clamp(max=capacity - 1)
    chosen = slots.flatten(0, 1).index_select(0, numbers.flatten()).unflatten(0, weights.shape)
    return (chosen * (weights * fits).unsqueeze(-1)).sum(1).to(slots.dtype)
