"""The values and gradients of every typed operator on two ranks, as the reference states them."""

from __future__ import annotations

from typing import Any

from neuronx_dist import spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, V

TP2 = Mesh(2, tp=2)


def both(value: Any) -> tuple[Any, Any]:
    return value, value


AB = ([1, 2], [10, 20])
M = ([[1, 2], [3, 4]], [[10, 20], [30, 40]])
F4 = ([1, 2, 3, 4], [10, 20, 30, 40])
G2 = ([1, 3], [5, 7])
G4 = ([1, 2, 3, 4], [5, 6, 7, 8])
G22 = ([[1, 2], [3, 4]], [[5, 6], [7, 8]])
EXPERT = dict(expert_mode=True)

# number in the reference, operator, src, dst, options, x -> y, g -> gx; a pair is what rank 0 and rank 1 have
CONFORMANCE = [
    (1, spmd.all_reduce, P, R, {}, AB, both([11, 22]), G2, both([6, 10])),
    (2, spmd.all_reduce, P, I, {}, AB, both([11, 22]), both([1, 3]), both([1, 3])),
    (3, spmd.all_reduce, V, R, {}, AB, both([11, 22]), G2, both([6, 10])),
    (3, spmd.all_reduce, V, I, {}, AB, both([11, 22]), both([1, 3]), both([1, 3])),
    (4, spmd.all_gather, S(0), R, {}, AB, both([1, 2, 10, 20]), G4, ([6, 8], [10, 12])),
    (5, spmd.all_gather, S(0), I, {}, AB, both([1, 2, 10, 20]), both([1, 2, 3, 4]), ([1, 2], [3, 4])),
    (6, spmd.all_gather, V, R, {}, AB, both([[1, 2], [10, 20]]), G22, ([6, 8], [10, 12])),
    (7, spmd.all_gather, V, I, {}, AB, both([[1, 2], [10, 20]]), both([[1, 2], [3, 4]]), ([1, 2], [3, 4])),
    (
        8,
        spmd.all_gather,
        S(1),
        R,
        {},
        ([[1], [2]], [[10], [20]]),
        both([[1, 10], [2, 20]]),
        G22,
        ([[6], [10]], [[8], [12]]),
    ),
    (9, spmd.all_gather, V, R, dict(gather_dim=1), AB, both([[1, 10], [2, 20]]), G22, ([6, 10], [8, 12])),
    (10, spmd.reduce_scatter, P, S(0), {}, F4, ([11, 22], [33, 44]), G2, both([1, 3, 5, 7])),
    (11, spmd.reduce_scatter, P, V, {}, M, ([11, 22], [33, 44]), G2, both([[1, 3], [5, 7]])),
    (
        12,
        spmd.reduce_scatter,
        P,
        S(1),
        {},
        M,
        ([[11], [33]], [[22], [44]]),
        ([[1], [3]], [[5], [7]]),
        both([[1, 5], [3, 7]]),
    ),
    (
        13,
        spmd.all_to_all,
        V,
        V,
        {},
        M,
        ([[1, 2], [10, 20]], [[3, 4], [30, 40]]),
        G22,
        ([[1, 2], [5, 6]], [[3, 4], [7, 8]]),
    ),
    (
        14,
        spmd.all_to_all,
        S(0),
        S(1),
        {},
        M,
        ([[1], [3], [10], [30]], [[2], [4], [20], [40]]),
        ([[1], [2], [3], [4]], [[5], [6], [7], [8]]),
        ([[1, 5], [2, 6]], [[3, 7], [4, 8]]),
    ),
    (15, spmd.convert, I, R, {}, both([1, 2]), both([1, 2]), G2, both([6, 10])),
    (16, spmd.convert, R, I, EXPERT, both([1, 2]), both([1, 2]), both([1, 3]), ([1, 3], [0, 0])),
    (17, spmd.convert, R, S(0), {}, both([1, 2, 3, 4]), ([1, 2], [3, 4]), G2, ([1, 3, 0, 0], [0, 0, 5, 7])),
    (18, spmd.convert, I, S(0), {}, both([1, 2, 3, 4]), ([1, 2], [3, 4]), G2, both([1, 3, 5, 7])),
    (19, spmd.convert, R, V, {}, both(M[0]), ([1, 2], [3, 4]), G2, ([[1, 3], [0, 0]], [[0, 0], [5, 7]])),
    (20, spmd.convert, I, V, {}, both(M[0]), ([1, 2], [3, 4]), G2, both([[1, 3], [5, 7]])),
    (21, spmd.convert, R, P, {}, both([1, 2]), ([1, 2], [0, 0]), both([1, 3]), ([1, 3], [0, 0])),
    (22, spmd.convert, I, P, EXPERT, both([1, 2]), ([1, 2], [0, 0]), both([1, 3]), both([1, 3])),
    (
        23,
        spmd.convert,
        V,
        P,
        EXPERT,
        AB,
        ([[1, 2], [0, 0]], [[0, 0], [10, 20]]),
        both([[1, 2], [3, 4]]),
        ([1, 2], [3, 4]),
    ),
    (24, spmd.convert, S(0), P, EXPERT, AB, ([1, 2, 0, 0], [0, 0, 10, 20]), both([1, 2, 3, 4]), ([1, 2], [3, 4])),
    (25, spmd.reinterpret, V, P, {}, AB, AB, both([1, 3]), both([1, 3])),
    (26, spmd.reinterpret, R, V, EXPERT, both([1, 2]), both([1, 2]), G2, G2),
    (27, spmd.reinterpret, R, P, EXPERT, both([1, 2]), both([1, 2]), both([1, 3]), both([1, 3])),
    (28, spmd.reinterpret, I, V, {}, both([1, 2]), both([1, 2]), G2, both([6, 10])),
    (29, spmd.reinterpret, I, P, {}, both([1, 2]), both([1, 2]), both([1, 3]), both([2, 6])),
    (None, spmd.reinterpret, I, R, {}, both([1, 2]), both([1, 2]), G2, both([6, 10])),
    (None, spmd.reinterpret, R, I, EXPERT, both([1, 2]), both([1, 2]), both([1, 3]), ([1, 3], [0, 0])),
    (None, spmd.reduce_scatter, V, S(0), {}, F4, ([11, 22], [33, 44]), G2, both([1, 3, 5, 7])),
    (None, spmd.reduce_scatter, V, V, {}, M, ([11, 22], [33, 44]), G2, both([[1, 3], [5, 7]])),
    (
        None,
        spmd.reduce_scatter,
        P,
        V,
        dict(scatter_dim=1),
        M,
        ([11, 33], [22, 44]),
        G2,
        both([[1, 5], [3, 7]]),
    ),
]
