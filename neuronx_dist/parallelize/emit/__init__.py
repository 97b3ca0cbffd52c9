"""Python source of a divided program: one class, the same text on every rank.

emitted_class.py  the class; body.py: the lines of its forward
source_text.py   calls, arguments, paths and constants as text
"""
