"""Policies, the user's control over a division: policies by name, constraints on operations, plans.

policies.py     the named policies, and the division of a program by any policy
whole_job.py    the jobs that `autodist` compares without `plan_ngpus`: units, stages, ZeRO, recomputation
graph.py        `IRGraph`, the program that a policy works on; operations.py: its operations, under nnScaler's names
plans.py        a division as a `Plan`, and a plan as constraints; later_axes.py: decisions about later axes
"""
