"""Errors name the operation and its place, whichever layer found them; results of operations have
the agreed form.
"""

import pytest
import torch
from torch import nn

from qtensor import QTensorError, ops
from qtensor.core.errors import UnsupportedError


def rows(*shape):
    return torch.randn(*(shape or (2, 8))).requires_grad_()


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        (ops.GELU(), rows().detach().double(), r"GELU \(operation 1\).*float64"),
        (ops.GELU(), rows(8)[0], r"GELU \(operation 1\) input: it must have a last dim"),
        (ops.SwiGLU(), rows(2, 7), r"SwiGLU \(operation 1\) input: the last dim must be even"),
        (ops.Bias(4), rows(), r"Bias \(operation 1\): bias_add: the bias must have the size"),
        (ops.ConstantScale(2.0), rows(8)[0], r"ConstantScale \(operation 1\): scale: x must"),
        (ops.L2Normalization(), rows(8)[0], r"L2Normalization \(operation 1\): l2_norm: x must"),
        (ops.Dropout(), rows(8)[0], r"Dropout \(operation 1\): dropout: x must"),
    ],
)
def test_refused_inputs_name_the_operation(op, x, message):
    with pytest.raises(QTensorError, match=message):
        ops.Sequential(nn.Identity(), op)(x)


def test_a_fused_step_names_its_operations():
    sequence = ops.Sequential(ops.Linear(8, 7), ops.SwiGLU())
    with pytest.raises(QTensorError, match=r"^SwiGLU \(operation 1\) input") as seen:
        sequence(rows())
    assert seen.value.__cause__ is None


def test_empty_rows_of_l2_normalization():
    x = rows(3, 0)
    out = ops.L2Normalization()(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == (3, 0)


class Right(ops.BasicOperation):
    def op_forward_compute(self, input, *, next_op_input_request=None):
        return input, None

    def op_forward_save_ctx(self, ctx, input, returned):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output, []


class ReturnsATensor(Right):
    def op_forward_compute(self, input, *, next_op_input_request=None):
        return input


class ReturnsNothing(Right):
    def op_forward_compute(self, input, *, next_op_input_request=None):
        return None, None


class GradientAlone(Right):
    def op_backward(self, ctx, grad_output):
        return grad_output


class NoGradient(Right):
    def op_backward(self, ctx, grad_output):
        return None, []


class NoList(Right):
    def op_backward(self, ctx, grad_output):
        return grad_output, None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReturnsATensor, r"its op_forward_compute must return \(the output, .*; got Tensor"),
        (ReturnsNothing, "its forward must return its output; got None"),
        # Two rows: they unpack as a pair would.
        (GradientAlone, r"its op_backward must return \(gradient of the input, .*; got Tensor"),
        (NoGradient, "its backward must return the gradient of its input; got None"),
        (
            NoList,
            "its backward must return a gradient or None for each of its 0 parameters; got No",
        ),
    ],
)
def test_results_of_operations(kind, message):
    sequence = ops.Sequential(ops.Linear(8, 8), kind(), ops.GELU())
    with pytest.raises(QTensorError, match=rf"{kind.__name__} \(operation 1\): {message}"):
        sequence(rows()).sum().backward()


class Tap(ops.BasicOperation):
    num_extra_outputs = 1
    extras = ()
    grads = ([()], [()])

    def fuser_forward_compute(self, input, **kwargs):
        return input, [self.extras], None

    def fuser_forward_save_ctx(self, *args, **kwargs):
        pass

    def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output, *self.grads


class FewGradients(Tap):
    grads = ([()],)


class NoExtraGradients(Tap):
    num_extra_inputs = 1


@pytest.mark.parametrize(
    ("kind", "extras", "message"),
    [
        (Tap, (), "its forward must return 1 extra outputs; got 0"),
        (FewGradients, None, r"its fuser_backward must return \(.*; got tuple of 2"),
        (
            NoExtraGradients,
            None,
            "its fuser_backward must return 1 gradients of its extra inputs; got 0",
        ),
    ],
)
def test_extra_tensors_of_operations(kind, extras, message):
    op, x = kind(), rows()
    op.extras = (x.detach(),) if extras is None else extras
    with pytest.raises(QTensorError, match=rf"{kind.__name__} \(operation 0\): {message}"):
        ops.Sequential(op)(x, *[x] * op.num_extra_inputs)[0].sum().backward()


def forward_hook(op):
    return op.register_forward_hook(lambda *args: None)


def forward_pre_hook(op):
    return op.register_forward_pre_hook(lambda *args: None)


def backward_hook(op):
    return op.register_full_backward_hook(lambda *args: None)


def backward_pre_hook(op):
    return op.register_full_backward_pre_hook(lambda *args: None)


@pytest.mark.parametrize(
    "register", [forward_hook, forward_pre_hook, backward_hook, backward_pre_hook]
)
@pytest.mark.parametrize("inner", [False, True])
def test_hooks_are_not_left_out_silently(register, inner):
    sequence, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), rows()
    op = sequence[0].linear if inner else sequence[0]
    expected = sequence(x)
    handle = register(op)
    with pytest.raises(
        UnsupportedError,
        match=r"Linear \(operation 0\): a sequence does not call operations one by one",
    ):
        sequence(x)
    handle.remove()
    assert torch.equal(sequence(x), expected)


def test_hooks_of_the_sequence_and_of_an_operation_alone_run():
    sequence, alone, calls = ops.Sequential(ops.Linear(8, 8)), ops.Linear(8, 8), []
    for module in (sequence, alone):
        module.register_forward_hook(lambda module, *args: calls.append(module))
        module(rows())
    assert calls == [sequence, alone]
