"""A model that fails on an input: the error names the input, and the model is as it was."""

import pytest
import torch
from torch import nn

import qtensor


class Fails(nn.Module):
    """Two layers; draws random numbers, and raises in its call number ``at``."""

    def __init__(self, at=None, error=RuntimeError):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)
        self.at, self.error, self.calls = at, error, 0
        self.first.eval()

    def forward(self, x):
        self.calls += 1
        x = self.first(x + 1e-3 * torch.randn(64))
        if self.calls == self.at:
            raise self.error("no such thing.")
        return self.second(x)


def inputs():
    return [torch.randn(40, 64) for _ in range(3)]


def state_of(model):
    """All that a failed call must leave as it is."""
    return (
        {name: id(parameter) for name, parameter in model.named_parameters()},
        {name: parameter.clone() for name, parameter in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
        torch.random.get_rng_state(),
    )


def assert_state(model, state):
    own, values, training, generator = state
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == own
    assert all(torch.equal(values[name], p) for name, p in model.named_parameters())
    assert {name: module.training for name, module in model.named_modules()} == training
    assert torch.equal(torch.random.get_rng_state(), generator)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)


@pytest.mark.parametrize("rounding", ["weighted_mse", "gptq"])
def test_the_error_names_the_batch(rounding):
    model, batches = Fails(at=2), inputs()
    state = state_of(model)
    match = r"calibration\[1\] failed; got RuntimeError: no such thing\. Check this input"
    with pytest.raises(qtensor.QTensorError, match=match) as caught:
        qtensor.quantize_(model, "mxfp4", rounding=rounding, calibration=batches)
    assert type(caught.value.__cause__) is RuntimeError
    assert_state(model, state)


def test_a_failure_after_the_first_layer():
    """Runs 4 to 6 are for the first layer and end before the failure; it is in the second's."""
    model, whole, batches = Fails(at=8), Fails(), inputs()
    second = model.second.weight
    state = torch.random.get_rng_state()
    with pytest.raises(qtensor.QTensorError, match=r"calibration\[1\] failed"):
        qtensor.quantize_(model, "mxfp4", rounding="gptq", calibration=batches)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(model.first.weight.data) is qtensor.MXFP4Tensor
    assert model.second.weight is second
    assert not model.second._forward_pre_hooks
    assert (model.training, model.first.training) == (True, False)
    # The same call does the rest, with the bytes of a run without a failure.
    for each in (model, whole):
        qtensor.quantize_(each, "mxfp4", rounding="gptq", calibration=batches)
    for one, other in ((model.first, whole.first), (model.second, whole.second)):
        assert torch.equal(one.weight.dequantize(), other.weight.dequantize())


def test_an_input_of_the_wrong_kind():
    model, batches = Fails(), inputs()
    batches[2] = {"y": batches[2]}
    state = state_of(model)
    match = r"calibration\[2\] failed; got TypeError.*dict keyword arguments"
    with pytest.raises(qtensor.QTensorError, match=match):
        qtensor.quantize_(model, "mxfp4", rounding="gptq", calibration=batches)
    assert_state(model, state)


def test_errors_of_this_package_keep_their_class():
    class Integers(Fails):
        def forward(self, x):
            return self.second(self.first(x).long())

    model, batches = Integers(), inputs()
    state = state_of(model)
    with pytest.raises(qtensor.ArgumentTypeError, match="floating tensor") as caught:
        qtensor.quantize_(model, "mxfp4", rounding="gptq", calibration=batches)
    assert caught.value.__notes__ == ["This happened in quantize_, at calibration[0]."]
    assert_state(model, state)


def test_interrupts_are_not_wrapped():
    model, batches = Fails(at=2, error=KeyboardInterrupt), inputs()
    state = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        qtensor.quantize_(model, "mxfp4", rounding="gptq", calibration=batches)
    assert_state(model, state)


@pytest.mark.parametrize("activations", [False, True])
def test_a_search(activations):
    """Runs 1 to 3 give the references; the next ones have one layer quantized."""
    for at, place in ((2, 1), (6, 2)):
        model, batches = Fails(at=at), inputs()
        state = state_of(model)
        with pytest.raises(qtensor.QTensorError, match=rf"inputs\[{place}\] failed"):
            qtensor.search(
                model, batches, budget_bits=20, formats=["mxfp4", None], activations=activations
            )
        assert_state(model, state)


def test_random_numbers_of_a_search():
    """Each measurement draws the same numbers, so that a format that changes nothing loses 0."""
    model, batches = Fails(), inputs()
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.weight.copy_(qtensor.quantize(layer.weight, "mxfp8").dequantize())
    state = torch.random.get_rng_state()
    result = qtensor.search(model, batches, formats=["mxfp8"], budget_bits=10, metric="sqnr")
    assert result.measured < 1e-10
    assert torch.equal(torch.random.get_rng_state(), state)
