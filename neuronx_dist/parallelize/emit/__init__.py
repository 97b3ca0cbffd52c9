"""Python source of a divided program: one class, the same text on every rank.

emitted_class.py  the class; body.py: the lines of its methods; lines.py: lines as data, and their text
equal_blocks.py  equal layers as one method
source_text.py   calls, arguments, paths and constants as text
"""
