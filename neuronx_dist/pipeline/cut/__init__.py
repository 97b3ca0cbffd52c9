"""Cutting a recording into stages: where to cut (partition.py), and a stage as a function (stage.py)."""
