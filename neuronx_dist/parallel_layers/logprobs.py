"""Log-probabilities of tokens, of logits that are sharded over the vocabulary: NxD's names for preference losses."""

from __future__ import annotations

import torch

from .loss_functions import parallel_cross_entropy

__all__ = ["DistributedLogprob", "distributed_logprob", "from_parallel_logits_to_logprobs"]


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
    """
    return distributed_logprob(vocab_parallel_logits[:, :-1], target[:, 1:], inference)
