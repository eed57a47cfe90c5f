"""Quantizers are values: equality, hash, copies, canonical strings, no live state, a user's own
subclass.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from adversarial import expected
from formats import BY_NAME, FORMATS, USAGES, FormatCase, assert_same_tensor, formats
from torch import Tensor

import qtensor
from qtensor.core import quantizer_registry as codec
from qtensor.core.quantizer_registry import parse
from qtensor.storage.base import QuantizedTensorStorage


def every_value(case: FormatCase) -> Iterator[dict[str, Any]]:
    """Every combination of options in every usage; both usages also with the columnwise value."""
    for options, (rowwise, columnwise) in itertools.product(case.every_option(), USAGES):
        yield {**options, "rowwise": rowwise, "columnwise": columnwise}
    yield {"rowwise": True, "columnwise": True, "columnwise_value": True}


def twice(case: FormatCase, options: dict[str, Any]) -> tuple[qtensor.Quantizer, qtensor.Quantizer]:
    """Two objects: the one-line API would hand out one."""
    cls = codec.quantizer_class(case.name)
    return cls(**options), cls(**options)


@formats
def test_equal_options_equal_values(case: FormatCase) -> None:
    """One dict slot for equal ones, made apart; a slot each for different ones."""
    table: dict[qtensor.Quantizer, dict[str, Any]] = {}
    spellings = 0
    for options in every_value(case):
        a, b = twice(case, options)
        assert a is not b
        assert a == b
        assert hash(a) == hash(b)
        assert a.canonical == b.canonical
        spellings += a in table
        table[a] = options
        assert table[b] is options
    # nvfp4 spells its default e4m3_max in two ways: 0 and the number itself, which a separate
    # option meets once.
    twice_spelled = {False: 0.0, True: 448.0}
    assert spellings == sum(
        1
        for o in every_value(case)
        if o.get("e4m3_max") == twice_spelled[o.get("with_global_scale_inv", False)]
    )
    assert len({q.canonical for q in table}) == len(table)


@formats
def test_each_option_makes_a_difference(case: FormatCase) -> None:
    """To equality, to the hash, to the canonical string: one option at a time, from a value where
    it may vary.
    """
    base = {"columnwise": True}
    changed = {"rowwise": False, "columnwise": False, "columnwise_value": True}
    for name, values in case.options.items():
        changed[name] = 256.0 if name == "e4m3_max" else values[-1]
    if case.name == "nvfp4":
        # What transposing changes; no row of the table has it.
        changed["rht_side"] = "rowwise"
    names = {f.name for f in dataclasses.fields(case.quantizer())}
    if "dtype" not in changed:
        # A format with one element has nothing to choose.
        names.discard("dtype")
    assert set(changed) == names
    plain = case.quantizer(**base)
    for name, value in changed.items():
        other = case.quantizer(**{**base, name: value})
        assert other != plain, name
        assert hash(other) != hash(plain), name
        assert other.canonical != plain.canonical, name
        assert getattr(other, name) == value


def test_formats_differ() -> None:
    quantizers = [case.quantizer() for case in FORMATS]
    assert len(set(quantizers)) == len(FORMATS)
    assert all(a != b for a, b in itertools.combinations(quantizers, 2))


def test_every_registered_format_has_a_row() -> None:
    assert set(qtensor.formats()) == set(BY_NAME)


@formats
def test_copies_are_equal(case: FormatCase) -> None:
    for options in every_value(case):
        q = case.quantizer(**options)
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        copies = [
            copy.copy(q),
            copy.deepcopy(q),
            dataclasses.replace(q),
            *(pickle.loads(pickle.dumps(q, p)) for p in protocols),
        ]
        for other in copies:
            assert type(other) is type(q)
            assert other == q
            assert hash(other) == hash(q)
            assert (other.slots, other.canonical, other.scale_layout) == (
                q.slots,
                q.canonical,
                q.scale_layout,
            )


@formats
def test_canonical_string_parses_back(case: FormatCase) -> None:
    for options in every_value(case):
        q = case.quantizer(**options)
        parse.cache_clear()
        again = parse(q.canonical)
        assert again is not q
        assert again == q
        assert again.slots == q.slots
        assert type(again) is type(q)
        assert q.canonical.startswith(case.name)
        assert parse(q.canonical) is again


@pytest.mark.parametrize("epsilon", [1e-45, 1e-8, 0.1, 1 / 3, 1.0, 12345.678, 1e30])
def test_numbers_survive_the_canonical_string(epsilon: float) -> None:
    q = qtensor.quantizer("fp8", amax_epsilon=epsilon)
    assert parse(q.canonical).amax_epsilon == epsilon


@formats
def test_parsed_quantizer_makes_the_same_tensor(case: FormatCase) -> None:
    """Derived state included: the rotation, the sign mask, the random bytes."""
    x = torch.randn(20, 50)
    for options in case.each_option():
        q = case.quantizer(columnwise=True, **options)
        call = {
            **case.call(),
            **({"generator": torch.tensor([3])} if options.get("stochastic_rounding") else {}),
        }
        assert_same_tensor(parse(q.canonical)(x, **call), q(x, **call))


MALFORMED = {
    "mxfp8(": "text must read 'format' or 'format(option=value,...)'; got 'mxfp8('",
    "mxfp8(columnwise=True": (
        "text must read 'format' or 'format(option=value,...)'; got 'mxfp8(columnwise=True'"
    ),
    "mxfp8(columnwise)": (
        "text must read 'format' or 'format(option=value,...)'; got 'mxfp8(columnwise)'"
    ),
    "mxfp8(,)": "text must read 'format' or 'format(option=value,...)'; got 'mxfp8(,)'",
    "mxfp8(rowwise=True,rowwise=False)": "text must read 'format' or 'format(option=value,...)'",
    "": "the format must be a registered one; got ''. Choose one of: fp8, fp8_delayed",
    "mxfp9": "the format must be a registered one; got 'mxfp9'. Choose one of: fp8, fp8_delayed",
    "mxfp8 ": "the format must be a registered one; got 'mxfp8 '",
    "mxfp8(swizzle=True)": (
        "the option must be one of the format's; got swizzle. Choose among: rowwise, columnwise"
    ),
    "mxfp8(rowwise=yes)": "quantizer[mxfp8]: rowwise must be a bool; got 'yes'",
    "mxfp8(rowwise=1)": "quantizer[mxfp8]: rowwise must be a bool; got '1'",
    "mxfp8(rowwise=True))": "got 'True)'. Write 'True%29'",
    "mxfp8(dtype=e2m1)": "quantizer[mxfp8]: dtype must be one of 'e4m3', 'e5m2'; got 'e2m1'",
    "mxfp8(scale_mode=1)": (
        "quantizer[mxfp8]: scale_mode must be one of 'rceil', 'floor', 'ceil', 'even'; got '1'"
    ),
    "mxfp8(rowwise=False)": "at least one usage is needed",
    "nvfp4(e4m3_max=240)": "e4m3_max must be one of 448.0, 256.0; got 240.0",
    "fp8(amax_epsilon=nan)": "amax_epsilon must be finite and not negative; got nan",
    "fp8(amax_epsilon=-1)": "amax_epsilon must be finite and not negative; got -1",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_strings(text: str) -> None:
    with pytest.raises(qtensor.QTensorError) as caught:
        parse(text)
    assert MALFORMED[text] in str(caught.value)


def test_unknown_format_lists_all_known() -> None:
    with pytest.raises(qtensor.QTensorError) as caught:
        parse("int8")
    known = f"Choose one of: {', '.join(qtensor.formats())}; for a format of your own, import"
    assert known in str(caught.value)


@formats
@pytest.mark.parametrize(
    "argument", ["generator", "scale", "amax_reduction_group", "noop_flag", "out"]
)
def test_live_state_is_refused_by_name(case: FormatCase, argument: str) -> None:
    """A TypeError that says where it goes."""
    with pytest.raises(
        TypeError, match=rf"quantizer\[{case.name}\].*quantizer\.quantize\(x, {argument}="
    ):
        type(case.quantizer())(**{argument: object()})


@formats
@pytest.mark.parametrize(
    "value",
    [torch.ones(3), torch.Generator(), object(), lambda: 0],
    ids=lambda v: type(v).__name__,
)
def test_live_state_is_refused_by_type(case: FormatCase, value: Any) -> None:
    for name in case.quantizer().option_names():
        with pytest.raises(
            TypeError,
            match=rf"options are plain values.*got {name}=.*Pass it to quantize\(x, scale=",
        ) as caught:
            case.quantizer(**{name: value})
        assert isinstance(caught.value, qtensor.QTensorError)


@formats
@pytest.mark.parametrize("value", [[1], None, {}], ids=repr)
def test_a_value_of_another_type_is_refused(case: FormatCase, value: Any) -> None:
    for name in case.quantizer().option_names():
        with pytest.raises(qtensor.QTensorError, match=f"{name} must be a"):
            case.quantizer(**{name: value})


@formats
def test_frozen(case: FormatCase) -> None:
    q = case.quantizer()
    for name in q.option_names():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, name, getattr(q, name))


@formats
def test_with_usage_is_a_new_value(case: FormatCase) -> None:
    q = case.quantizer(rowwise=True, columnwise=True)
    row = q.with_usage(columnwise=False)
    assert (q.rowwise, q.columnwise, row.rowwise, row.columnwise) == (True, True, True, False)
    assert row == case.quantizer()
    assert q.with_usage() is q
    assert q.with_usage(rowwise=True) is q


@formats
def test_quantizer_of_a_quantizer(case: FormatCase) -> None:
    """The given options replace its own, the others stay."""
    q = case.quantizer(columnwise=True)
    assert qtensor.quantizer(q) is q
    assert qtensor.quantizer(q, columnwise=False) == case.quantizer()
    for options in case.each_option():
        assert qtensor.quantizer(q, **options) == case.quantizer(columnwise=True, **options)


def test_torch_dtypes_name_elements() -> None:
    for name in ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8"):
        for dtype, element in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
            assert qtensor.quantizer(name, dtype=dtype) == qtensor.quantizer(name, dtype=element)
            assert qtensor.quantizer(name, dtype=dtype).dtype == element


# ---- a user's own ------------------------------------------------------------------------------


@pytest.fixture
def own_format() -> Iterator[None]:
    """Formats that a test registers are gone after it."""
    known = dict(codec._CLASSES)
    yield
    codec._CLASSES.clear()
    codec._CLASSES.update(known)
    parse.cache_clear()


@pytest.mark.usefixtures("own_format")
def test_a_users_own_quantizer() -> None:
    """MXFP8 of the input times a gain: a new format of an old storage."""

    @dataclass(frozen=True, kw_only=True)
    class Gained(qtensor.MXFP8Quantizer):
        gain: float = 1.0

        format: ClassVar[str] = "gained"

        def encode_(self, out: Any, x: Tensor, scale: Any, amax: Any, seed: Any) -> None:
            super().encode_(out, x * self.gain, scale, amax, seed)

        def decode(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().decode(*args, **kwargs) / self.gain

    assert "gained" in qtensor.formats()
    x = torch.randn(5, 40)
    q = qtensor.quantize(x, "gained", gain=4.0)
    assert isinstance(q, qtensor.MXFP8Tensor)
    assert q.quantizer.canonical == "gained(gain=4.0)"
    assert parse("gained(gain=4.0)") == Gained(gain=4.0) == q.quantizer != Gained()
    want = expected(4 * x, BY_NAME["mxfp8"])
    assert torch.equal(q._rowwise_data, torch.from_numpy(want["_rowwise_data"]))
    assert torch.equal(q.dequantize(), qtensor.quantize(4 * x, "mxfp8").dequantize() / 4)
    assert Gained(rowwise=False, columnwise=True)(x).get_usages() == {
        "rowwise": False,
        "columnwise": True,
    }


def test_a_quantizer_class_needs_a_format_id() -> None:
    with pytest.raises(
        qtensor.QTensorError, match=r"a quantizer class needs its own format id.*Add format ="
    ):

        class Nameless(qtensor.MXFP8Quantizer):
            pass


@pytest.mark.usefixtures("own_format")
def test_a_format_id_is_taken_once() -> None:
    with pytest.raises(
        qtensor.QTensorError,
        match=r"format 'mxfp8': a format has one quantizer class; got .*Impostor",
    ):

        class Impostor(qtensor.MXFP8Quantizer):
            format = "mxfp8"

    assert qtensor.quantizer("mxfp8") == qtensor.MXFP8Quantizer()


@pytest.mark.usefixtures("own_format")
def test_a_quantizer_that_lacks_methods_says_so() -> None:
    """Allocation needs the spec alone; the rest names what is missing."""

    @dataclass(frozen=True, kw_only=True)
    class Half(qtensor.Quantizer):
        format: ClassVar[str] = "half_made"
        spec = qtensor.MXFP8Tensor.spec
        tensor_cls = qtensor.MXFP8Tensor
        storage_cls = qtensor.MXFP8TensorStorage

    empty = Half().make_empty((3, 40))
    assert isinstance(empty, QuantizedTensorStorage)
    with pytest.raises(
        qtensor.UnsupportedError, match=r"quantize\[half_made\].*Half has no encode_\. Define it"
    ):
        qtensor.quantize(torch.randn(3, 40), "half_made")
    with pytest.raises(
        qtensor.UnsupportedError, match=r"dequantize\[half_made\].*Half has no decode\. Define it"
    ):
        empty.dequantize()


@pytest.mark.parametrize("tag", ["inf", "1", "1e5", "True", "x y", "a|b;c", "a,(b=c)", "'\"%28"])
@pytest.mark.usefixtures("own_format")
def test_text_options_round_trip(tag: str) -> None:
    """An option is read back as the type of its default, whatever its text looks like."""

    @dataclass(frozen=True, kw_only=True)
    class TaggedQuantizer(qtensor.MXFP8Quantizer):
        tag: str = ""
        format = "mxfp8_tagged"

    q = TaggedQuantizer(tag=tag)
    assert parse(q.canonical) == q


def test_a_default_that_depends_on_another_option() -> None:
    """``qtensor.quantizer`` hands on what was given, ``dataclasses.replace`` every number as it
    is.
    """
    plain = qtensor.NVFP4Quantizer()
    assert plain.e4m3_max == 448.0
    chosen = qtensor.quantizer(plain, use_4over6=True)
    assert chosen.e4m3_max == 256.0
    assert chosen == qtensor.NVFP4Quantizer(use_4over6=True)
    assert qtensor.quantizer(chosen, use_4over6=False) == plain
    assert dataclasses.replace(plain, use_4over6=True).e4m3_max == 448.0
    assert dataclasses.replace(plain, use_4over6=True, e4m3_max=0.0) == chosen


def test_a_value_is_built_once() -> None:
    assert qtensor.quantizer("mxfp8", columnwise=True) is qtensor.quantizer(
        "mxfp8", columnwise=True
    )
    assert qtensor.quantizer("mxfp8") is not qtensor.quantizer("mxfp8", columnwise=True)


def test_options_that_are_equal_but_of_another_type_are_refused_each_time() -> None:
    """``1 == True``, and both have one hash."""
    qtensor.quantizer("mxfp8", columnwise=True)
    for _ in range(2):
        with pytest.raises(qtensor.QTensorError, match=r"columnwise must be a bool; got 1\."):
            qtensor.quantizer("mxfp8", columnwise=1)


def test_an_option_without_a_hash_is_refused_with_the_rule() -> None:
    with pytest.raises(
        qtensor.QTensorError, match=r"columnwise must be a bool; got \[1\]\."
    ) as caught:
        qtensor.quantizer("mxfp8", columnwise=[1])
    assert caught.value.__context__ is None


def test_a_format_that_takes_another_class_is_built_anew() -> None:
    """The class is part of what is remembered, not the format's name alone."""
    kept = dict(codec._CLASSES)
    first = qtensor.quantizer("mxfp8")
    try:
        codec._CLASSES["mxfp8"] = type("Other", (type(first),), {"format": "mxfp8_other"})
        assert type(qtensor.quantizer("mxfp8")).__name__ == "Other"
    finally:
        codec._CLASSES.clear()
        codec._CLASSES.update(kept)
        codec.parse.cache_clear()
    assert qtensor.quantizer("mxfp8") is first
