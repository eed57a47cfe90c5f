"""Carry the names of the modules that a config leaves plain to the config of a copy.

Configs name such modules in four ways: by their names, or a prefix or the last parts of names; by
``re:`` patterns (compressed-tensors); by shell wildcards (ModelOpt, Quark); by bare regular
expressions (transformers). Loaders create such modules without factors, also modules that the file
does not have, such as a tied ``lm_head``. So a list must be carried over, not rebuilt.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any

from qtensor.checkpoints.errors import CheckpointError, Place
from qtensor.checkpoints.patterns import Pattern
from qtensor.checkpoints.source import Source

_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
_WILD = re.compile(r"[*?\[]")
NAMES, REGEX, WILDCARD = "names", "re:", "wildcards"
"""What a loader takes beside plain names: expressions, expressions after ``re:``, or wildcards."""


def ignored_names(source: Source) -> list[str]:
    """Return the entries of all such lists of a source, each once, in order."""
    other = source.files.get("hf_quant_config.json", {}).get("quantization")
    parts = [part for part in (source.quantization, other) if isinstance(part, dict)]
    lists = [part[key] for part in parts for key in _KEYS if isinstance(part.get(key), list)]
    return list(dict.fromkeys(name for names in lists for name in names if isinstance(name, str)))


def carried(
    entries: Iterable[str], plain: Iterable[str], quantized: Iterable[str], style: str
) -> list[str]:
    """Return the list of a copy: entries that still apply, then plain modules that none covers.

    An entry that matches a quantized module of the copy is left out, because a loader would then
    look for plain values. All modules are those of the copy, and ``entries`` are in its ``style``
    (see ``translated``).
    """
    modules = list(quantized)
    parts = {part for module in modules for part in _ends(module)}
    kept = []
    for entry in dict.fromkeys(entries):
        test = _test(entry, style)
        if entry not in parts and not (test and any(map(test, modules))):
            kept.append(entry)
    names, tests = set(kept), [test for entry in kept if (test := _test(entry, style))]
    more = (m for m in plain if m not in names and not any(test(m) for test in tests))
    return [*kept, *dict.fromkeys(more)]


def translated(entry: str, style: str) -> str | None:
    """Return an entry of another layout in a style, or None if it cannot be said in it."""
    if entry.startswith("re:"):
        if style == REGEX:
            return entry
        if style == NAMES:
            return entry[3:] if _compiled(entry[3:]) else None
        glob = entry[3:].removeprefix("^").removesuffix("$")
        glob = glob.replace(".*", "*").replace(r"\.", "\0").replace(".", "?").replace("\0", ".")
        # re.match looks at the beginning alone.
        glob += "" if entry.endswith("$") or glob.endswith("*") else "*"
        return glob if re.fullmatch(r"[\w.*?-]+", glob) else None
    if not _WILD.search(entry) or style == WILDCARD:
        return entry
    pattern = ".*".join(map(re.escape, re.split(r"\.?\*+", entry)))
    return f"re:{pattern}$" if style == REGEX else pattern


def _ends(module: str) -> Iterable[str]:
    """Yield the names that mean a module: itself, its parents, and its last parts."""
    parts = module.split(".")
    for i in range(len(parts)):
        yield ".".join(parts[: i + 1])
        yield ".".join(parts[i:])


def _test(entry: str, style: str) -> Callable[[str], Any] | None:
    """Return the match of a pattern in a style, or None for a plain name."""
    if entry.startswith("re:"):  # some loaders of wildcards take these too
        return _compiled(entry[3:])
    if style == WILDCARD:
        if not _WILD.search(entry):
            return None
        return re.compile(fnmatch.translate(entry)).match
    if style == REGEX:
        return None
    # transformers also takes a prefix that ends with a part of the name.
    prefix = re.sub(r"\\?\.$", "", entry)
    return _compiled(rf"(?:{prefix})\." if prefix != entry else rf"(?:{entry})(?=\.|$)")


def _compiled(pattern: str) -> Callable[[str], bool] | None:
    """Return the match of an expression, or None if it is not read."""
    try:
        return Pattern(pattern, Place()).matches
    except CheckpointError:
        return None
