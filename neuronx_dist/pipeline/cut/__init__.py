"""Cutting a recording into stages.

cuts.py          where to cut, by the names of layers; balance.py: by what they compute and hold
splitting.py     what each stage runs; placement.py: which stages hold which parameters
partitioning.py  both, by a recording or without
stage.py         a stage as a function
"""
