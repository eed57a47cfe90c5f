r"""Match the regular expressions of a config against names, in time that is bounded.

``re`` backtracks: of a name with n characters, ``(a+)+b`` takes 2^n steps, and a config comes from
a file that nobody checked. So an expression is refused if ``re`` may take too many steps. A
repetition of a group has no bound. q repetitions of single characters share n characters in at most
"n + q choose q" ways, each group multiplies the ways by its alternatives, and a way takes at most
as many steps as the expression has characters.

Other libraries do not help: ``regex`` has a time limit, but ``((a{1000}){1000}){1000}`` takes all
memory; RE2 takes linear time, but does not read ``(?!...)``, which configs are known to use.
"""

from __future__ import annotations

import math
import re
import time

from qtensor.checkpoints.errors import Place, refuse

MAX_LENGTH = 2000
"""Most characters of an expression."""
MAX_STEPS = 2 * 10**9
"""Most steps to match one name: some seconds."""
MAX_SECONDS = 5.0
"""Most time of one expression for all names of a checkpoint."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?::|=|!|<=|<!|P<\w+>))?|.", re.DOTALL)
"""An escape, a class, the beginning of a group, or one character."""
_FIX = "Name the modules one by one in config.json"


class Pattern:
    """Match names as ``re.match`` does: from their beginning, and not always to their end."""

    def __init__(self, text: str, place: Place) -> None:
        """Read an expression.

        ``place`` is for errors.
        """
        self._text, self._place, self._seconds = text, place, MAX_SECONDS
        try:
            if len(text) > MAX_LENGTH:
                raise ValueError(f"{len(text)} characters")
            self._repetitions, self._branches = _choices(text)
            self._match = re.compile(text).match
        except (ValueError, re.error, RecursionError, OverflowError, Warning) as error:
            rule = f"an expression has at most {MAX_LENGTH} characters, and repeats no group"
            refuse(place, rule, f"{error} in {text!r}", _FIX, error)

    def matches(self, name: str) -> bool:
        """Return True if the beginning of a name matches."""
        ways = self._branches * math.comb(len(name) + self._repetitions, self._repetitions)
        if ways * len(self._text) > MAX_STEPS or self._seconds < 0:
            rule = f"an expression may take {MAX_STEPS:,} steps for a name"
            got = f"{self._text!r} for a name of {len(name)} characters"
            refuse(self._place, f"{rule}, and {MAX_SECONDS} seconds for all names", got, _FIX)
        begin = time.monotonic()
        found = self._match(name) is not None
        self._seconds -= time.monotonic() - begin
        return found


def _choices(text: str) -> tuple[int, int]:
    """Return the number of repetitions, and the product of the alternatives of all groups.

    Raises:
        ValueError: a group is repeated, named again, or has flags or a condition.
    """
    repetitions, branches, groups, before = 0, 1, [1], ""
    for token in _TOKEN.findall(text):
        if before == "(" and token == "?":
            raise ValueError("a group with flags or conditions")
        if before == ")" and token in ("*", "+", "{"):
            raise ValueError("a repetition of a group")
        if token[0] == "\\" and token[1:].isdigit():
            raise ValueError("a backreference")  # a step compares many characters
        if token.startswith("("):
            groups.append(1)
        elif token == ")" and len(groups) > 1:
            branches *= groups.pop()
        elif token == "|":
            groups[-1] += 1
        elif token in ("*", "+", "{") or (token == "?" and before not in ("*", "+", "?")):
            repetitions += 1  # a sign after another one makes it lazy or possessive
        before = token
    return repetitions, branches * math.prod(groups)
