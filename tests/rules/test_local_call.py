"""The call of a rank: which integers of a call change for shards of any sizes, and which labels a rank may cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.rules import RULES
from neuronx_dist.rules.containers import edited, substituted
from neuronx_dist.rules.local_call import Cut, TensorSlot, free_cuts, local_arguments, spec_of, tensors_of

FLOAT = torch.float64


def meta(shape: Iterable[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=FLOAT, device="meta")


def local(function: Callable[..., Any], shapes: Sequence[Sequence[int]], others: tuple[Any, ...], dim: int, size: int):
    """The integers of the call whose first operand has `size` of the outermost label of `dim`; None: there are none."""
    slots = [TensorSlot(i, tuple(shape), FLOAT) for i, shape in enumerate(shapes)]
    arguments = ((*slots[:1], *others, *slots[1:]), {})
    spec = spec_of(RULES[function], substituted(arguments, TensorSlot, lambda slot: meta(slot.shape)))
    label = spec.ins[0][dim][0]

    def shard(slot: TensorSlot) -> torch.Tensor:
        dims = spec.ins[slot.number]
        return meta(
            n // spec.sizes[label] * size if label in factors else n
            for n, factors in zip(slot.shape, dims, strict=True)
        )

    found = local_arguments(function, RULES[function], spec, {label: size}, arguments, shard)
    return None if found is None else found[0][1 : 1 + len(others)]


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_a_view_names_the_heads_of_the_shard(heads: int) -> None:
    assert local(torch.Tensor.view, [(2, 6 * 4)], (2, 6, 4), 1, heads) == (2, heads, 4)
    assert local(torch.Tensor.view, [(2, 6 * 4)], ((-1, 6, 4),), 1, heads) == ((-1, heads, 4),)


def test_groups_of_a_shard_of_whole_groups() -> None:
    assert local(F.group_norm, [(2, 12, 3), (12,), (12,)], (4,), 1, 1) == (1,)
    assert local(F.group_norm, [(2, 12, 3), (12,), (12,)], (4,), 1, 3) == (3,)


def test_no_integers_make_it_the_call_of_a_shard() -> None:
    assert local(torch.Tensor.view, [(6, 4)], (2, 3, 4), 0, 1) == (1, 3, 4)

    def opaque(x: torch.Tensor, rows: int) -> torch.Tensor:
        return x[:rows]

    rule = RULES[torch.relu]._replace(spec=lambda x, rows: RULES[torch.relu].spec(x))
    slot = TensorSlot(0, (4, 3), FLOAT)
    spec = spec_of(rule, ((meta((4, 3)), 4), {}))
    take = dict(function=opaque, rule=rule, spec=spec, sizes={0: 1}, local_tensor=lambda slot: meta((1, 3)))
    assert local_arguments(**take, arguments=((slot, 4), {})) == ((slot, 4), {}), "a slice ends where rows end"
    assert local_arguments(**take, arguments=((slot, 0), {})) is None


def test_two_labels_are_cut_at_once() -> None:
    slot = TensorSlot(0, (6, 8), FLOAT)
    arguments = ((slot, 6, 2, 4), {})
    spec = spec_of(RULES[torch.Tensor.view], ((meta((6, 8)), 6, 2, 4), {}))
    rows, heads = spec.ins[0][0][0], spec.ins[0][1][0]
    sizes = {rows: 5, heads: 1}
    found = local_arguments(
        torch.Tensor.view, RULES[torch.Tensor.view], spec, sizes, arguments, lambda slot: meta((5, 4))
    )
    assert found == ((slot, 5, 1, 4), {})


def test_edits_change_as_little_as_possible_first() -> None:
    arguments = ((2, [4, 6], slice(0, 8), True), {"n": 3, "m": 2})
    edits = list(edited(arguments, lambda x: None if x % 2 else x // 2))
    assert edits[0] == arguments
    assert edits[1] == ((1, [4, 6], slice(0, 8), True), {"n": 3, "m": 2})
    assert ((2, [2, 3], slice(0, 8), True), {"n": 3, "m": 2}) in edits
    assert edits[-1] == ((1, [2, 3], slice(0, 4), True), {"n": 3, "m": 1})
    assert list(edited(arguments, lambda x: x)) == [arguments]


def cuts_of(function: Callable[..., Any], shapes: Sequence[Sequence[int]], *others: Any, shards: list[Any]) -> Any:
    spec = spec_of(RULES[function], ((*map(meta, shapes), *others), {}))
    return {m: cut.sizes for m, cut in free_cuts(spec, False, shards).items()}


def test_free_labels_are_cut_in_shards_of_all_operands() -> None:
    rows = {0: (0, (1, 5))}
    assert cuts_of(torch.add, [(6, 4), (6, 4)], shards=[rows, rows]) == {0: (1, 5)}
    assert cuts_of(torch.add, [(6, 4), (6, 4)], shards=[rows, {0: (0, (3, 3))}]) == {}, "operands disagree"
    assert cuts_of(torch.softmax, [(6, 4)], 1, shards=[rows]) == {0: (1, 5)}
    assert cuts_of(torch.softmax, [(6, 4)], 0, shards=[rows]) == {}, "values mix along it"
    assert cuts_of(torch.sum, [(6, 4)], shards=[rows]) == {0: (1, 5)}, "a sum over the ranks"
    assert cuts_of(torch.amax, [(6, 4)], 0, shards=[rows]) == {}, "a maximum is none"
    assert cuts_of(torch.Tensor.view, [(6, 4)], 3, 8, shards=[{0: (0, (2, 4))}]) == {0: (1, 2)}, "outer factors"
    assert cuts_of(torch.Tensor.view, [(6, 4)], 3, 8, shards=[rows]) == {}, "a factor is cut"
    assert cuts_of(torch.transpose, [(6, 4)], 0, 1, shards=[{0: (0, (1, 5)), 1: (1, (2, 2))}]) == {
        0: (1, 5),
        1: (2, 2),
    }


def test_a_constant_that_is_added_to_a_sum_is_added_once() -> None:
    spec = spec_of(RULES[torch.sum], ((meta((6, 4)),), {}))
    shards = [{0: (0, (1, 5))}]
    assert free_cuts(spec, False, shards) == {0: Cut(0, (1, 5))} and free_cuts(spec, True, shards) == {}


def test_tensors_of_nested_results() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    assert [len(x) for x in tensors_of((a, [b, (a,)], 3))] == [1, 2, 1] and tensors_of(None) == []
