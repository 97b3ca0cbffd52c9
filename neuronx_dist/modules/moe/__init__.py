"""Mixture of experts, by NeuronX Distributed's names: a router, and experts on the ranks of ep and tp.

    tokens [n, h]  --router-->  k experts of each  --to the experts' ranks (ep)-->  products of groups of rows (tp)
                   <--weighted sum of k rows--     <--back to the tokens' ranks--

ep is a part of dp: each ep rank has tokens of its own and some of the experts. Their gradients are summed over edp.

model.py                `MoE`: router, experts and shared experts as one layer
routing.py              routers; loss_function.py: the auxiliary losses of routing, over the tokens of all ranks
expert_mlps.py          `ExpertMLPs`; experts.py, moe_parallel_layers.py: their matrices
dispatch.py             the way of tokens to experts and back
shared_experts.py       an MLP that every token goes through; token_shuffling.py: tokens exchanged between data ranks
"""

from ...lazy_names import lazy_names

_FILES = {
    "expert_mlps": "ACT2FN ExpertMLPs",
    "loss_function": "load_balancing_loss_func router_z_loss_func",
    "model": "MoE",
    "routing": "GroupLimitedRouter RouterSinkhorn RouterTopK",
    "shared_experts": "SharedExperts",
}
_LAZY = {name: f"modules.moe.{file}" for file, names in _FILES.items() for name in names.split()}
__getattr__ = lazy_names(__name__, _LAZY)
__all__ = [*_LAZY]
