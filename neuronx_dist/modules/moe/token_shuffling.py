"""Tokens exchanged between data ranks before routing, so that a capacity drops fewer of them."""

from __future__ import annotations

import torch

from ... import comm, spmd
from ...parallel_layers.model_groups import get_token_shuffle_group
from ...spmd import V

__all__ = ["all_to_all_for_shuffle", "token_shuffle", "token_unshuffle"]


def token_shuffle(hidden_states: torch.Tensor, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Permutes the rows of dim 0 at random, and sends an equal part to each rank of the token shuffle group.

    Args:
        hidden_states: `[tokens, ..]`; the size of the group divides the tokens.
        seed: of the permutation, the same on all tp ranks; None: of the current random state.

    Returns:
        the exchanged rows, and the permutation, which `token_unshuffle` takes.
    """
    generator = None if seed is None else torch.Generator(hidden_states.device).manual_seed(seed)
    permutation = torch.randperm(hidden_states.shape[0], generator=generator, device=hidden_states.device)
    return all_to_all_for_shuffle(hidden_states.index_select(0, permutation)), permutation


def token_unshuffle(permuted_states: torch.Tensor, permutation: torch.Tensor) -> torch.Tensor:
    """Takes `token_shuffle` back."""
    return all_to_all_for_shuffle(permuted_states).index_select(0, permutation.argsort())


def all_to_all_for_shuffle(hidden_states: torch.Tensor) -> torch.Tensor:
    """Sends part i of dim 0 to rank i of the token shuffle group; it is its own inverse."""
    group = comm.communicator(get_token_shuffle_group())
    pieces = hidden_states.unflatten(0, (group.size, -1))
    return spmd.all_to_all(pieces, group, src=V, dst=V).flatten(0, 1)
