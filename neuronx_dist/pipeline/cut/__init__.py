"""Cutting a recording into stages.

cuts.py        where to cut, by the names of layers
splitting.py   what each stage runs; placement.py: which stages hold which parameters
stage.py       a stage as a function
"""
