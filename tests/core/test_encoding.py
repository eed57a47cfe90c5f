"""Texts that hold values: each reader returns what its writer wrote, or refuses the text. Tables
and lists as text.
"""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qtensor
from qtensor.core.encoding import (
    LIST_SEPARATORS,
    SPECIAL,
    Function,
    decode_call,
    decode_list,
    decode_literals,
    decode_word,
    encode_call,
    encode_list,
    encode_literals,
    encode_word,
)
from qtensor.core.quantizer_registry import parse
from qtensor.core.texts import aligned, some

WORDS = st.one_of(st.text(), st.text(SPECIAL + " \n\tab0"))
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | WORDS
    | st.builds(Function, st.integers(0, 99)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(WORDS, inner),
    max_leaves=8,
)


@given(WORDS)
def test_words(word):
    text = encode_word(word)
    assert decode_word(text) == word
    assert not set(text) & set(SPECIAL + "\n") - {"%"}


@given(NAMES, st.dictionaries(NAMES, WORDS))
def test_calls(name, options):
    assert decode_call(encode_call(name, options)) == (name, options)


@given(st.lists(WORDS, min_size=1), st.sampled_from(LIST_SEPARATORS))
def test_lists(words, separator):
    assert decode_list(encode_list(words, separator), separator) == words


@given(NAMES, st.dictionaries(NAMES, LITERALS))
def test_literals(name, options):
    # By repr: it tells 1, 1.0 and True apart, and 0.0 and -0.0.
    assert repr(decode_literals(encode_literals(name, options))) == repr((name, options))


@given(WORDS)
def test_a_text_that_is_read_is_the_text_that_is_written(text):
    for read, write in (
        (decode_call, lambda value: encode_call(*value)),
        (lambda t: decode_list(t, ";"), lambda value: encode_list(value, ";")),
    ):
        try:
            value = read(text)
            if read is decode_call and not value[0].isidentifier():
                continue
        except qtensor.QTensorError:
            continue
        assert write(value) == text


@pytest.mark.parametrize(
    "text", ["a%", "a%2", "a%2c", "a%41", "a|b", "a;b", "a,b", "a(b", "a)b", "a=b", "'", '"', "\t"]
)
def test_a_word_that_is_not_escaped_is_refused(text):
    with pytest.raises(qtensor.QTensorError, match="a word escapes"):
        decode_word(text)


@pytest.mark.parametrize(
    "text", ["", "a", "a(", "a(1)", "a(b=c)", "a(b=f(1))", "a(b={**c})", "a.b()"]
)
def test_a_text_that_is_not_literals_is_refused(text):
    with pytest.raises(qtensor.QTensorError, match="it must read"):
        decode_literals(text)


def test_a_value_without_a_literal_is_refused():
    with pytest.raises(TypeError, match=r"R\.a: values are None, .*; got a object"):
        encode_literals("R", {"a": object()})


def test_names_are_identifiers():
    for name in ("a b", "", "a(", "1a", "a|b"):
        with pytest.raises(qtensor.QTensorError, match="letters, digits and underscores"):
            encode_call(name, {})


def test_texts_in_saved_files_stay_as_they_are():
    """Files hold these texts, so they must be readable for ever."""
    texts = {
        "mxfp8": qtensor.MXFP8Quantizer(),
        "mxfp8(columnwise=True)": qtensor.MXFP8Quantizer(columnwise=True),
        "mxfp8(dtype=e5m2,columnwise=True)": qtensor.MXFP8Quantizer(dtype="e5m2", columnwise=True),
        "nvfp4(e4m3_max=256.0)": qtensor.NVFP4Quantizer(e4m3_max=256),
    }
    for text, quantizer in texts.items():
        assert sorted(quantizer.canonical) == sorted(text)
        assert parse(text) == quantizer


# ---- tables and lists, as messages and reprs show them


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("name", "bits"), ("a", "4"), ("longer", "")]
    assert aligned(rows) == ["name    bits", "a       4", "longer"]


def test_numbers_are_aligned_to_the_right() -> None:
    rows = [("name", "count"), ("a", "7")]
    assert aligned(rows, numbers_from=1) == ["name  count", "a         7"]


def test_a_long_list_is_cut() -> None:
    assert some("abc", 3) == "a, b, c"
    assert some("abcd", 3) == "a, b, c, ..."
    assert some([]) == ""
