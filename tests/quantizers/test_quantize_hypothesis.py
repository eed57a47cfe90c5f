"""Shapes, values and options drawn by hypothesis; the library must agree with the numpy oracle in
every byte.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from adversarial import assert_like_oracle
from formats import DTYPES, FORMATS, USAGES, FormatCase, formats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import qtensor

EXAMPLES = int(os.environ.get("QTENSOR_HYPOTHESIS_EXAMPLES", "300"))
"""Per format, in the wide tier. Raise it for a long search by hand."""
FEW = 40
"""Per format, in the default tier."""
WIDE = pytest.mark.nightly(reason="some examples are in the default tier")

exact = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

SHAPES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 70)), min_size=0, max_size=4).filter(
    lambda shape: math.prod(shape) <= 4096
)
FLOATS = st.one_of(
    st.floats(width=32),
    st.floats(-500, 500, width=32),
    st.sampled_from([
        0.0,
        -0.0,
        1.0,
        6.0,
        7.5,
        28.0,
        448.0,
        57344.0,
        2.0**-126,
        2.0**-149,
        3.4028234663852886e38,
    ]),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A few drawn values tiled over a drawn shape, times a drawn power of two a row, times noise if
    drawn.
    """
    shape = tuple(draw(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    values = draw(st.lists(FLOATS, min_size=1, max_size=40))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = np.resize(np.array(values, np.float64), shape)
    if draw(st.booleans()):
        x = random.permutation(x.reshape(-1)).reshape(shape)
    if draw(st.booleans()):
        x = x * random.standard_normal(shape)
    if draw(st.booleans()) and shape:
        x = x * 2.0 ** random.integers(-20, 21, (*shape[:-1], 1))
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x, np.float32)).reshape(shape).to(dtype)


@st.composite
def options_of(draw: st.DrawFn, case: FormatCase) -> dict[str, Any]:
    """Usages and a legal combination of options; ``amax_epsilon`` is any number."""
    chosen = {name: draw(st.sampled_from(values)) for name, values in case.options.items()}
    if "amax_epsilon" in chosen and draw(st.booleans()):
        chosen["amax_epsilon"] = draw(st.floats(0, 1e6, width=32))
    rowwise, columnwise = draw(st.sampled_from(USAGES))
    chosen |= {"rowwise": rowwise, "columnwise": columnwise}
    while True:
        try:
            case.quantizer(**chosen)
        except qtensor.QTensorError:
            # Options that exclude each other: give up one of those that are on.
            on = [name for name, values in case.options.items() if chosen[name] != values[0]]
            name = draw(st.sampled_from(on))
            chosen[name] = case.options[name][0]
        else:
            return chosen


@pytest.mark.parametrize("examples", [FEW, pytest.param(EXAMPLES, marks=WIDE, id="all")])
@formats
def test_any_tensor_any_options(case: FormatCase, examples: int) -> None:
    ran = 0

    @settings(exact, max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal ran
        x, options = data.draw(tensors()), data.draw(options_of(case))
        assert_like_oracle(x, case, data.draw(st.integers(-(2**63), 2**63 - 1)), **options)
        ran += 1

    check()
    assert ran >= examples


@formats
def test_representable_values_are_kept(case: FormatCase) -> None:
    """Each block holds the element's largest value times a power of two, half of it, and zeros:
    nothing is lost.
    """
    largest = case.quantizer().element.max

    @settings(exact, max_examples=20)
    @given(st.integers(-10, 10), st.integers(0, 2**32 - 1))
    def check(power: int, seed: int) -> None:
        x = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, (16, 128))) * (largest / 2)
        x[:, ::16] = largest
        x = x.float() * 2.0**power
        # 6 / (6 * 448) is no float32, 6 / (6 * 256) is.
        call = {"scale": torch.tensor([2.0**-power])} if case.name == "fp8_delayed" else {}
        call = {"e4m3_max": 256.0} if case.name == "nvfp4" else call
        assert torch.equal(qtensor.quantize(x, case.name, **call).dequantize(), x)

    check()


def test_options_are_reachable() -> None:
    """The strategy reaches every value of every option."""
    seen: dict[str, set[Any]] = {}

    @settings(exact, max_examples=100)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        for case in FORMATS:
            for name, value in data.draw(options_of(case)).items():
                seen.setdefault(f"{case.name}.{name}", set()).add(value)

    check()
    for case in FORMATS:
        for name, values in case.options.items():
            assert seen[f"{case.name}.{name}"] >= set(values)


def test_a_wrong_option_is_found() -> None:
    """The search tells "rceil" from "floor", so it does compare."""
    floor = qtensor.quantizer("mxfp8", scale_mode="floor")
    case = FormatCase("mxfp8", 2**-4)
    object.__setattr__(case, "quantizer", lambda **options: floor)

    @settings(exact, max_examples=100, report_multiple_bugs=False)
    @given(tensors())
    def check(x: Tensor) -> None:
        assert_like_oracle(x, case)

    with pytest.raises(AssertionError, match="bytes differ"):
        check()
