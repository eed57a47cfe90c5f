r"""Match the regular expressions of a config against names, in time that is bounded.

Python's ``re`` backtracks: of a name with n characters, ``(a+)+b`` takes 2^n steps, and a config
comes from a file that nobody checked. Here an expression becomes states without backtracking
(K. Thompson, "Regular expression search algorithm", 1968): a name of n characters takes at most n
steps for each state. The sets of states that occur are kept, so that most characters take one step.
``re`` reads the expression too, so that what it refuses is refused, but does not match with it.

Read are literals, ``.``, classes, ``\d \w \s`` and their opposites, groups, ``|``, ``* + ?
{m,n}`` also in their lazy forms, ``^ $ \A \Z``, ``(?=...)`` and ``(?!...)``, which is more than
configs are known to use. Backreferences, looking behind and flags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from qtensor.checkpoints.errors import Place, refuse

MAX_LENGTH = 2000
"""Most characters of an expression."""
MAX_STATES = 5000
"""Most states, to which ``{m,n}`` adds a copy for each repetition."""
MAX_NESTING = 50
MAX_STEPS = 5_000_000
"""Most steps of one expression over all names of a checkpoint: some seconds."""
_MAX_SETS = 10_000
_REPEAT = re.compile(r"\{(?:(\d{1,9})|(\d{0,9}),(\d{0,9}))\}")
_MANY = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ENDS = {"^": "start", "\\A": "start", "$": "end", "\\Z": "very end"}
_ESCAPES = frozenset("dDwWsSntrfv")

Char = Callable[[str], object]


class _Unread(ValueError):
    """Say what of an expression is not read."""


@dataclass(slots=True)
class _State:
    """Hold one state: it takes a character, or checks something, or is passed at once."""

    take: Char | None = None
    check: str = ""
    look: int | None = None
    """First state of what is looked for, which ends in state 0."""
    wanted: bool = True
    next: list[int] = field(default_factory=list)


@lru_cache(maxsize=1000)
def _one(text: str) -> Char:
    """Return a test of one character: ``re`` itself, of a class or an escape alone."""
    return re.compile(text).fullmatch


class Pattern:
    """Match names as ``re.match`` does: from their beginning, and not always to their end."""

    def __init__(self, text: str, place: Place) -> None:
        """Read an expression.

        Args:
            text: the expression, without ``re:``.
            place: file and layout, for errors.

        Raises:
            CheckpointError: it is not sound, too long, or has something that is not read.
        """
        self._states: list[_State] = [_State()]  # state 0 accepts
        self._text, self._at, self._depth = text, 0, 0
        self._place, self._left, self._copies = place, MAX_STEPS, 0
        self._sets: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        try:
            if len(text) > MAX_LENGTH:
                raise _Unread(f"{len(text)} characters")
            build = self._alternatives()
            if self._at != len(text):
                raise _Unread(f"the parenthesis at {self._at}")
            self._first = build(0)
            re.compile(text)  # after the above, which refuses flags: with them it can take long
        except (_Unread, re.error, RecursionError, OverflowError, Warning) as error:
            rule = "an expression has characters, classes, groups, repetitions and looks ahead"
            got = f"{error} in {text!r}"
            refuse(place, rule, got, "Name the modules one by one in config.json", error)
        self._has_looks = any(state.look is not None for state in self._states)

    # ---- reading an expression; states are made from the end to the beginning

    def _add(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise _Unread(f"more than {MAX_STATES} states")
        self._states.append(state)
        return len(self._states) - 1

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _alternatives(self) -> Callable[[int], int]:
        """Return a function that makes the states before a state, and returns their first one."""
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda then: self._add(_State(next=[branch(then) for branch in branches]))

    def _sequence(self) -> Callable[[int], int]:
        items = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._repeated(self._atom()))

        def build(then: int) -> int:
            for item in reversed(items):
                then = item(then)
            return then

        return build

    def _repeated(self, item: Callable[[int], int]) -> Callable[[int], int]:
        """Read what follows an atom: how often it occurs."""
        sign = self._peek()
        found = _REPEAT.match(self._text, self._at)
        if sign in _MANY and sign:
            low, high = _MANY[sign]
            self._at += 1
        elif found and found[0] != "{}":
            low = int(found[1] or found[2] or 0)
            high = low if found[1] else int(found[3]) if found[3] else None
            self._at = found.end()
        else:
            return item
        if self._peek() == "?":
            self._at += 1  # lazy: the same names match
        if (self._peek() in _MANY and self._peek()) or _REPEAT.match(self._text, self._at):
            raise _Unread(f"two repetitions of one thing at {self._at}")
        if (high is not None and high < low) or max(low, high or 0) > MAX_STATES:
            raise _Unread(f"{low} to {high} repetitions")

        def copy(then: int) -> int:
            self._copies += 1
            if self._copies > MAX_STATES:
                raise _Unread(f"more than {MAX_STATES} repetitions")
            return item(then)

        def build(then: int) -> int:
            if high is None:
                loop = self._add(_State())
                self._states[loop].next = [copy(loop), then]
                then = loop
            else:
                end = then
                for _ in range(high - low):
                    then = self._add(_State(next=[copy(then), end]))
            for _ in range(low):
                then = copy(then)
            return then

        return build

    def _atom(self) -> Callable[[int], int]:
        sign = self._peek()
        if sign == "(":
            return self._group()
        if sign in ("*", "+", "?"):
            raise _Unread(f"a repetition of nothing at {self._at}")
        text = self._peek(2) if sign == "\\" else sign
        if sign == "[":
            text = self._class()
        self._at += len(text)
        if text in _ENDS:
            return lambda then: self._add(_State(check=_ENDS[text], next=[then]))
        letter = text[1:]
        if sign == "\\" and (not letter or (letter.isalnum() and letter not in _ESCAPES)):
            raise _Unread(f"the escape {text!r}")
        take: Char = _one(text) if sign in "\\[." else text.__eq__
        return lambda then: self._add(_State(take=take, next=[then]))

    def _class(self) -> str:
        """Return the text of a class, up to its bracket."""
        end = self._at + (2 if self._peek(2) == "[^" else 1)
        end += 1  # a bracket that comes first is a character
        if self._text[end - 1 : end] == "\\":
            end += 1
        while self._text[end : end + 1] != "]":
            if end >= len(self._text):
                raise _Unread(f"a class without its end at {self._at}")
            end += 2 if self._text[end] == "\\" else 1
        return self._text[self._at : end + 1]

    def _group(self) -> Callable[[int], int]:
        head = re.match(r"\((?:\?(?::|=|!|P<\w+>))?", self._text[self._at :])
        start = head[0] if head else "("
        if self._text[self._at + len(start) :].startswith("?"):
            raise _Unread(f"{self._peek(4)!r}")
        self._at += len(start)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _Unread(f"more than {MAX_NESTING} groups in each other")
        begin = self._at
        build = self._alternatives()
        if self._peek() != ")":
            raise _Unread(f"a group without its end at {begin}")
        self._at += 1
        self._depth -= 1
        if start not in ("(?=", "(?!"):
            return build
        wanted = start == "(?="
        return lambda then: self._add(_State(look=build(0), wanted=wanted, next=[then]))

    # ---- matching

    def matches(self, name: str) -> bool:
        """Return True if the beginning of a name matches.

        Raises:
            CheckpointError: all names together took over ``MAX_STEPS`` steps.
        """
        found, self._left = self._run(self._first, name, 0, self._left)
        return found

    def _run(self, first: int, name: str, at: int, left: int) -> tuple[bool, int]:
        """Return whether ``name[at:]`` matches from a state on, and how many steps are left."""
        active, left = self._closed({first}, name, at, left)
        while active and 0 not in active and at < len(name):
            char = name[at]
            at += 1
            # Ends are seen one character before them, because "$" also stands before a last line.
            kept = not self._has_looks and at < len(name) - 1
            found = self._sets.get((active, char)) if kept else None
            left -= 1
            if found is None:
                after = {
                    s.next[0] for s in map(self._states.__getitem__, active) if _takes(s, char)
                }
                found, left = self._closed(after, name, at, left - len(active))
                if kept and len(self._sets) < _MAX_SETS:
                    self._sets[active, char] = found
            active = found
        return 0 in active, left

    def _closed(self, some: set[int], name: str, at: int, left: int) -> tuple[frozenset[int], int]:
        """Return the states that take a character or accept, behind those that take none."""
        found, todo = set(), list(some)
        seen = set(some)
        while todo:
            number = todo.pop()
            state = self._states[number]
            left -= 1
            if left < 0:
                rule = f"an expression takes at most {MAX_STEPS:,} steps over all names"
                fix = "Name the modules one by one in config.json"
                refuse(self._place, rule, f"{self._text!r} for {name!r}", fix)
            if number == 0 or state.take is not None:
                found.add(number)
                continue
            if state.look is not None:
                fits, left = self._run(state.look, name, at, left)
                if fits != state.wanted:
                    continue
            elif state.check and not _ends(state.check, name, at):
                continue
            new = [n for n in state.next if n not in seen]
            seen.update(new)
            todo += new
        return frozenset(found), left


def _takes(state: _State, char: str) -> bool:
    return state.take is not None and bool(state.take(char))


def _ends(check: str, name: str, at: int) -> bool:
    """Return whether a place in a name is its beginning or its end."""
    if check == "start":
        return at == 0
    return at == len(name) or (check == "end" and name[at:] == "\n")
