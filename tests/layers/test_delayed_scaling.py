"""Delayed scaling: which factor a step uses, how the history rolls, margins, callables,
overflow, moves of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
from formats import assert_same_bytes, dtypes
from torch import Tensor, nn

import qtensor
from qtensor.recipes import DelayedScaling

FLT_MAX = np.finfo(np.float32).max


def simulate(
    stream: np.ndarray, length: int, algorithm: str, margin: int, largest: float
) -> list[np.ndarray]:
    """The factor of each step, from the text of docs/numerics.md: ten lines that share nothing with
    the library.
    """
    history, scale, used = (
        [np.zeros(stream.shape[1], np.float32)] * length,
        np.ones(stream.shape[1], np.float32),
        [],
    )
    for amaxes in stream:
        used.append(scale)
        history[0] = np.maximum(history[0], amaxes)
        amax = history[0] if algorithm == "most_recent" else np.max(history, axis=0)
        with np.errstate(all="ignore"):
            new = np.float32(1) / amax * np.float32(largest) / np.float32(2.0**margin)
        new = np.where(np.isposinf(new), FLT_MAX, new)
        scale = np.where((amax > 0) & np.isfinite(amax), new, scale)
        history = (
            [np.zeros_like(amaxes), *history[2:], history[0]]
            if length > 1
            else [np.zeros_like(amaxes)]
        )
    return [*used, scale]


STREAMS = {
    "growing": [[0.5, 3.0], [1.0, 0.25], [17.0, 12.0], [4.0, 1e-3], [100.0, 7.0], [2.0, 2.0]],
    "zeros": [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 5.0]],
    "not_finite": [
        [2.0, 2.0],
        [math.inf, 1.0],
        [1.0, math.nan],
        [3.0, 1.0],
        [3.0, 4.0],
        [1.0, 1.0],
    ],
    "tiny": [
        [1e-45, 1e-38],
        [1e-40, 1e-37],
        [2e-45, 1e-36],
        [1.0, 1.0],
        [1e-44, 3e38],
        [3e38, 1e-45],
    ],
}


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("name", STREAMS)
def test_scales_of_a_run(name: str, algorithm: str, length: int, margin: int, dtype: str) -> None:
    """Against the simulation, and against the oracle step by step; what comes in is left alone."""
    stream = np.array(STREAMS[name], np.float32)
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[dtype]
    want = simulate(stream, length, algorithm, margin, largest)
    history, scale = qtensor.delayed_scaling_state(length, 2)
    for step, amax in enumerate(stream):
        assert_same_bytes(scale, torch.from_numpy(want[step]), f"scale of step {step}")
        assert qtensor.record_amax_(history, torch.from_numpy(amax)) is history
        before = history.clone(), scale.clone()
        got = qtensor.delayed_scaling_update(
            history, scale, algorithm=algorithm, margin=margin, dtype=dtype
        )
        rolled, new = oracle.delayed_update(
            history.numpy(), scale.numpy(), algorithm, margin, dtype
        )
        assert_same_bytes(
            got[0].nan_to_num(-1.0), torch.from_numpy(rolled).nan_to_num(-1.0), "history"
        )
        assert_same_bytes(got[1], torch.from_numpy(new), "scale")
        assert torch.equal(history.nan_to_num(-1.0), before[0].nan_to_num(-1.0))
        assert torch.equal(scale, before[1])
        history, scale = got
    assert_same_bytes(scale, torch.from_numpy(want[-1]), "last scale")
    assert scale.isfinite().all()


def test_fresh_state() -> None:
    history, scale = qtensor.delayed_scaling_state(5, 3)
    assert_same_bytes(history, torch.zeros(5, 3))
    assert_same_bytes(scale, torch.ones(3))


@dtypes
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_a_training_run(dtype: torch.dtype, element: str) -> None:
    """Quantize with the stored factor, record, update: step t uses what the steps before t left."""
    quantizer = qtensor.quantizer("fp8_delayed", dtype=element, columnwise=True)
    history, scale = qtensor.delayed_scaling_state(3, 1)
    for step in range(6):
        x = (torch.randn(5, 40) * 2.0**step).to(dtype)
        used = scale.clone()
        q, amax = quantizer.quantize_with_amax(x, scale=scale)
        assert_same_bytes(amax, x.abs().max().float().reshape(1))
        assert_same_bytes(q._scale_inv, used.reciprocal())
        want = oracle.quantize(
            x.float().numpy(), "fp8_delayed", scale=used.numpy(), dtype=element, columnwise=True
        )
        assert_same_bytes(q._data, torch.from_numpy(want["_data"]))
        assert_same_bytes(q._transpose, torch.from_numpy(want["_transpose"]))
        assert_same_bytes(scale, used)
        qtensor.record_amax_(history, amax)
        assert history[0].item() == amax.item()
        history, scale = qtensor.delayed_scaling_update(history, scale, dtype=element)
        if step:
            # The maxima grow, so the largest is the newest: 448 / amax, but for the rounding of 1 /
            # amax.
            assert scale.item() == pytest.approx(quantizer.element.max / amax.item(), rel=2**-22)


def test_history_rolls() -> None:
    """By -1 along dim 0, row 0 cleared: the newest goes to the end."""
    history = torch.tensor([[5.0], [1.0], [2.0], [3.0]])
    got, _ = qtensor.delayed_scaling_update(history, torch.ones(1))
    assert got.flatten().tolist() == [0.0, 2.0, 3.0, 5.0]


def test_max_and_most_recent_differ() -> None:
    history, scale = torch.tensor([[2.0], [8.0]]), torch.ones(1)
    largest = qtensor.delayed_scaling_update(history, scale, algorithm="max")[1]
    newest = qtensor.delayed_scaling_update(history, scale, algorithm="most_recent")[1]
    assert (largest.item(), newest.item()) == (56.0, 224.0)


@pytest.mark.parametrize(
    "algorithm",
    [lambda h: h.amax(0), lambda h: h[-1], lambda h: h.mean(0)],
    ids=["max", "last", "mean"],
)
def test_callables(algorithm: Callable[[Tensor], Tensor]) -> None:
    history, scale = torch.rand(4, 3), torch.ones(3)
    got = qtensor.delayed_scaling_update(history, scale, algorithm=algorithm, margin=1)
    want = oracle.delayed_update(
        history.numpy(), scale.numpy(), lambda _: algorithm(history).numpy(), 1
    )
    assert_same_bytes(got[0], torch.from_numpy(want[0]))
    assert_same_bytes(got[1], torch.from_numpy(want[1]))


@pytest.mark.parametrize("amax", [0.0, -1.0, math.inf, math.nan])
def test_old_scale_is_kept(amax: float) -> None:
    scale = torch.tensor([3.25, 7.0])
    new = qtensor.delayed_scaling_update(torch.tensor([[amax, 2.0]]), scale)[1]
    assert new.tolist() == [3.25, 224.0]


@pytest.mark.parametrize("margin", [0, 3])
def test_overflowing_scale_is_the_largest_float32(margin: int) -> None:
    new = qtensor.delayed_scaling_update(torch.tensor([[1e-45]]), torch.ones(1), margin=margin)[1]
    assert new.item() == FLT_MAX


def test_amax_of_nan_and_empty_inputs() -> None:
    quantizer, scale = qtensor.quantizer("fp8_delayed"), torch.ones(1)
    assert quantizer.quantize_with_amax(torch.tensor([1.0, math.nan]), scale=scale)[1].isnan().all()
    assert (
        quantizer.quantize_with_amax(torch.tensor([1.0, -math.inf]), scale=scale)[1].item()
        == math.inf
    )
    assert_same_bytes(
        quantizer.quantize_with_amax(torch.zeros(0, 4), scale=scale)[1], torch.zeros(1)
    )


def test_quantize_with_and_without_amax_agree() -> None:
    x, scale = torch.randn(5, 40), torch.tensor([17.5])
    quantizer = qtensor.quantizer("fp8_delayed")
    alone, (with_amax, _) = quantizer(x, scale=scale), quantizer.quantize_with_amax(x, scale=scale)
    assert_same_bytes(alone._data, with_amax._data)
    assert_same_bytes(alone._scale_inv, with_amax._scale_inv)


def test_saturates_under_a_stale_scale() -> None:
    """A factor too large for the data clamps to the largest finite value, never to infinity or
    NaN.
    """
    x = torch.tensor([1.0, -1.0, 1e30, -1e30, 1e-30])
    for element, code in (("e4m3", 0x7E), ("e5m2", 0x7B)):
        q = qtensor.quantize(x, "fp8_delayed", dtype=element, scale=torch.tensor([1e6]))
        assert q._data.tolist() == [code, code | 0x80, code, code | 0x80, 0]


def test_requantizing_keeps_the_scale() -> None:
    """``out=`` without ``scale=`` uses the factor that the tensor holds."""
    x = torch.randn(4, 40)
    q = qtensor.quantize(x, "fp8_delayed", scale=torch.tensor([8.0]))
    q.quantize_(2 * x)
    want = qtensor.quantize(2 * x, "fp8_delayed", scale=torch.tensor([8.0]))
    assert_same_bytes(q._data, want._data)
    assert_same_bytes(q._scale_inv, want._scale_inv)


def test_is_not_requantization_safe() -> None:
    safe = {name: qtensor.quantizer(name).is_requantization_safe() for name in qtensor.formats()}
    assert safe == {name: name != "fp8_delayed" for name in safe}


# ---- the state when its module moves or changes its dtype


def trained(layer: qtensor.Linear) -> qtensor.Linear:
    for _ in range(2):
        layer(torch.randn(16, 32)).sum().backward()
    return layer


MOVES = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "double": lambda layer: layer.double(),
    "to_empty": lambda layer: layer.to_empty(device="cpu"),
    "share_memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_values_stay(move: Callable[[nn.Module], nn.Module]):
    """Not rounded to the parameters' dtype, and not left to chance."""
    layer = trained(qtensor.Linear(32, 16, recipe=DelayedScaling()))
    state = layer._states["weight"].delayed
    before = [t.clone() for t in (state.scale, state.history, state.cell)]
    assert state.history.any()
    move(layer)
    for old, new in zip(before, (state.scale, state.history, state.cell), strict=True):
        assert_same_bytes(new, old)


def test_a_layer_that_was_made_without_data():
    layer = qtensor.Linear(32, 16, recipe=DelayedScaling(), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    state = layer._states["weight"].delayed
    assert_same_bytes(state.scale, torch.ones(3))
    assert not state.history.any()
    assert not state.cell.any()
    trained(layer)


def test_by_way_of_meta():
    """The state, which meta could not hold, stays where it was."""
    layer = trained(qtensor.Linear(32, 16, recipe=DelayedScaling()))
    state = layer._states["weight"].delayed
    scale = state.scale.clone()
    layer.to("meta").to_empty(device="cpu")
    assert_same_bytes(state.scale, scale)
    layer.reset_parameters()
    trained(layer)
