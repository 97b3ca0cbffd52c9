"""Messages of the checker: the call, the reason, the origin of a type, and repairs of one line.

explain.py      errors in the user's words, from violations; loss_errors.py: errors for a loss
provenance.py   the line, module path, names and source text of a call; syntax.py: source text as a syntax tree
repairs.py      repairs found by trying; trials.py: the trials of a call's operands
rewrites.py     repairs that are not an operator on one operand; loops.py: repairs in loops over parameters

A repair edits one line: statements are not rewritten. `rewrites.py` and `loops.py` keep to this, and are needed. A bias
before a sum, clipping before a reduction, and seeds that differ are repaired by another call or argument, not by a
conversion. A term of a sum over all parameters, some of which are shards, gets a condition: without `loops.py` first
repairs of norms and penalties end in no right program (12 of the tests' programs for messages, one user program).
"""
