"""Attention whose keys lie on several ranks, on plain tensors and an axis: ring, and the merge by log-sum-exp.

positions.py  where the rows of each rank stand in the sequence; zig-zag order
blocks.py     some queries against some keys, with the log-sum-exp that merges blocks; torch's fused kernels
ring.py       `attention`: the blocks of all ranks, around a ring or merged by a sum
context_parallel.py  `ring_attention`, `ulysses_attention`: of sequences that are cut over the cp ranks
batch.py      `get_batch_on_this_context_parallel_rank`, and the split that the positions of a batch show
"""

from ..call_site import hide
from .positions import Runs, cut, zigzag_order, zigzag_runs
from .ring import Keys, attention, ring_elements

__all__ = ["Keys", "Runs", "attention", "cut", "ring_elements", "zigzag_order", "zigzag_runs"]

hide(__name__)
