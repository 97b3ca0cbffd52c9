"""Log-probabilities of tokens, and entropies, of logits that are sharded over the vocabulary.

`parallel_linear_logprobs` computes both without logits of all tokens.
"""

from __future__ import annotations

import torch

from .. import comm
from ..comm.context import AxisLike
from ..sharded_functions.softmax import entropy_of_shard
from .loss_functions import parallel_cross_entropy

__all__ = ["DistributedLogprob", "distributed_logprob", "from_parallel_logits_to_logprobs", "parallel_entropy"]


def distributed_logprob(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, inference: bool = True
) -> torch.Tensor:
    """Returns the log-probability of each target, in fp32 or better: `[.., vocab/tp]`, `[..] -> [..]`.

    A target of -100 has 0. `inference` is upstream's switch for gradients; here autograd decides.
    """
    return -parallel_cross_entropy(vocab_parallel_logits, target)


class DistributedLogprob:
    """NxD's name of the log-probability's autograd part: `.apply(vocab_parallel_logits, target, inference)`."""

    apply = staticmethod(distributed_logprob)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, inference: bool = True
) -> torch.Tensor:
    """Returns the log-probability of each next token: `[batch, seq, vocab/tp]`, `[batch, seq] -> [batch, seq - 1]`.

    `target` holds the input's ids; it is shifted here. Gradients flow wherever autograd is on, whatever `inference` is.

    Raises:
        ValueError: the mesh has cp > 1: the token after a rank's last one is on another rank.
    """
    if (cp := comm.size("cp")) > 1:
        raise ValueError(
            f"from_parallel_logits_to_logprobs shifts target {list(target.shape)} within the part of one of cp={cp} "
            'ranks: call distributed_logprob(logits, part["labels"]), with the part, whose labels are shifted, of '
            "nxd.get_batch_on_this_context_parallel_rank"
        )
    return distributed_logprob(vocab_parallel_logits[:, :-1], target[:, 1:], inference)


def parallel_entropy(
    parallel_logits: torch.Tensor, *, tensor_model_parallel_group: AxisLike | None = None
) -> torch.Tensor:
    """Returns the entropy of each token's distribution, in fp32 or better: `[.., vocab/tp] -> [..]`.

    Columns of -inf, such as those of a padded vocabulary, do not count.
    """
    return entropy_of_shard(parallel_logits, tensor_model_parallel_group or "tp")
