"""Write values as texts and read them back: one grammar for all texts that hold values.

| text | example | written by |
|---|---|---|
| canonical text of a quantizer | ``mxfp8(columnwise=True)`` | ``encode_call`` |
| layout of a view; plan of a linear layer | ``plain;part;_scale_inv`` | ``encode_list`` |
| key of a recipe | ``MXFP8BlockScaling(overrides={'input':'mxfp6'})`` | ``encode_literals`` |

::

    call     = name [ "(" name "=" word { "," name "=" word } ")" ]
    list     = word { separator word }
    literals = name "(" [ name "=" literal { "," name "=" literal } ] ")"
    name     = a Python identifier
    word     = any characters; "%" and two hexadecimal digits stand for each of SPECIAL and for
               control characters
    literal  = a Python literal, float('inf'), float('-inf'), float('nan') or function(number)

A reader returns the values that were written, and refuses a text that no writer produces.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from qtensor.core.errors import ArgumentTypeError, fail

SPECIAL = "%|;,()='\"\\"
"""Characters that have a meaning in one of the texts, so that words escape them."""
_TO_ESCAPE = re.compile(rf"[{re.escape(SPECIAL)}\x00-\x1f\x7f]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})?")
LIST_SEPARATORS = "|;"


class Function(NamedTuple):
    """A function in a literal, by its number: no text can hold the function itself."""

    number: int


def encode_word(word: str) -> str:
    """Return ``word`` with special characters escaped; most words stay as they are."""
    if word.isidentifier():
        return word
    return _TO_ESCAPE.sub(lambda found: f"%{ord(found[0]):02X}", word)


def decode_word(text: str) -> str:
    """Return the word that ``encode_word`` wrote.

    Raises:
        QTensorError: the text has an unescaped special character, or another escape.
    """
    word = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else "%", text)
    if encode_word(word) != text:
        rule = f"a word escapes {SPECIAL} and control characters as '%' and two hexadecimal digits"
        fail("text", rule, repr(text), f"Write {encode_word(word)!r}")
    return word


def encode_list(words: Sequence[str], separator: str) -> str:
    """Return the words, at least one, with ``separator`` between them."""
    if not words or separator not in LIST_SEPARATORS:
        rule = f"a list has at least one word, and a separator of {LIST_SEPARATORS}"
        fail("text", rule, f"{list(words)} and {separator!r}", "Pass such a list")
    return separator.join([encode_word(word) for word in words])


def decode_list(text: str, separator: str) -> list[str]:
    """Return the words that ``encode_list`` wrote.

    Raises:
        QTensorError: one of them is not a word.
    """
    return [decode_word(word) for word in text.split(separator)]


def encode_call(name: str, options: Mapping[str, str]) -> str:
    """Return ``name(option=word,...)``, or ``name`` without options.

    Raises:
        QTensorError: a name is not a Python identifier.
    """
    _check_names(name, *options)
    words = ",".join([f"{option}={encode_word(word)}" for option, word in options.items()])
    return f"{name}({words})" if options else name


def decode_call(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options that ``encode_call`` wrote.

    Raises:
        QTensorError: the text is not such a call.
    """
    name, bracket, rest = text.partition("(")
    options: dict[str, str] = {}
    if bracket and not rest.endswith(")"):
        _refuse_call(text)
    for item in rest.removesuffix(")").split(",") if bracket else ():
        option, equals, word = item.partition("=")
        if not equals or option in options or not option.isidentifier():
            _refuse_call(text)
        options[option] = decode_word(word)
    return name, options


def _refuse_call(text: str) -> NoReturn:
    rule = "text must read 'format' or 'format(option=value,...)'"
    fail("quantizer", rule, repr(text), "Correct the text")


def _check_names(*names: str) -> None:
    for name in names:
        if not name.isidentifier():
            rule = "names are made of letters, digits and underscores"
            fail("text", rule, repr(name), "Choose another name")


def encode_literals(name: str, options: Mapping[str, Any]) -> str:
    """Return ``name(option=literal,...)``.

    Values are None, bool, int, float, str, ``Function``, and tuples, lists and dicts of them.

    Raises:
        QTensorError: a name is not a Python identifier, or a value is none of these.
    """
    _check_names(name, *options)
    literals = [
        f"{option}={_literal(value, f'{name}.{option}')}" for option, value in options.items()
    ]
    return f"{name}({','.join(literals)})"


def _literal(value: object, label: str) -> str:
    if isinstance(value, Function):
        return f"function({value.number})"
    if isinstance(value, float):
        # Python has no literals for infinity and NaN.
        return repr(float(value)) if math.isfinite(value) else f"float('{float(value)}')"
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join([f"{_literal(k, label)}:{_literal(v, label)}" for k, v in value.items()])
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join([_literal(item, label) for item in value]) + "]"
    if isinstance(value, tuple):
        return "(" + "".join([f"{_literal(item, label)}," for item in value]) + ")"
    rule = "values are None, bool, int, float, str, or tuples, lists and dicts of them"
    fail(label, rule, f"a {type(value).__name__}", "Pass such a value", ArgumentTypeError)


def decode_literals(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options that ``encode_literals`` wrote.

    Raises:
        QTensorError: the text is not such a call.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            return call.func.id, {str(key.arg): _value(key.value) for key in call.keywords}
    except (SyntaxError, ValueError):
        pass
    fail("text", "it must read 'name(option=literal,...)'", repr(text), "Correct the text")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Tuple):
        return tuple([_value(item) for item in node.elts])
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kinds: dict[str, Any] = {"float": float, "function": Function}
        if node.func.id in kinds and len(node.args) == 1 and not node.keywords:
            return kinds[node.func.id](ast.literal_eval(node.args[0]))
    return ast.literal_eval(node)
