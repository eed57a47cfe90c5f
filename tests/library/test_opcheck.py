"""``torch.library.opcheck`` on every op of the namespace, found by asking the dispatcher for their
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import delayed_cases
import layer_weights_cases
import learned_cases
import pytest
import torch
from attention_cases import MAKERS as ATTENTION_OPS
from attention_cases import attention_samples
from compile_helpers import ordinary, quantizers, seeded
from formats import BY_NAME, FORMATS, FormatCase
from linear_cases import linear_backward, linear_forward
from pointwise_cases import POINTWISE, pointwise
from torch import Tensor

import qtensor
import qtensor.debug  # noqa: F401 - defines the ops of recordings

Sample = tuple[tuple[Any, ...], dict[str, Any]]

UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")
CHECKS = (*UNTRACED, "test_aot_dispatch_dynamic")


def registered() -> list[str]:
    """Every op the dispatcher knows in the namespace, overload included."""
    return sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("qtensor::"))


def overload(name: str) -> Any:
    packet, _, variant = name.removeprefix("qtensor::").partition(".")
    return getattr(getattr(torch.ops.qtensor, packet), variant or "default")


def buffers_of(
    case: FormatCase, q: qtensor.Quantizer, shape: tuple[int, ...], seed: int = 1
) -> list[Tensor]:
    x = ordinary(shape, seed=seed)
    extra = seeded(q, torch.tensor([3]))
    return [b.clone() for b in q.quantize(x, **case.call(), **extra).buffers()]


def live(case: FormatCase, q: qtensor.Quantizer) -> tuple[Tensor | None, Tensor | None]:
    """Scale and seed of a call."""
    return case.call().get("scale"), torch.tensor([3]) if q.stochastic_rounding else None


def quantize(case: FormatCase) -> Iterator[Sample]:
    for q in quantizers(case):
        scale, seed = live(case, q)
        yield (ordinary((33, 40), torch.bfloat16), q.canonical, scale, None, seed), {}
    q = case.quantizer(columnwise=True)
    scale, seed = live(case, q)
    for x in (
        torch.randn(()),
        torch.randn(5),
        torch.randn(2, 1, 40).half(),
        torch.empty(0, 8),
        torch.randn(8, 6).t(),
    ):
        yield (x, q.canonical, scale, None, seed), {}
    if q.amax_shapes((4, 8)):
        x = ordinary((4, 8))
        yield (x, q.canonical), {"scale": scale, "amax": q.amax(x), "seed": seed}


def quantize_(case: FormatCase) -> Iterator[Sample]:
    for q in quantizers(case):
        scale, seed = live(case, q)
        x = ordinary((33, 40), torch.float16)
        yield (x, q.canonical, buffers_of(case, q, (33, 40)), scale, None, seed), {}
    for flag in (torch.zeros(1), torch.ones(1)):
        yield (x, q.canonical, buffers_of(case, q, (33, 40)), scale, None, seed, flag), {}


def amax(case: FormatCase) -> Iterator[Sample]:
    for q in quantizers(case):
        yield (ordinary((33, 40)), q.canonical), {}


def dequantize(case: FormatCase) -> Iterator[Sample]:
    for q in quantizers(case):
        for dtype in (torch.float32, torch.bfloat16):
            yield (buffers_of(case, q, (33, 40)), q.canonical, [33, 40], dtype), {}
    for shape in ((), (7,), (2, 3, 16)):
        yield (buffers_of(case, q, shape), q.canonical, list(shape), torch.float32), {}


def dequantize_(case: FormatCase) -> Iterator[Sample]:
    for args, _ in dequantize(case):
        buffers, name, shape, dtype = args
        yield (buffers, name, shape, torch.empty(shape, dtype=dtype)), {}


def gemm(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer(columnwise=True)
    a, b = (buffers_of(case, q, (32, 48), seed) for seed in (1, 2))
    square = buffers_of(case, q, (48, 48), 3)
    name = q.canonical
    yield (a, name, [32, 48], b, name, [32, 48], "TN", torch.float32), {"bias": torch.randn(32)}
    yield (a, name, [32, 48], square, name, [48, 48], "NN", torch.bfloat16), {}
    yield (a, name, [32, 48], b, name, [32, 48], "NT", torch.float32), {}
    yield ([torch.randn(5, 48)], "", [5, 48], b, name, [32, 48], "TN", torch.float32, None), {}
    yield (a, name, [32, 48], [torch.randn(48, 3)], "", [48, 3], "NN", torch.float32), {}
    plain = (a, name, [32, 48], b, name, [32, 48], "TN", torch.float32, None)
    yield (*plain, "reference"), {}
    yield (*plain, "auto", True), {}


def weight_gemm(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer()
    weight = buffers_of(case, q, (32, 48))
    yield (torch.randn(2, 3, 48).bfloat16(), weight, q.canonical, 32), {}
    yield (torch.randn(48), weight, q.canonical, 32, torch.randn(32)), {}
    yield (torch.randn(5, 32), weight, q.canonical, 48, None, "NN"), {}


def gemm_tensor(case: FormatCase) -> Iterator[Sample]:
    a, b = (case.quantize(ordinary(s), columnwise=True) for s in ((32, 48), (48, 48)))
    x = torch.randn(5, 48)
    yield (x, b, "TN"), {"dtype": torch.bfloat16}
    yield (x, b, "TN", None, torch.randn(48)), {}
    yield (a, b, "NN"), {}
    yield (a, a, "NT", torch.float32), {}
    yield (torch.randn(3, 48), torch.randn(4, 48), "TN"), {}


def random_seed(case: FormatCase) -> Iterator[Sample]:
    yield (torch.randn(3),), {}


def draw_seeds_(case: FormatCase) -> Iterator[Sample]:
    yield (torch.randn(3), torch.zeros(1, dtype=torch.int64), 2), {}


def dequantize_tensor(case: FormatCase) -> Iterator[Sample]:
    yield (case.quantize(ordinary((33, 40)), columnwise=True),), {}
    yield (case.quantize(ordinary((33, 40), torch.bfloat16)), torch.float32), {}
    yield (case.quantize(ordinary((33, 40))).requires_grad_(), torch.float16), {}
    yield (torch.randn(3, 4),), {}
    yield (torch.randn(3, 4, requires_grad=True), torch.bfloat16), {}


def norm(case: FormatCase) -> Iterator[Sample]:
    weight, bias = torch.randn(40), torch.randn(40).bfloat16()
    x = ordinary((33, 40), torch.bfloat16)
    yield (x, weight, bias, "layernorm", 1e-5, False, torch.bfloat16), {}
    yield (x, weight, None, "rmsnorm", 1e-5, True, torch.float32), {}
    yield (torch.randn(40), None, None, "layernorm", 1e-5, False, torch.float16), {}
    yield (torch.empty(0, 40), weight, bias, "rmsnorm", 1e-5, False, torch.float32), {}
    yield (torch.randn(40, 2, 3).permute(1, 2, 0), weight, None, "rmsnorm", 0.0, False, x.dtype), {}


def norm_backward(case: FormatCase) -> Iterator[Sample]:
    weight = torch.randn(40).half()
    for kind in ("layernorm", "rmsnorm"):
        for x in (ordinary((33, 40), torch.bfloat16), torch.randn(40), torch.empty(0, 2, 40)):
            y, mean, rstd = torch.ops.qtensor.norm(x, weight, None, kind, 1e-5, True, x.dtype)
            yield (torch.randn_like(y), x, weight, mean, rstd, kind, True, True), {}
            yield (torch.randn(y.shape), x, None, mean, rstd, kind, False, False), {}


def bias_grad(case: FormatCase) -> Iterator[Sample]:
    for x in (
        torch.randn(70, 5),
        torch.randn(5).half(),
        torch.randn(0, 3),
        torch.randn(4, 6, 2).mT,
    ):
        yield (x,), {}


def activation(case: FormatCase) -> Iterator[Sample]:
    for x in (ordinary((33, 40), torch.bfloat16), torch.randn(8), torch.empty(0, 4)):
        for kind in ("gelu", "relu", "swiglu", "clamped_swiglu(alpha=1.0)"):
            yield (x, kind), {}
    yield (torch.randn(8, 6).t(), "glu"), {}


def activation_backward(case: FormatCase) -> Iterator[Sample]:
    for args, _ in activation(case):
        yield (torch.randn_like(torch.ops.qtensor.activation(*args)), *args), {}


def gemm_accumulate_(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer(columnwise=True)
    a, b = (buffers_of(case, q, (32, 48), seed) for seed in (1, 2))
    operands = (a, q.canonical, [32, 48], b, q.canonical, [32, 48], "NT")
    for overwrite in (False, True):
        yield (torch.randn(48, 48), *operands, overwrite), {}


def postpone_wgrad_(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer(columnwise=True)
    a, b = (buffers_of(case, q, (32, 48), seed) for seed in (1, 2))
    yield (0, a, q.canonical, [32, 48], b, q.canonical, [32, 48]), {}


def report_accumulated_(case: FormatCase) -> Iterator[Sample]:
    yield (torch.tensor([0, 2]),), {}


SIZES = ([20, 0, 13], [33, 0, 0])


def ragged(
    case: FormatCase, q: qtensor.Quantizer, cols: int, sizes: list[int], splits: Tensor | None
) -> list[Tensor]:
    """Flat buffers of three groups."""
    x = ordinary((33, cols), seed=cols)
    scale, seed = live(case, q)
    scales = None if scale is None else scale.expand(3).clone()
    seeds = None if seed is None else torch.tensor([3, 4, 5])
    flat = torch.ops.qtensor.grouped_quantize(x, q.canonical, sizes, splits, 3, scales, seeds)
    return flat[: len(q.slots)]


def groups(case: FormatCase) -> Iterator[tuple[Any, ...]]:
    """sizes, splits, number of groups: as numbers and as a tensor."""
    for sizes in SIZES:
        yield sizes, None, 3
        yield [], torch.tensor(sizes), 3


def listed_sizes(case: FormatCase) -> Iterator[Sample]:
    yield ([3, 0, 5], 3, 8, "layer"), {}


def split_sizes(case: FormatCase) -> Iterator[Sample]:
    yield (torch.tensor([3, 0, 5]), 8, "GroupedLinear"), {}
    yield (torch.tensor([0]), 0, "GroupedLinear[name]"), {}


def same_rows(case: FormatCase) -> Iterator[Sample]:
    yield (torch.ones(3, 5, dtype=torch.uint8), "the rows differ"), {}
    yield (torch.ones(1, 0, dtype=torch.uint8), "the rows differ"), {}


def grouped_quantize(case: FormatCase) -> Iterator[Sample]:
    for q in quantizers(case):
        scale, seed = live(case, q)
        scales = None if scale is None else scale.expand(3).clone()
        seeds = None if seed is None else torch.tensor([3, 4, 5])
        x = ordinary((33, 40), torch.bfloat16)
        yield (x, q.canonical, SIZES[0], None, 3, scales, seeds), {}
    q = case.quantizer(columnwise=True)
    scale, seed = live(case, q)
    scales = None if scale is None else scale.expand(3).clone()
    for call in groups(case):
        yield (x, q.canonical, *call, scales, None), {}
    scales = case.call().get("scale")
    scales = None if scales is None else scales.expand(2).clone()
    yield (torch.empty(0, 8), q.canonical, [0, 0], None, 2, scales, None), {}


def grouped_gemm(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer(columnwise=True)
    name = q.canonical
    weights = [b for seed in (1, 2, 3) for b in buffers_of(case, q, (32, 48), seed)]
    biases = [torch.randn(32) for _ in range(3)]
    for call in groups(case):
        a, dy = (ragged(case, q, cols, *call[:2]) for cols in (48, 32))
        shape = [32, 48]
        yield (a, name, [33, 48], weights, name, shape, *call, "TN", torch.float32, biases), {}
        yield (dy, name, [33, 32], weights, name, shape, *call, "NN", torch.bfloat16), {}
        x = [torch.randn(33, 48)]
        yield (x, "", [33, 48], weights, name, shape, *call, "TN", torch.float32, None), {}


def scaled_grouped_gemm(case: FormatCase) -> Iterator[Sample]:
    q = qtensor.quantizer("fp8_rowwise")
    rows, stack = (q(ordinary(s, torch.float32)).buffers() for s in ((48, 64), (3, 32, 64)))
    offs = torch.tensor([16, 16, 48], dtype=torch.int32)
    right = stack, q.canonical, [3, 32, 64]
    yield (rows, q.canonical, [48, 64], *right, offs, torch.bfloat16), {}


def wgrad_operands(case: FormatCase, call: tuple[Any, ...]) -> tuple[Any, ...]:
    q = case.quantizer(columnwise=True)
    dy, x = (ragged(case, q, cols, *call[:2]) for cols in (32, 48))
    return dy, q.canonical, [33, 32], x, q.canonical, [33, 48], *call


def grouped_wgrad(case: FormatCase) -> Iterator[Sample]:
    for call in groups(case):
        yield (*wgrad_operands(case, call), [0, 1, 2], torch.float32), {}
        yield (*wgrad_operands(case, call), [2], torch.bfloat16), {}


def grouped_wgrad_accumulate_(case: FormatCase) -> Iterator[Sample]:
    for call in groups(case):
        out = [torch.randn(32, 48) for _ in range(2)]
        yield (out, *wgrad_operands(case, call), [0, 2], [False, True]), {}


def postpone_grouped_wgrad_(case: FormatCase) -> Iterator[Sample]:
    for call in groups(case):
        yield (0, *wgrad_operands(case, call)), {}


def grouped_bias_grad(case: FormatCase) -> Iterator[Sample]:
    for call in groups(case):
        yield (torch.randn(33, 5).half(), *call), {}


def norm_quantize(case: FormatCase) -> Iterator[Sample]:
    x, weight = ordinary((33, 40), torch.bfloat16), torch.randn(40)
    for q in (case.quantizer(), case.quantizer(columnwise=True)):
        scale, seed = live(case, q)
        args = (x, weight, None, "layernorm", 1e-5, False, x.dtype, q.canonical)
        yield (*args, scale, None, seed), {}
        yield args, {"scale": scale, "seed": seed, "keep": True}
    yield (x[:0], *args[1:]), {"scale": scale, "seed": seed}


def activation_quantize(case: FormatCase) -> Iterator[Sample]:
    for args, kwargs in norm_quantize(case):
        scale, _, seed = args[8:] if len(args) > 8 else (kwargs["scale"], None, kwargs["seed"])
        rest = {"scale": scale, "seed": seed, "keep": kwargs.get("keep", False)}
        yield (args[0], "swiglu", args[7]), rest
    yield (torch.randn(2, 3, 40), "gelu", args[7]), rest


def record_tensor_(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer()
    number = torch.tensor([-1])
    x = ordinary((33, 40))
    yield ([x], "", [33, 40], "input", q.canonical, number.clone(), number.clone()), {}
    buffers = buffers_of(case, q, (33, 40))
    args = (buffers, q.canonical, [33, 40], "weight", "", number.clone(), number)
    yield args, {"scale": case.call().get("scale")}


def record_groups_(case: FormatCase) -> Iterator[Sample]:
    text, number = case.quantizer().canonical, torch.tensor([-1, -1, -1])
    for call in groups(case):
        rows = ordinary((33, 40))
        yield (rows, "input", text, number, number[:1].clone(), *call), {}
        yield (rows, "output", "", number, number[:1].clone(), *call, torch.ones(3)), {}


SAMPLES: dict[str, Callable[[FormatCase], Iterator[Sample]]] = {
    **{f"qtensor::{name}": attention_samples(name) for name in ATTENTION_OPS},
    **learned_cases.SAMPLES,
    "qtensor::quantize": quantize,
    "qtensor::quantize_": quantize_,
    "qtensor::amax": amax,
    "qtensor::dequantize": dequantize,
    "qtensor::dequantize_": dequantize_,
    "qtensor::gemm": gemm,
    "qtensor::weight_gemm": weight_gemm,
    "qtensor::convolution": layer_weights_cases.convolution,
    "qtensor::used_rows": layer_weights_cases.used_rows,
    "qtensor::gemm_tensor": gemm_tensor,
    "qtensor::linear_forward": linear_forward,
    "qtensor::linear_backward": linear_backward,
    "qtensor::random_seed": random_seed,
    "qtensor::draw_seeds_": draw_seeds_,
    "qtensor::dequantize_tensor": dequantize_tensor,
    "qtensor::gemm_accumulate_": gemm_accumulate_,
    "qtensor::postpone_wgrad_": postpone_wgrad_,
    "qtensor::report_accumulated_": report_accumulated_,
    "qtensor::listed_sizes": listed_sizes,
    "qtensor::split_sizes": split_sizes,
    "qtensor::same_rows": same_rows,
    "qtensor::grouped_quantize": grouped_quantize,
    "qtensor::grouped_gemm": grouped_gemm,
    "qtensor::scaled_grouped_gemm": scaled_grouped_gemm,
    "qtensor::grouped_wgrad": grouped_wgrad,
    "qtensor::grouped_wgrad_accumulate_": grouped_wgrad_accumulate_,
    "qtensor::postpone_grouped_wgrad_": postpone_grouped_wgrad_,
    "qtensor::grouped_bias_grad": grouped_bias_grad,
    "qtensor::merged_history": delayed_cases.merged_history,
    "qtensor::delayed_begin_": delayed_cases.delayed_begin_,
    "qtensor::delayed_read": delayed_cases.delayed_read,
    "qtensor::record_amax_": delayed_cases.record_amax_,
    "qtensor::record_gradient_amax_": delayed_cases.record_gradient_amax_,
    "qtensor::send_gradient_amax_": delayed_cases.send_gradient_amax_,
    "qtensor::advance_step_": delayed_cases.advance_step_,
    "qtensor::record_tensor_": record_tensor_,
    "qtensor::record_groups_": record_groups_,
    "qtensor::begin_recorded_forward_": lambda case: iter([((torch.tensor([-1]),), {})]),
    "qtensor::norm": norm,
    "qtensor::norm_backward": norm_backward,
    "qtensor::bias_grad": bias_grad,
    "qtensor::activation": activation,
    "qtensor::activation_backward": activation_backward,
    "qtensor::norm_quantize": norm_quantize,
    "qtensor::activation_quantize": activation_quantize,
    **{f"qtensor::{name}": pointwise(name) for name in POINTWISE},
}
"""Op -> inputs for a format. An op without a row fails ``test_every_op_has_samples``."""

WITHOUT_FORMAT = {
    f"qtensor::{name}"
    for name in (
        *ATTENTION_OPS,
        "scaled_grouped_gemm",
        "norm",
        "norm_backward",
        "bias_grad",
        "activation",
        "activation_backward",
        "merged_history",
        "delayed_begin_",
        "delayed_read",
        "record_amax_",
        "record_gradient_amax_",
        "send_gradient_amax_",
        "advance_step_",
        "begin_recorded_forward_",
        "draw_seeds_",
        *learned_cases.MAKERS,
        "report_accumulated_",
        "listed_sizes",
        "split_sizes",
        "same_rows",
        "grouped_bias_grad",
        *POINTWISE,
    )
}
"""Ops over plain tensors alone: one format stands for all."""

RANDOM = {"qtensor::random_seed", "qtensor::draw_seeds_"}
"""Ops that draw from a generator: two runs differ, which is what aot_dispatch compares."""
WIDE = pytest.mark.nightly(reason="a trace of each sample")


def test_every_op_has_samples():
    names = registered()
    assert len(names) >= 7
    assert set(names) == set(SAMPLES), "give each op of the namespace a row in SAMPLES"
    assert {n.removeprefix("qtensor::") for n in names} >= {
        n for n in dir(torch.ops.qtensor) if not n.startswith("_")
    } - {"name"}


@pytest.mark.parametrize("traced", [1, pytest.param(999, marks=WIDE)])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name in sorted(SAMPLES)
        for case in (FORMATS[:1] if name in WITHOUT_FORMAT else FORMATS)
    ],
)
def test_opcheck(name: str, case: FormatCase, traced: int):
    """The first ``traced`` samples are traced too."""
    op = overload(name)
    count = 0
    for args, kwargs in SAMPLES[name](case):
        checks = UNTRACED if name in RANDOM or count >= traced else CHECKS
        results = torch.library.opcheck(op, args, kwargs, test_utils=checks)
        assert results == dict.fromkeys(checks, "SUCCESS"), (args[1:], results)
        count += 1
    assert count


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_ops_are_sound(name: str):
    """Plain schemas (AOTInductor and export take nothing else), a fake, and no write that the
    schema hides.
    """
    op = overload(name)
    text = str(op._schema)
    for foreign in ("__torch__", "Any", "PyObject", "Generator"):
        assert foreign not in text
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None
    for args, kwargs in list(SAMPLES[name](BY_NAME["mxfp8"]))[:3]:
        tensors = [
            a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)
        ]
        declared = {
            id(t)
            for argument, value in zip(op._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in torch.utils._pytree.tree_leaves(value)
        }
        tensors = [t for t in tensors if id(t) not in declared]
        before = [b.clone() for a in tensors for b in flat(a)]
        versions = [a._version for a in tensors]
        op(*args, **kwargs)
        after = [b for a in tensors for b in flat(a)]
        same = [torch.equal(u, v) for u, v in zip(before, after, strict=True)]
        assert all(same)
        assert [a._version for a in tensors] == versions


def flat(t: Tensor) -> list[Tensor]:
    return t.buffers() if isinstance(t, qtensor.QuantizedTensor) else [t]
