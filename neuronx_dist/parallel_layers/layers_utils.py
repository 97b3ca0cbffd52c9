"""NxD's import path of the steps of its linear layers' autograd functions, which are other ones here."""

from ..lazy_names import lazy_names

_STEPS = "base_setup_fwd base_setup_bwd bwd_grad_reduce bwd_no_weight_grad bwd_input_grad".split()
__getattr__ = lazy_names(__name__, {f"_linear_autograd_{step}": "parallel_layers.neuron_only" for step in _STEPS})
