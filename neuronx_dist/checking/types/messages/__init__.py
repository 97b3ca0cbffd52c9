"""Messages of the checker: the call, the reason, the origin of a type, and repairs of one line.

explain.py      errors in the user's words, from violations; loss_errors.py: errors for a loss
provenance.py   the line, module path, names and source text of a call; syntax.py: source text as a syntax tree
repairs.py      repairs found by trying; trials.py: the trials of a call's operands
rewrites.py     repairs that are not an operator on one operand; loops.py: repairs in loops over parameters
"""
