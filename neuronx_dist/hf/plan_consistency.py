"""Plans that cover a model, and would train it wrongly: words of layers of one module that do not go together.

The rules read names and styles alone. A plan of one's own is proven by the checker, which runs the swapped model:

    spmd.check(lambda: hf.swap(model, plan=plan), inputs, {"tp": 2})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from .model_plan import FUSABLE, LOCAL_OUTPUT, is_layer, leaf_of, parent_of
from .words import WORDS

__all__ = ["LATENT", "PER_HEAD", "inconsistencies", "regions_of"]

# Whole layers before sharded ones, of the same attention: what goes in and out is equal on all ranks.
LATENT = ("q_a_proj", "q_a_layernorm", "q_a_norm", "kv_a_layernorm", "kv_a_norm", "kv_a_proj_with_mqa", "indexer")
PER_HEAD = ("q_norm", "k_norm", "act_fn")
_UNPACKED = {name for siblings in FUSABLE for name in siblings}


def regions_of(styles: Mapping[str, str]) -> set[str]:
    """The modules whose columns stay local, by the words of all modules."""
    local = [name for name, word in styles.items() if WORDS.get(word) in LOCAL_OUTPUT]
    return {parent for parent in map(parent_of, local) if not is_layer(parent)}


def inconsistencies(model: nn.Module, styles: Mapping[str, str], bare: Mapping[str, str]) -> Iterator[str]:
    """Yields "name reason: repair" of each word that does not go with the words around it.

    Args:
        styles, bare: words by the qualified name of a module, and of a bare parameter; all of them known words.
    """
    regions = regions_of(styles)
    wrappers = [region for region in regions if len(list(model.get_submodule(region).children())) == 1]
    regions |= {parent for parent in map(parent_of, wrappers) if not is_layer(parent)}  # of `q_proj.linear`
    kinds = {name: WORDS[word] for name, word in (*styles.items(), *bare.items())}
    for name, word in (*styles.items(), *bare.items()):
        kind = kinds[name]
        if leaf_of(name) == "gate_up_proj" and kind == "column":
            yield f"{name} holds gate and up behind one another, which {word!r} cuts as one block: 'packed_colwise'"
        if leaf_of(name) in _UNPACKED and kind.startswith("packed"):
            yield f"{name} is one matrix, not several behind one another, and {word!r} mixes its columns: 'colwise'"
    for name, word in styles.items():
        kind, leaf, module = kinds[name], leaf_of(name), model.get_submodule(name)
        is_latent = any(part in LATENT for part in name.split("."))
        is_local = any(name.startswith(f"{region}.") for region in regions)
        if kind == "whole" and is_local and not is_latent and isinstance(module, nn.Linear):
            yield f"{name} is whole beside local columns, and {word!r} leaves its gradient partial: 'colwise'"
        elif kind == "whole" and is_local and not is_latent and leaf in PER_HEAD:
            yield (
                f"{name} sees local heads, and {word!r} leaves its gradient partial: 'replicated_with_grad_allreduce'"
            )
        elif kind == "partial_gradient" and not is_local:
            yield f"{name} has its full gradient on every rank, which {word!r} multiplies by tp: 'replicate'"
        elif kind in ("experts", "summed"):
            inside = [other for other in kinds if other.startswith(f"{name}.")]
            if any(other in styles and kinds[other] == "row" for other in inside):
                yield f"{name} ends in a row layer, whose sum {word!r} repeats: no word"
            elif not any(kinds[other].endswith(("row", "column")) for other in inside):
                yield f"{name} has no sharded matrices, and {word!r} multiplies its output by tp: 'replicate'"
    for latent in (f"{region}.kv_a_proj_with_mqa" for region in regions):
        if kinds.get(latent) != "latent" and any(name == latent for name, _ in model.named_modules()):
            yield f"{latent} feeds local heads, and its gradient stays partial: 'mla_kv_a_proj'"
    for module_name in dict.fromkeys(map(parent_of, bare)):
        matrices = [
            name
            for name in bare
            if parent_of(name) == module_name
            and kinds[name].endswith(("row", "column"))
            and model.get_parameter(name).ndim > 2
        ]
        if len(matrices) > 1 and kinds.get(module_name) not in ("experts", "summed"):
            yield f"{module_name} has sharded matrices, whose partial sums nothing adds: 'moe_tp_experts' on it"
