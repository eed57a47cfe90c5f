"""What a CUDA graph could not repeat is refused while one is captured, with the way out."""

from __future__ import annotations

import pytest
import torch

import qtensor
from qtensor.core import devices
from qtensor.library.delayed import DELAYED_BEGIN, MERGED_HISTORY, RECORD_GRADIENT_AMAX
from qtensor.quantizers.call import find_seed

pytestmark = pytest.mark.usefixtures("in_python")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device capture."""
    monkeypatch.setattr(devices, "captured", lambda device: True)


def state(step: int) -> dict[str, torch.Tensor]:
    return {
        "scale": torch.ones(2),
        "history": torch.rand(4, 2),
        "steps": torch.tensor([step, 0]),
        "cell": torch.zeros(1),
        "cell_step": torch.tensor([0]),
    }


def begin(state: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    options = (torch.tensor([step]), True, 4, "max", 0, [448.0, 448.0])
    return DELAYED_BEGIN(*state.values(), *options)[0]


def test_only_a_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert devices.captured(torch.device("cuda", 0))
    assert not devices.captured(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not devices.captured(torch.device("cuda", 0))


@pytest.mark.usefixtures("capture")
def test_delayed_scaling_begins_no_step() -> None:
    """A replay would not count the step, and would move the history up again and again."""
    given = state(step=1)
    before = {name: t.clone() for name, t in given.items()}
    with pytest.raises(qtensor.QTensorError, match=r"counts its steps on the CPU.*current scaling"):
        begin(given, step=2)
    assert all(torch.equal(t, before[name]) for name, t in given.items())
    # Within a step that has begun, nothing is counted.
    assert torch.equal(begin(given, step=1), given["scale"])


@pytest.mark.usefixtures("capture")
def test_delayed_scaling_records_no_gradient() -> None:
    given = state(step=1)
    cell, cell_step = given["cell"], given["cell_step"]
    with pytest.raises(qtensor.QTensorError, match="counts its steps on the CPU"):
        RECORD_GRADIENT_AMAX(cell, cell_step, [torch.ones(1)], torch.tensor([1, 0]))
    assert not cell.any()
    with pytest.raises(qtensor.QTensorError, match="counts its steps on the CPU"):
        MERGED_HISTORY(*list(given.values())[1:], 4)


@pytest.mark.usefixtures("capture")
def test_a_generator_of_another_device_draws_no_seed() -> None:
    quantizer = qtensor.quantizer("nvfp4", stochastic_rounding=True)
    x = torch.empty(16, 32, device="meta")
    with pytest.raises(qtensor.QTensorError, match="the generator must be on meta"):
        find_seed(quantizer, x, torch.Generator())


def test_without_a_capture_nothing_is_refused() -> None:
    begin(state(step=1), step=2)
    quantizer = qtensor.quantizer("nvfp4", stochastic_rounding=True)
    assert find_seed(quantizer, torch.empty(16, 32), torch.Generator()) is not None
