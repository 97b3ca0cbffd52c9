"""Annotations: one line of text gives a function a typing rule (`register_op`).

annotation.py   the notation; registered.py: the label specs of an annotated function's calls
register.py     `register_op`; examples.py: the verification of an annotation before it is accepted
"""
