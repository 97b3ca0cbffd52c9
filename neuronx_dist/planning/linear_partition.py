"""Where a line of calls is cut into pipeline stages: the slowest stage as fast as can be.

Source: the linear partition problem, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

__all__ = ["balanced"]


def balanced(times: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """The number of the first call of each stage, at the least time of the slowest one.

    Args:
        times: seconds of each call.
        crossing: seconds that a stage waits for what it receives when it begins at this call.
        count: stages.

    Raises:
        ValueError: there are fewer calls than stages.
    """
    if not 1 <= count <= len(times):
        raise ValueError(f"{len(times)} calls cannot be cut into {count} stages: at most {len(times)}")
    until = torch.tensor([0.0, *accumulate(times)], dtype=torch.float64)
    waits = torch.tensor([0.0, *crossing[1:]], dtype=torch.float64)
    slowest = until.clone()  # of the first calls, up to each, as one stage
    starts: list[torch.Tensor] = []
    for stage in range(1, count):
        least, first = torch.full_like(slowest, torch.inf), torch.zeros(len(until), dtype=torch.int64)
        for end in range(stage + 1, len(until)):
            own = until[end] - until[stage:end] + waits[stage:end]
            worst = torch.maximum(own, slowest[stage:end])
            best = int(worst.argmin())
            least[end], first[end] = worst[best], best + stage
        slowest = least
        starts.append(first)
    cuts, end = [], len(times)
    for first in reversed(starts):
        end = int(first[end])
        cuts.append(end)
    return [0, *reversed(cuts)]
