"""Raw ops refuse tensors on different devices, of other sizes or dtypes, and missing seeds."""

import pytest
import torch
import torch.nn.functional as F
from formats import BY_NAME

import qtensor
from qtensor.core.linear_plans import backward_text, forward_text

OPS = torch.ops.qtensor
STOCHASTIC = "nvfp4(stochastic_rounding=True)"


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


# ---- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1])
def test_gemm_refuses_a_meta_operand(position):
    operands = [torch.randn(4, 8), torch.randn(3, 8)]
    operands[position] = operands[position].to("meta")
    with pytest.raises(qtensor.QTensorError, match="on one device; got"):
        qtensor.gemm(*operands, "TN")


def test_gemm_refuses_a_meta_bias():
    with pytest.raises(qtensor.QTensorError, match="cpu and meta"):
        qtensor.gemm(torch.randn(4, 8), torch.randn(3, 8), "TN", bias=meta(3))


def test_linear_refuses_a_meta_bias():
    layer = qtensor.Linear(64, 32)
    layer.bias = torch.nn.Parameter(meta(32))
    refusal = pytest.raises(qtensor.QTensorError, match="one device; got cpu and meta")
    with qtensor.autocast(recipe=qtensor.recipes.MXFP8BlockScaling()), refusal:
        layer(torch.randn(32, 64))


def test_a_quantized_linear_names_the_device_of_the_bias():
    weight = qtensor.quantize(torch.randn(4, 32), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="cpu and meta"):
        F.linear(torch.randn(2, 32), weight, meta(4))


def test_quantize_refuses_a_meta_input_for_a_real_output():
    q = qtensor.quantize(torch.ones(4, 32), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="one device"):
        q.quantizer.quantize(meta(4, 32), out=q)


def test_quantize_refuses_a_meta_noop_flag():
    q = qtensor.quantize(torch.ones(4, 32), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="one device"):
        q.quantizer.quantize(torch.zeros(4, 32), out=q, noop_flag=meta(1))
    assert (q.dequantize() == 1).all()


def test_an_op_on_meta_tensors_alone_answers():
    buffers = OPS.quantize(meta(4, 32), "mxfp8")
    assert all(buffer.is_meta for buffer in buffers)
    assert OPS.dequantize(buffers, "mxfp8", (4, 32), torch.float32).is_meta


def test_counters_on_the_cpu_pass_beside_another_device():
    history = meta(4, 2)
    steps, step = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(qtensor.QTensorError, match="one device"):
        OPS.merged_history(history, steps, torch.zeros(1), step, 4)


# ---- sizes and dtypes --------------------------------------------------------------------------


@pytest.fixture
def weight():
    return qtensor.quantize(torch.randn(1024, 512), "mxfp8")


@pytest.mark.parametrize("rows", [1, 3, 1 << 12])
def test_gemm_refuses_rows_that_its_shape_does_not_name(weight, rows):
    x = torch.randn(rows, 512).bfloat16()
    arguments = weight.buffers(), "mxfp8", (1024, 512), "TN", torch.bfloat16
    with pytest.raises(qtensor.QTensorError, match=r"one tensor of shape \(4, 512\)"):
        OPS.gemm([x], "", (4, 512), *arguments)
    with pytest.raises(qtensor.QTensorError, match="plain operand"):
        OPS.gemm_accumulate_(torch.zeros(4, 1024), [x], "", (4, 512), *arguments[:-1])


def test_grouped_gemm_refuses_rows_that_its_shape_does_not_name(weight):
    x = torch.randn(64, 1 << 12).bfloat16()
    with pytest.raises(qtensor.QTensorError, match="plain operand"):
        OPS.grouped_gemm(
            *([x], "", (64, 512), weight.buffers(), "mxfp8", (1024, 512)),
            *([64], None, 1, "TN", torch.bfloat16),
        )


@pytest.mark.parametrize("name", BY_NAME)
def test_gemm_refuses_buffers_of_another_tensor(name):
    quantizer = qtensor.quantizer(name)
    scale = {"scale": torch.ones(1)} if quantizer.needs_scale else {}
    small, large = (quantizer.quantize(torch.randn(n, 128), **scale) for n in (32, 640))
    x, text = torch.randn(8, 128), quantizer.canonical
    for q, shape in ((small, (640, 128)), (large, (32, 128))):
        with pytest.raises(qtensor.QTensorError, match="must have shape"):
            OPS.gemm([x], "", (8, 128), q.buffers(), text, shape, "TN", torch.float32)
        with pytest.raises(qtensor.QTensorError, match="must have shape"):
            OPS.dequantize(q.buffers(), text, shape, torch.float32)


def test_gemm_reads_the_factors_of_strided_rows():
    """A view of every second row: its factors are not side by side."""
    weight = qtensor.quantize(torch.randn(1024, 512), "fp8_rowwise")
    q = qtensor.quantize(torch.randn(64, 512) * torch.arange(1, 65).unsqueeze(1), "fp8_rowwise")
    codes, factors = (buffer[::2] for buffer in q.buffers())
    text = q.quantizer.canonical
    right = weight.buffers(), text, (1024, 512), "TN", torch.float32
    got = OPS.gemm([codes.contiguous(), factors], text, (32, 512), *right)
    want = OPS.gemm([codes.contiguous(), factors.contiguous()], text, (32, 512), *right)
    assert torch.equal(got, want)


def test_quantize_writes_the_amax_into_a_float_alone():
    quantizer = qtensor.quantizer("fp8_delayed")
    out, memory = quantizer.make_empty((4, 4)).buffers(), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(qtensor.QTensorError, match=r"amax must hold 1 value of torch\.float32"):
        OPS.quantize_(torch.randn(4, 4), "fp8_delayed", [*out, memory[60:61]], torch.ones(1))
    assert not memory.any()


def test_quantize_refuses_buffers_of_another_tensor():
    out = qtensor.quantize(torch.ones(32, 128), "mxfp8").buffers()
    before = [buffer.clone() for buffer in out]
    with pytest.raises(qtensor.QTensorError, match="must have shape"):
        OPS.quantize_(torch.randn(4, 128), "mxfp8", out)
    with pytest.raises(qtensor.QTensorError, match="needs 2 buffers"):
        OPS.quantize_(torch.randn(32, 128), "mxfp8", out[:1])
    assert all(map(torch.equal, out, before))


def test_a_linear_op_keeps_no_buffers_of_another_format():
    """The kernels would write bytes of codes into memory for half as many."""
    x = torch.randn(32, 64)
    plan = forward_text("mxfp8", "mxfp4", "mxfp8", "", torch.float32)
    with pytest.raises(qtensor.QTensorError, match="only buffers of the quantizer"):
        OPS.linear_forward(x, x, None, plan)


# ---- seeds -------------------------------------------------------------------------------------


def calls_without_a_seed():
    x = torch.randn(32, 64)
    out = qtensor.quantizer("nvfp4").make_empty((32, 64)).buffers()
    quantized = (STOCHASTIC, None, None, None)
    return {
        "quantize": lambda: OPS.quantize(x, STOCHASTIC),
        "quantize_": lambda: OPS.quantize_(x, STOCHASTIC, out),
        "grouped_quantize": lambda: OPS.grouped_quantize(x, STOCHASTIC, [16, 16], None, 2),
        "activation_quantize": lambda: OPS.activation_quantize(x, "relu", *quantized),
        "norm_quantize": lambda: OPS.norm_quantize(
            *(x, None, None, "rmsnorm", 1e-5, False, torch.float32), *quantized
        ),
        "linear_forward": lambda: OPS.linear_forward(
            x, x, None, forward_text(STOCHASTIC, "", "nvfp4", "", torch.float32)
        ),
        "linear_backward": lambda: OPS.linear_backward(
            x, [], 0, backward_text(STOCHASTIC, "", "", torch.float32, torch.float32, True)
        ),
    }


@pytest.mark.parametrize("name", calls_without_a_seed())
def test_stochastic_rounding_needs_a_seed(name):
    """More than once: a later call may take another way."""
    call = calls_without_a_seed()[name]
    for _ in range(4):
        with pytest.raises(qtensor.QTensorError, match="stochastic rounding needs a seed"):
            call()


def test_a_call_with_a_seed_teaches_none_without():
    x, seed = torch.randn(32, 64), torch.ones(1, dtype=torch.int64)
    for _ in range(4):
        OPS.quantize(x, STOCHASTIC, None, None, seed)
    with pytest.raises(qtensor.QTensorError, match="needs a seed"):
        OPS.quantize(x, STOCHASTIC)


def test_a_seed_is_one_number():
    x = torch.randn(32, 64)
    for seed in (torch.ones(2, dtype=torch.int64), torch.ones(1), torch.ones(0)):
        with pytest.raises(qtensor.QTensorError, match="seed must hold 1 value"):
            OPS.quantize(x, STOCHASTIC, None, None, seed)


# ---- calls that the fuzz found -----------------------------------------------------------------


def test_a_required_tensor_is_not_none():
    with pytest.raises(TypeError, match="x must be a tensor; got None"):
        OPS.quantize(None, "mxfp8")
    with pytest.raises(TypeError, match="draws must be a tensor"):
        OPS.draw_seeds_(torch.ones(1), None, 2)


def test_dequantize_needs_all_buffers():
    buffers = qtensor.quantize(torch.randn(4, 32), "mxfp4").buffers()
    with pytest.raises(qtensor.QTensorError, match=r"needs 2 buffers: .*; got 1"):
        OPS.dequantize(buffers[:1], "mxfp4", (4, 32), torch.float32)


def test_linear_backward_of_nothing_returns_nothing():
    plan = backward_text("mxfp8", "", "", torch.float32, torch.float32, False)
    for _ in range(4):
        assert OPS.linear_backward(torch.randn(4, 32), [], 16, plan) == []


@pytest.mark.parametrize("p", [-0.5, 1.5, float("inf"), float("nan")])
def test_dropout_refuses_what_is_not_a_probability(p):
    with pytest.raises(qtensor.QTensorError, match="p must be from 0 to 1"):
        OPS.dropout(torch.ones(4), p, torch.ones(1, dtype=torch.int64))


@pytest.mark.parametrize("report", [torch.ones(1, dtype=torch.int64), torch.ones(2)])
def test_the_report_of_gradients_is_two_numbers(report):
    with pytest.raises(qtensor.QTensorError, match=r"report must hold 2 values of torch.int64"):
        OPS.report_accumulated_(report)


def test_split_sizes_of_meta_tensors_are_meta():
    """A tensor on the CPU would hold memory that nothing wrote."""
    assert OPS.split_sizes(meta(2, dtype=torch.int64), 7, "layer").is_meta


def test_the_number_of_groups_is_checked_before_memory_is_taken():
    """One output for each of 2^62 groups filled all memory."""
    x, many = torch.randn(4, 32), 1 << 62
    splits = torch.tensor([2, 2])
    with pytest.raises(qtensor.QTensorError, match="group sizes"):
        OPS.grouped_bias_grad(x, [], splits, many)
    with pytest.raises(qtensor.QTensorError, match="group sizes"):
        OPS.listed_sizes([2, 2], many, 4, "layer")


def test_grouped_ops_check_their_lists():
    x, buffers = torch.randn(4, 32), OPS.grouped_quantize(torch.randn(4, 32), "mxfp8", [4], None, 1)
    ragged, plain = (buffers[:1], "mxfp8", (4, 32)), ([x], "", (4, 32))
    groups = [4], None, 1
    with pytest.raises(qtensor.QTensorError, match="must have 2 buffers; got 1"):
        OPS.grouped_gemm(*ragged, [x], "", (4, 32), *groups, "TN", torch.float32)
    with pytest.raises(qtensor.QTensorError, match="must be a matrix"):
        OPS.grouped_gemm([x], "", (4,), [x], "", (4, 32), *groups, "TN", torch.float32)
    for biases in ([], [torch.zeros(4)] * 2):
        with pytest.raises(qtensor.QTensorError, match=f"got {len(biases)} biases"):
            OPS.grouped_gemm(*plain, *plain, *groups, "TN", torch.float32, biases)
    with pytest.raises(qtensor.QTensorError, match="wanted must hold indices"):
        OPS.grouped_wgrad(*plain, *plain, *groups, [1], torch.float32)
    with pytest.raises(qtensor.QTensorError, match="must have 2 buffers"):
        OPS.grouped_wgrad_accumulate_([torch.zeros(32, 32)], *plain, *ragged, *groups, [0], [False])


def test_a_grouped_scale_has_a_value_for_each_group():
    with pytest.raises(qtensor.QTensorError, match="scale must be a vector of 2 values"):
        OPS.grouped_quantize(torch.ones(4, 32), "fp8_delayed", [2, 2], None, 2, torch.ones(1))


def test_linear_ops_take_matrices():
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    plan = forward_text("mxfp8", "", "mxfp8", "", torch.float32)
    for pair in ((x[0], weight), (x[0, 0], weight), (x, weight[0])):
        with pytest.raises(qtensor.QTensorError, match="must be matrices"):
            OPS.linear_forward(*pair, None, plan)
    plan = backward_text("mxfp8", "", "", torch.float32, torch.float32, True)
    with pytest.raises(qtensor.QTensorError, match="dy must be a matrix"):
        OPS.linear_backward(torch.randn(16), [], 32, plan)


def test_gemm_of_plain_tensors_needs_both():
    with pytest.raises(TypeError, match="a and b must be tensors"):
        OPS.gemm_tensor(None, torch.ones(2, 2), "TN")


def test_dequantize_takes_no_other_buffers():
    buffers = qtensor.quantize(torch.randn(4, 32), "mxfp4").buffers()
    with pytest.raises(qtensor.QTensorError, match=r"needs 2 buffers: .*; got 3"):
        OPS.dequantize([*buffers, buffers[1]], "mxfp4", (4, 32), torch.float32)
    with pytest.raises(qtensor.QTensorError, match=r"needs 2 buffers: .*; got 4"):
        OPS.dequantize_(buffers * 2, "mxfp4", (4, 32), torch.empty(4, 32))


@pytest.mark.parametrize("rows", [1, 100])
def test_the_bias_of_a_product_is_real(rows):
    weight = qtensor.quantize(torch.randn(16, 32), "mxfp8")
    bias = torch.ones(1, dtype=torch.complex64)
    for _ in range(4):
        with pytest.raises(qtensor.QTensorError, match=r"must be real; got torch\.complex"):
            OPS.weight_gemm(torch.randn(rows, 32), weight.buffers(), "mxfp8", 16, bias)


@pytest.mark.parametrize("name", BY_NAME)
def test_dequantize_needs_a_buffer(name):
    with pytest.raises(qtensor.QTensorError, match=r"has \d buffers; got 0"):
        OPS.dequantize([], name, (4, 32), torch.float32)


def test_accumulate_needs_matrices():
    buffers = qtensor.quantize(torch.randn(32, 48), "mxfp8", columnwise=True).buffers()
    text = "mxfp8(columnwise=True)"
    with pytest.raises(qtensor.QTensorError, match="must be matrices"):
        OPS.gemm_accumulate_(torch.zeros(48, 48), buffers, text, [], buffers, text, (32, 48), "NT")


@pytest.mark.parametrize("factor", [torch.ones(1), torch.ones(2, 1), torch.ones(130)])
def test_rowwise_factors_are_one_for_each_row(factor):
    """The reference resized the buffer of the factors and left most of them unwritten."""
    x = torch.randn(3, 64)
    with pytest.raises(qtensor.QTensorError, match=r"scale must hold 3 values of torch\.float32"):
        OPS.quantize(x, "fp8_rowwise", factor)
    with pytest.raises(qtensor.QTensorError, match="amax must hold 3 values"):
        OPS.quantize(x, "fp8_rowwise", None, [factor])
    with pytest.raises(qtensor.QTensorError, match="scale must hold 3 values"):
        OPS.grouped_quantize(x, "fp8_rowwise", [3], None, 1, torch.ones(1))


@pytest.mark.parametrize("shape", [(3, 1), (3,), (1, 3)])
def test_factors_of_any_shape_serve_rows(shape):
    """Their number decides; (K,) factors of a square matrix must not scale its columns."""
    x, factors = torch.randn(3, 3, dtype=torch.float16), torch.tensor([0.5, 2.0, 8.0])
    want = OPS.quantize(x, "fp8_rowwise", factors.view(3, 1))
    assert torch.equal(want[1].flatten(), factors.reciprocal())
    # The reference serves factors at a stride, which the kernels do not take.
    strided = torch.stack([factors, factors], dim=1)[:, 0].view(shape)
    for given in (factors.view(shape), strided):
        assert all(map(torch.equal, OPS.quantize(x, "fp8_rowwise", given), want))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_maxima_are_those_of_the_format(name):
    x = torch.randn(4, 32)
    for amax in ([torch.ones(2)], [torch.ones(1).double()]):
        with pytest.raises(qtensor.QTensorError, match=r"amax must hold 1 value of torch\.float32"):
            OPS.quantize(x, name, None, amax)
    with pytest.raises(qtensor.QTensorError, match="amax must hold 1 tensor; got 2"):
        OPS.quantize(x, name, None, [torch.ones(1)] * 2)
