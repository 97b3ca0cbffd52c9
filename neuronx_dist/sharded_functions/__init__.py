"""Functions over a dim of which each rank has a shard: of plain tensors, an axis and the sizes of the shards.

Programs that `parallelize` emits, handlers of ShardTensors and parallel layers call them. All are made of typed
operators and of code on this rank's own shard, so that the checker follows them.

softmax.py        softmax, log-softmax, log-sum-exp: (maximum, sum) of the ranks in one gather
norms.py          moments of the ranks, merged in one gather; layer, RMS, group and batch norm
cross_entropy.py  cross entropy of classes that are sharded: logits are never gathered, and no softmax is saved
linear_cross_entropy.py  the same with the linear layer before it, in chunks of tokens
fused_cross_entropy.py  the two passes over the logits as compiled kernels, on GPUs
vocabulary.py     a vocabulary of which each rank has a shard: rows of its table, positions and checks of ids, and the
                  columns of logits that no id has

Two things are not shared. Cross entropy reduces its maximum and its sums by two all-reduces, as NxD does, and not as
softmax by one gather: it sends nothing in backward, and over n ranks a gather would have n/2 times the bytes.
Losses of ShardTensors with weights, probabilities or label smoothing stay on the log-softmax: the kernel's smoothing
leaves out columns of -inf, which torch counts.
"""

from ..call_site import hide

__all__: list[str] = []

hide(__name__)
