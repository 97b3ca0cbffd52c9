"""Scale mutants: what the package multiplies or divides by the size of an axis, made another power of it.

A site is a factor in the source: the size in `total / comm.size(...)`, the scale in `_foreach_mul_(grads, scale)`, the
count that a summed loss is divided by. Its mutants are `1` (the factor is dropped), its square (done twice) and its
inverse (multiplied instead of divided). The source with the mutant in it is compiled, and its code runs in the place of
the function's.

    python -m tests.checking.mutation.scales         # the table
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from neuronx_dist import attention, checking, comm, parallelize, planning, shard_tensor, spmd, xla_replay
from neuronx_dist.checking.types.handlers import autograd
from tests.checking.mutation.programs import PROGRAMS
from tests.support.call_sites import PACKAGE, Site
from tests.support.sources import tree_of

__all__ = ["EXEMPT", "MUTANTS", "PROGRAM_OF", "SITES", "ScaleSite", "factors_of", "refusal"]

MUTANTS = {"dropped": "1", "twice": "({0}) * ({0})", "inverse": "1 / ({0})"}
_SIZE = re.compile(r"comm\.size\(.*\)|[\w.]+\.size|([\w.]+\.)?scale|torch\.where\(count.*|count or .*")
_IN_TEXT = re.compile(r"\.size\b|\bscale\b|\bcount\b")  # of a file that may have such a factor: parsing takes seconds
_SHAPES = (ast.Call, ast.Attribute, ast.Name, ast.BoolOp, ast.BinOp)  # of expressions that match it
_PRODUCTS = ("foreach_mul", "foreach_mul_", "mul_")
# The checker, and operators, for which it has rules; ShardTensors, whose cases compare values (tests/shard_tensor).
_OUTSIDE = (attention, checking, comm, parallelize, planning, shard_tensor, spmd, xla_replay)


class ScaleSite(NamedTuple):
    """A factor: the file and the name of the function that it is in, and its text."""

    file: Path
    function: str
    factor: str
    position: tuple[int, int]


def _find() -> dict[str, ScaleSite]:
    found: dict[str, ScaleSite] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if Site("", "", str(path), 0, 0).is_in(*_OUTSIDE) or not _IN_TEXT.search(path.read_text()):
            continue
        for function, node in factors_of(tree_of(path)):
            site = ScaleSite(path, function, ast.unparse(node), (node.lineno, node.col_offset))
            name = f"{function}:{site.factor}"
            same = sum(known.startswith(f"{name}#") for known in found)
            found[f"{name}#{same + 1}"] = site
    return found


def factors_of(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.expr]]:
    """Every factor of a module, with the name of the outermost function that it is in."""
    for node in ast.iter_child_nodes(tree):
        factor: ast.expr | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            factor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div)):
            factor = node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _PRODUCTS:
            factor = node.args[-1]
        if isinstance(factor, _SHAPES) and _SIZE.fullmatch(ast.unparse(factor)):
            yield ".".join(inside), factor
        named = isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not _in_function(inside))
        yield from factors_of(node, (*inside, node.name) if named else inside)  # type: ignore[attr-defined]


def _in_function(inside: tuple[str, ...]) -> bool:
    return bool(inside) and not inside[-1].lstrip("_")[:1].isupper()


SITES = _find()

PROGRAM_OF = {
    "reduce_gradients:comm.size(DATA_AXES)#1": "mlp",
    "complete_reduction:comm.size(DATA_AXES)#1": "trainer",
    "bucket_allreduce_gradients:comm.size(DATA_AXES)#1": "names of nxd",
    "bucket_allreduce_gradients:comm.size('dp')#1": "names of nxd, context and data",
    "allreduce_context_parallel_gradients:comm.size('cp')#1": "names of nxd, context",
    "global_num_items:comm.size(DATA_AXES)#1": "items",
    "_all_reduce:scale#1": "experts",  # of a group of one rank
    "start_sum:scale#1": "mlp",
    "causal_lm_loss:torch.where(count == 0, math.inf, count)#1": "llama",
    "parallel_linear_cross_entropy:torch.where(count == 0, math.inf, count)#1": "linear cross entropy",
    "start_reduce_scatter:first.scale#1": "llama, zero",
    "DataSharding.of:comm.size(DATA_AXES)#1": "zero, groups",
    "ParameterShard.take_own_grad:self.scale#1": "experts, zero",
    "report_loss:comm.size(('dp', 'cp'))#1": "llama, stages",
}
EXEMPT = {
    "causal_lm_loss:count or math.inf#1": "a number that the caller made",
    "_cross_entropy:communicator.size#1": "the bound of ids, which are compared with it",
    "_checked:communicator.size#1": "the bound of ids, which are compared with it",
    "_deferred:comm.size('tp')#1": "the size of a dim",
    "_Gradients.take:options.communicator.size#1": "the size of a dim",
    "MeanInBackward._bucket:comm.size(DATA_AXES)#1": "where nothing is checked: tests compare the values",
    "finish_reduce_scatter:first.scale#1": "where nothing is checked: tests compare the values",
    "NeuronZero1Optimizer._clip_grad_norm:scaler.scale#1": "the scale of the loss",
    "LossScaler.scaled:self.scale#1": "the scale of the loss",
    "AxisPart.cuts:self.size#1": "a distance of ranks, no factor",
    "all_reduce:scale#1": "a factor that the caller passed",
    "reduce_scatter:scale#1": "a factor that the caller passed",
    **dict.fromkeys(
        (
            "NeuronLTModule._mean_over_data:comm.size('tp') * comm.size(('dp', 'cp'))#1",
            "NeuronLTModule._mean_over_data:comm.size(('dp', 'cp'))#1",
            "MeshStrategy.reduce:comm.size(self.reduced_axes)#1",
            "Accelerator.reduce:comm.size(DATA_AXES)#1",
        ),
        "of a number that is logged: tests compare it with that of one process",
    ),
    **dict.fromkeys(
        (
            "ParallelTrainerMixin.get_total_train_batch_size:comm.size('dp')#1",
            "ParallelTrainerMixin.floating_point_ops:comm.size(('pp', 'cp', 'tp'))#1",
            "by_data_rank:comm.size(_DATA)#1",
            "mean_over_data:comm.size(_DATA)#1",
        ),
        "around transformers' loop, which no check plays: tests/hf/test_trainer.py compares values",
    ),
    "Blocks.__init__:_ENTRY.size#1": "bytes of a record in a file",
    "_check_number_of_heads:comm.size('tp')#1": "a number of heads in a message",
    **dict.fromkeys(
        ("ShardedModule._shard_numbers:comm.size(axis)#1", "ShardedModule._shard_numbers:comm.size(axis)#2"),
        "numbers of shards in a state dict, which are compared",
    ),
    **dict.fromkeys(("_Growth._label:self.size#1", "_Growth.shard:self.size#1"), "sizes of dims"),
}


@contextmanager
def _mutated(name: str, mutant: str) -> Iterator[None]:
    site = SITES[name]
    tree = ast.parse(site.file.read_text())
    changed = ast.fix_missing_locations(_Replace(site, MUTANTS[mutant].format(site.factor)).visit(tree))
    code: Any = compile(changed, str(site.file), "exec", dont_inherit=True)
    target: Any = import_module(".".join(site.file.relative_to(PACKAGE.parent).with_suffix("").parts))
    for part in site.function.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
        target = getattr(target, part)
    function = inspect.unwrap(target)
    original, function.__code__ = function.__code__, code
    autograd._flavours.clear()  # what is known of functions' backwards, which may be the mutant
    try:
        yield
    finally:
        function.__code__ = original
        autograd._flavours.clear()


class _Replace(ast.NodeTransformer):
    """Another expression in the place of a factor."""

    def __init__(self, site: ScaleSite, text: str) -> None:
        self.site, self.new = site, ast.parse(text, mode="eval").body

    def visit(self, node: ast.AST) -> Any:
        here = isinstance(node, ast.expr) and (node.lineno, node.col_offset) == self.site.position
        if here and ast.unparse(node) == self.site.factor:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


@functools.cache
def refusal(name: str, mutant: str) -> str:
    """Returns the checker's refusal of a mutant; "" if there is none."""
    with _mutated(name, mutant):
        problems = PROGRAMS[PROGRAM_OF[name]].check().problems
    return f"{problems[0].kind}: {problems[0].message}" if problems else ""


if __name__ == "__main__":
    for site_name in PROGRAM_OF:
        for mutant_name in MUTANTS:
            said = refusal(site_name, mutant_name) or "not seen"
            print(f"{site_name:75} {mutant_name:8} {said.splitlines()[0][:180]}", flush=True)
