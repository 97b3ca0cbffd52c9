"""Torch's operators on ShardTensors, as docs/shard-tensor-operators.md lists them: written and read."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from textwrap import fill

PAGE = Path(__file__).parents[3] / "docs" / "shard-tensor-operators.md"
KINDS = ("local", "exchanged", "gathered", "refused")
Kinds = dict[str, Counter]
WIDTH = 150

REASONS = {
    "gathered": {
        "a factor or a solution needs all of a matrix, and no dim of a batch is left to shard": """
            cholesky cholesky_inverse cholesky_solve geqrf linalg.cholesky linalg.cholesky_ex linalg.cond linalg.det
            linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex
            linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve linalg.lu linalg.lu_factor linalg.lu_factor_ex
            linalg.lu_solve linalg.lstsq linalg.lstsq.grad_oriented linalg.matrix_norm linalg.matrix_power
            linalg.matrix_rank linalg.matrix_rank.hermitian linalg.norm linalg.pinv linalg.pinv.hermitian
            linalg.pinv.singular linalg.qr linalg.slogdet linalg.solve linalg.solve_ex linalg.solve_triangular
            linalg.svd linalg.svdvals linalg.tensorinv linalg.tensorsolve logdet lu lu_solve lu_unpack matrix_exp
            ormqr pinverse qr svd triangular_solve""",
        "torch's gradient is another than that of the written values, so that torch's function is called": """
            as_strided_scatter""",
        "values are compared over all of a tensor": "masked.prod median nanmedian nanquantile quantile",
        "the sharded dim is the only one, or the others have one position": """
            _segment_reduce.lengths _segment_reduce.offsets fft.fft fft.fftn fft.hfft fft.hfftn fft.ifft fft.ifftn
            fft.ihfft fft.ihfftn fft.irfft fft.irfftn fft.rfft fft.rfftn grid_sampler_3d
            nn.functional.multilabel_margin_loss""",
        "each rank uses all of a smaller operand, such as a weight, an index or written values": """
            _batch_norm_with_update _chunk_cat addbmm _native_batch_norm_legit cov index_copy index_reduce.amax
            index_reduce.amin index_reduce.mean index_reduce.prod kron native_batch_norm nn.functional.conv2d
            nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
            nn.functional.embedding_bag nn.functional.instance_norm nn.functional.pdist""",
    },
    "refused": {
        "a size that is changed in place": "resize_",
        "a nuclear norm by `torch.norm`, which torch deprecates; `torch.linalg.matrix_norm` has it": "norm.nuc",
        "a sparse result": "to_sparse",
    },
}

HEAD = """# How torch's operators are computed on ShardTensors

torch has samples of calls for each of its operators. Up to six of each run in float64 on two ranks, with one operand
sharded unevenly: the first or the second tensor of the call, along its first or its last dim. Values and gradients
equal plain torch's in every call that is not refused (`tests/shard_tensor/test_operator_samples.py` compares them, and
writes this page). The table counts forward calls; operators that draw random numbers are not among them.

* *local*: nothing is communicated.
* *exchanged*: shards move to another dim, or halos, reduced values or a rank's unique values travel.
* *gathered*: the ranks receive all of the sharded operand, with a warning or, if it is the smaller operand of a
  function with a handler, with a note in the report. Samples are small, so that other messages of the operand's size
  count, too.
* *refused*: an error says what to do instead.

A number is how many calls of the operator are of the kind, of how many if not all.
"""


def shares(kinds: Kinds) -> dict[str, float]:
    total = sum(kinds.values(), Counter())
    return {kind: total[kind] / total.total() for kind in KINDS}


def _wrapped(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _listed(kinds: Kinds, kind: str) -> dict[str, str]:
    """The operators with calls of a kind, each with how many of how many."""
    return {
        name: f"`{name}` {counts[kind]}" + ("" if counts[kind] == counts.total() else f"/{counts.total()}")
        for name, counts in sorted(kinds.items())
        if counts[kind]
    }


def text(kinds: Kinds) -> str:
    """Returns the page.

    Raises:
        AssertionError: an operator gathers or is refused, and there is no reason, or a reason has no such operator.
    """
    total = sum(kinds.values(), Counter())
    lines = [HEAD, "| kind | calls | share | operators with such calls |", "| --- | --- | --- | --- |"]
    for kind in KINDS:
        count = len(_listed(kinds, kind))
        lines.append(f"| {kind} | {total[kind]:,} | {total[kind] / total.total():.1%} | {count} |")
    lines.append(f"| all | {total.total():,} | 100% | {sum(1 for counts in kinds.values() if counts)} |")
    for kind in ("gathered", "refused"):
        listed = _listed(kinds, kind)
        known = {name for names in REASONS[kind].values() for name in names.split()}
        assert listed.keys() == known, f"{kind} without a reason, or the reverse: {sorted(listed.keys() ^ known)}"
        lines += ["", f"## {kind.capitalize()}", ""]
        for reason, names in REASONS[kind].items():
            lines.append(_wrapped(f"* {reason}: " + ", ".join(listed[name] for name in sorted(names.split()))))
    for kind in ("exchanged", "local"):
        lines += ["", f"## {kind.capitalize()}", "", _wrapped(", ".join(_listed(kinds, kind).values()))]
    return "\n".join(lines) + "\n"


def read() -> dict[str, set[str]]:
    """Returns the kinds of each operator's calls by the page."""
    kinds: dict[str, set[str]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        kind, _, listed = section.partition("\n")
        for name in re.findall(r"`([^`]+)`\s+\d", listed):
            kinds.setdefault(name, set()).add(kind.lower())
    return kinds
