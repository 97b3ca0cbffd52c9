"""Prints the exam: each program with its class, what execution says of it, and what the checker does.

python -m tests.checking.exam [NAME OR CLASS ...]
"""

import sys

from tests.checking.exam.support import CLASSES, load
from tests.checking.user_programs.support import execute, verdict


def main(parts: list[str]) -> None:
    counts = {True: [0, 0], False: [0, 0]}
    for name, program in load().items():
        class_ = CLASSES[name.partition(".")[0]]
        if parts and not any(name.startswith(part) or class_.startswith(part) for part in parts):
            continue
        ran, said = execute(name), verdict(name)
        good = said.outcome == ("accepted" if program.right else "refused")
        counts[program.right][0] += good
        counts[program.right][1] += 1
        print(f"{'ok  ' if good else 'FAIL'} {class_:24} {name:50} {said.outcome} {said.seconds:.1f} s")
        if not ran.confirms(program):
            print(f"     execution does not confirm {program.bug or 'right'!r}: {ran}")
        if not good or parts:
            print(f"     {said.message[:1500] if parts else said.line}")
            for text in said.assumed:
                print(f"     assumed: {text}")
    print(f"right ones accepted: {counts[True]}, wrong ones refused: {counts[False]}")


main(sys.argv[1:])
