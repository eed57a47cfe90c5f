"""NVFP4 with a stored factor that decodes (``with_global_scale_inv``), as files hold it."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import Any

import fused_cases
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from adversarial import assert_same_values, mixed
from formats import (
    DTYPES,
    USAGES,
    assert_same_bytes,
    assert_same_tensor,
    dtypes,
    rand,
    shares_memory,
    snapshot,
)
from native_cases import switched_off
from standin import install, pretend
from torch import Tensor

import qtensor
from qtensor.cutlass_gemm import tuning
from qtensor.kernels.cpu import native
from qtensor.kernels.products import cutlass, problem
from qtensor.kernels.products.reading import reading
from qtensor.reference.nvfp4 import decode_factor
from tests.kernels.test_gemm import assert_product, values

OPTIONS: list[dict[str, Any]] = [
    {},
    {"row_scaled": True},
    {"row_scaled": True, "e4m3_max": 256.0, "swizzled": True},
    {"with_2d_quantization": True},
    {"with_2d_quantization": True, "e4m3_max": 256.0},
    {"with_rht": True},
    {"with_rht": True, "rht_side": "rowwise"},
    {"swizzled": True},
    {"use_4over6": True},
]
FACTORS = [
    2.0**-9 * 1.2345,
    3.3e-38,
    1e-42,
    1e-45,
    1e30,
    3e38,
    0.0,
    -0.7,
    float("inf"),
    float("nan"),
]


def stored(x: Tensor, **options: Any) -> Any:
    """A tensor whose stored factors are no quotients of its maxima."""
    q = qtensor.quantize(x, "nvfp4", with_global_scale_inv=True, **options)
    for name in factor_names(q):
        factor = getattr(q, name)
        factor.mul_(torch.linspace(1.7, 0.9, factor.numel()))
        assert not torch.equal(factor, quotient_of(q, name))
    return q


def factor_names(q: Any) -> list[str]:
    return [slot.name for slot in q.quantizer.slots if slot.name.endswith("_global_scale_inv")]


def amax_name(factor_name: str) -> str:
    return "_amax_" + factor_name.split("_")[1]


def quotient_of(q: Any, factor_name: str) -> Tensor:
    amax = getattr(q, amax_name(factor_name)).numpy()
    return torch.from_numpy(amax / np.float32(6 * q.quantizer.e4m3_max))


def decoded_by_oracle(q: Any) -> np.ndarray:
    """The oracle's values of the direction that ``q.dequantize()`` reads."""
    options = dict(q.quantizer.changed_options())
    turned = options.pop("columnwise_value", False) or not q.quantizer.rowwise
    options = {k: v for k, v in options.items() if k not in ("rowwise", "columnwise")}
    side = "_columnwise" if turned else "_rowwise"
    held = {s.name: getattr(q, s.name).numpy() for s in q.quantizer.slots if side[1:] in s.name}
    options["e4m3_max"] = q.quantizer.e4m3_max
    shape = tuple(q.shape)
    rht_side = options.pop("rht_side", "columnwise")
    if options.get("with_rht") and f"_{rht_side}" != side:
        options["with_rht"] = False
    if options.get("with_rht") and side == "_rowwise":
        # The oracle knows rotated data as the columnwise ones of the transpose.
        held = {name.replace("rowwise", "columnwise"): b for name, b in held.items()}
        return oracle.dequantize(held, "nvfp4", shape[::-1], **options).T
    return oracle.dequantize(held, "nvfp4", shape, **options)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with switched_off() if request.param == "reference" else contextlib.nullcontext():
        yield request.param


# ---- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@dtypes
def test_the_stored_factor_decodes(options: dict[str, Any], dtype: torch.dtype, kernels: str):
    for (rowwise, columnwise), shape in itertools.product(USAGES, [(66, 69), (160, 256)]):
        q = stored(mixed(shape, dtype), rowwise=rowwise, columnwise=columnwise, **options)
        want = torch.from_numpy(decoded_by_oracle(q).copy())
        assert_same_values(q.dequantize(torch.float32), want.numpy())
        assert_same_values(q.dequantize(dtype), want.to(dtype).float().numpy())
        assert_same_values(q.t().dequantize(torch.float32), want.T.numpy())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("columnwise", [False, True])
def test_factors_that_no_amax_gives(factor: float, columnwise: bool):
    """Kernels may not rely on factors between 0 and FLT_MAX / 1536."""
    for options in ({}, {"row_scaled": True}, {"with_rht": True}):
        usage = {"rowwise": not columnwise, "columnwise": columnwise}
        q = stored(mixed((130, 264), torch.float32), **usage, **options)
        for name in factor_names(q):
            getattr(q, name).fill_(factor)
        with np.errstate(all="ignore"):
            want = torch.from_numpy(decoded_by_oracle(q).copy())
        for dtype in DTYPES:
            assert_same_values(q.dequantize(dtype), want.to(dtype).float().numpy())


def test_without_the_option_nothing_changes():
    for options in OPTIONS:
        x = rand(66, 80)
        plain = qtensor.quantize(x, "nvfp4", columnwise=True, **options)
        q = qtensor.quantize(x, "nvfp4", columnwise=True, with_global_scale_inv=True, **options)
        for slot in plain.quantizer.slots:
            assert_same_bytes(getattr(q, slot.name), getattr(plain, slot.name), slot.name)
        assert_same_bytes(q.dequantize(), plain.dequantize())
        assert plain.quantizer._describe_buffers((66, 80)).keys().isdisjoint(factor_names(q))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_quantizing_writes_the_quotient_of_the_amax(options: dict[str, Any], kernels: str):
    quantizer = qtensor.quantizer("nvfp4", columnwise=True, with_global_scale_inv=True, **options)
    for turn, shape in itertools.product(range(3), [(32, 64), (33, 20), (0, 16)]):
        q = quantizer(rand(*shape, seed=turn) * 3)
        for name in factor_names(q):
            assert_same_bytes(getattr(q, name), quotient_of(q, name))


def test_the_tables_name_the_kernels():
    quantizer = qtensor.quantizer("nvfp4", with_global_scale_inv=True)
    if isinstance(native.library(), str):
        pytest.skip(reason="this machine has no native kernels")
    assert qtensor.kernels.explain(quantizer, torch.float32).splitlines()[0].endswith(": native")


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 32), (515, 1030)], ids=["program", "tiles"])
@pytest.mark.parametrize("options", [{}, {"row_scaled": True}, {"e4m3_max": 256.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(shape: tuple[int, int], options: dict[str, Any], dtype: torch.dtype):
    """Weight-only and quantized by quantized, in C++ for small ones, dot products or tiles for
    large ones: products of the values that the stored factors give."""
    w = stored(rand(*shape).to(dtype), **options)
    x = rand(13, shape[1], seed=1).to(dtype)
    q = stored(x, **options)
    for _ in range(3):
        assert_product(F.linear(x, w), values(x), values(w).T)
        assert_product(qtensor.gemm(q, w, "TN", dtype=torch.float32), values(q), values(w).T)


@pytest.mark.parametrize("options", [{}, {"row_scaled": True}, {"with_rht": True}], ids=str)
def test_products_of_columnwise_data(options: dict[str, Any]):
    for layout, contracted in (("NN", 64), ("NT", 48)):
        a = stored(rand(48, 64), rowwise=layout == "NN", columnwise=layout == "NT", **options)
        b = stored(rand(contracted, 32, seed=1), rowwise=False, columnwise=True, **options)
        left = values(a) if layout == "NN" else values(a).T
        for _ in range(3):
            assert_product(qtensor.gemm(a, b, layout, dtype=torch.float32), left, values(b))


def test_a_layer_with_a_stored_factor():
    layer = qtensor.Linear(64, 48, bias=False, recipe=qtensor.recipes.NVFP4BlockScaling())
    w = stored(rand(48, 64))
    layer.weight = torch.nn.Parameter(w, requires_grad=False)
    x = rand(8, 64, seed=2)
    assert_product(layer(x), values(qtensor.quantize(x, "nvfp4")), values(w).T)


def test_a_recipe_with_the_option_trains_like_one_without():
    """Codes are the same, and so are the factors; small layers are answered by C++ otherwise."""

    def factory(role: Any) -> str:
        return "nvfp4"

    def with_factor(role: Any) -> str:
        return "nvfp4(with_global_scale_inv=True)"

    results = []
    for make in (factory, with_factor):
        torch.manual_seed(0)
        layer = qtensor.Linear(64, 48, recipe=qtensor.recipes.CustomRecipe(factory=make))
        for turn in range(4):
            x = rand(32, 64, seed=turn).requires_grad_()
            y = layer(x)
            y.square().sum().backward()
        results.append((y, x.grad, layer.weight.grad))
    for got, want in zip(*results, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.usefixtures("native_kernels", "libraries")
@pytest.mark.parametrize(("capability", "backend"), [((10, 0), "cutlass"), ((9, 0), "dequant")])
@pytest.mark.parametrize("row_scaled", [False, True])
def test_products_of_gpu_backends(
    capability: tuple[int, int], backend: str, row_scaled: bool, monkeypatch: pytest.MonkeyPatch
):
    """Compiled stand-ins for CUTLASS kernels, which apply alpha and factors as those do."""
    pretend(monkeypatch, capability)
    if backend == "cutlass":
        for spec in tuning.select("sm_100f", "nvfp4"):
            install(spec)
    a = stored(rand(64, 256), row_scaled=row_scaled)
    b = stored(rand(128, 256, seed=1), row_scaled=row_scaled)
    plain = qtensor.quantize(rand(128, 256, seed=2), "nvfp4", row_scaled=row_scaled)
    for right in (b, plain):
        got = qtensor.gemm(a, right, "TN", dtype=torch.bfloat16, backend=backend)
        assert_product(got, values(a), values(right).mT)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}, {"e4m3_max": 256.0}])
def test_fused_kernels_write_the_factor(options: dict[str, Any]):
    for usage in USAGES:
        quantizer = qtensor.quantizer(
            "nvfp4", rowwise=usage[0], columnwise=usage[1], with_global_scale_inv=True, **options
        )
        fused_cases.check(rand(96, 128), quantizer, {}, keep=False)


def test_what_gpu_kernels_read():
    """CUTLASS multiplies by the stored number of each operand, and alpha has the divisors."""
    plain = qtensor.quantizer("nvfp4", e4m3_max=256.0)
    with_factor = qtensor.quantizer("nvfp4", with_global_scale_inv=True)
    for left, right, alpha in (
        (plain, plain, 1 / 1536**2),
        (plain, with_factor, 1 / 1536),
        (with_factor, with_factor, 1.0),
    ):
        a, b = problem.sides(
            (left.canonical, (32, 64), torch.uint8), (right.canonical, (16, 64), torch.uint8), "TN"
        )
        assert cutlass.alpha(problem.Problem(a, b, "TN", torch.bfloat16)) == alpha
        q = stored(rand(16, 64)) if right is with_factor else right(rand(16, 64))
        read = reading(b, "nvfp4").scale
        assert read is not None
        assert read(q.buffers()) is q.buffers()[-1]
        assert q.quantizer.slots[-1].name == right.global_buffer("_rowwise")


# ---- ops that keep codes -----------------------------------------------------------------------


def test_views_and_copies_carry_the_factor():
    q = stored(rand(64, 128), columnwise=True)
    row = q._rowwise_global_scale_inv
    assert shares_memory(q.t()._columnwise_global_scale_inv, row)
    only = stored(rand(64, 128))
    want = only.dequantize()
    for view, values_ in (
        (only[16:48], want[16:48]),
        (only[:, 64:128], want[:, 64:128]),
        (only.view(4, 16, 128), want.view(4, 16, 128)),
        (only.view(128, 64), want.view(128, 64)),
        (only[torch.tensor([3, 1])], want[[3, 1]]),
        (torch.cat([only[:32], only[32:]]), want),
        (only.clone(), want),
        (only.detach(), want),
        (only.to(torch.bfloat16), want),
    ):
        assert isinstance(view, qtensor.QuantizedTensor)
        assert_same_bytes(view.dequantize(torch.float32), values_.contiguous())
    rows = stored(rand(64, 128), row_scaled=True)
    assert_same_bytes(rows[16:40].dequantize(), rows.dequantize()[16:40])
    assert_same_bytes(rows.t().dequantize(), rows.dequantize().t())


def test_a_square_block_tensor_derives_the_other_direction():
    q = stored(rand(64, 96), with_2d_quantization=True)
    want = q.dequantize()
    q.update_usage(columnwise=True)
    assert_same_bytes(q._columnwise_global_scale_inv, q._rowwise_global_scale_inv)
    q.update_usage(rowwise=False)
    assert_same_bytes(q.dequantize(), want)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saving_and_assembling(options: dict[str, Any]):
    q = stored(rand(32, 64), columnwise=True, **options)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    assert_same_tensor(torch.load(file, weights_only=True), q)
    assert_same_tensor(q.quantizer.assemble(q.buffers(), q.shape, q.dtype), q)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    assert_same_bytes(bare.dequantize(), q.dequantize())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_copying_into_a_tensor(options: dict[str, Any]):
    """Codes of other values never meet an old factor: ``copy_`` and ``out=`` write the quotient of
    the new amax, and a copy of quantized data copies the factor."""
    x = rand(32, 64, seed=3) * 5
    fresh = qtensor.quantize(x, "nvfp4", columnwise=True, with_global_scale_inv=True, **options)
    for write in (
        lambda q: q.copy_(x),
        lambda q: q.quantizer.quantize(x, out=q),
        lambda q: q.copy_(fresh),
    ):
        q = stored(rand(32, 64), columnwise=True, **options)
        for _ in range(3):
            write(q)
            assert_same_tensor(q, fresh)
        for name in factor_names(q):
            assert_same_bytes(getattr(q, name), quotient_of(q, name))
    other = stored(rand(32, 64), columnwise=True, **options)
    q = snapshot(fresh)
    q.copy_(other)
    assert_same_tensor(q, other)


def test_a_write_into_a_part_keeps_the_factor_of_the_whole():
    q = stored(rand(64, 96))
    before, factor = q.dequantize(), q._rowwise_global_scale_inv.clone()
    q[16:32].copy_(before[16:32] * 0.5)
    assert_same_bytes(q._rowwise_global_scale_inv, factor)
    after = q.dequantize()
    assert_same_bytes(after[:16], before[:16])
    assert_same_bytes(after[32:], before[32:])
    assert not torch.equal(after[16:32], before[16:32])


def test_compiled_code_gives_the_same_bytes():
    def step(x: Tensor, w: Any) -> Any:
        q = qtensor.quantize(x, "nvfp4", with_global_scale_inv=True, columnwise=True)
        return q, w.t(), w.dequantize(), F.linear(x, w)

    w, x = stored(rand(48, 64), columnwise=True), rand(16, 64, seed=4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, w), step(x, w), strict=True):
        if isinstance(want, qtensor.QuantizedTensor):
            assert_same_tensor(got, want)
        else:
            assert_same_bytes(got, want)


# ---- tensors of files --------------------------------------------------------------------------


def file_of(shape: tuple[int, ...], seed: int = 0, rows: bool = False) -> dict[str, Tensor]:
    """Random codes and factors as a file holds them."""
    generator = torch.Generator().manual_seed(seed)
    lines = int(np.prod(shape[:-1]))

    def draw(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator).to(torch.uint8)

    return {
        "codes": draw(256, *shape[:-1], -(-shape[-1] // 2)),
        "scale_inv": draw(0x7F, *shape[:-1], -(-shape[-1] // 16)).view(torch.float8_e4m3fn),
        "global_scale_inv": torch.rand(lines if rows else 1, generator=generator) * 1e-3,
    }


def decode_file(file: dict[str, Tensor], shape: tuple[int, ...]) -> np.ndarray:
    """fl(fl(element * s) * G) in numpy, from the bytes of the file."""
    lines = int(np.prod(shape[:-1]))
    byte = file["codes"].numpy().reshape(lines, -1)
    code = np.stack([byte & 15, byte >> 4], -1).reshape(lines, -1)[:, : shape[-1]]
    magnitude = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
    element = np.where(code & 8, -magnitude, magnitude).astype(np.float32)
    scale = file["scale_inv"].view(torch.uint8).numpy().astype(np.int64).reshape(lines, -1)
    exponent, mantissa = scale >> 3 & 15, scale & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    s = np.repeat(value.astype(np.float32), 16, axis=1)[:, : shape[-1]]
    return (element * s * file["global_scale_inv"].numpy().reshape(-1, 1)).reshape(shape)


@pytest.mark.parametrize(
    "options",
    [{}, {"swizzled": True}, {"row_scaled": True}, {"e4m3_max": 256.0}, {"use_4over6": True}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(64, 96), (3, 33), (2, 5, 48), (129, 17), (1, 2)], ids=str)
def test_from_codes(options: dict[str, Any], shape: tuple[int, ...], kernels: str):
    quantizer = qtensor.quantizer("nvfp4", with_global_scale_inv=True, **options)
    file = file_of(shape, rows=options.get("row_scaled", False))
    q = quantizer.from_codes(**file, dtype=torch.bfloat16, shape=shape)
    assert (tuple(q.shape), q.dtype, q.quantizer) == (shape, torch.bfloat16, quantizer)
    want = decode_file(file, shape)
    assert_same_values(q.dequantize(torch.float32), want)
    rounded = torch.from_numpy(want).bfloat16().float().numpy()
    assert_same_values(q.dequantize(), rounded)
    # Writing back gives the same bytes.
    assert shares_memory(q._rowwise_data, file["codes"])
    assert_same_bytes(q._rowwise_global_scale_inv, file["global_scale_inv"])
    if not options.get("swizzled"):
        lines, blocks = int(np.prod(shape[:-1])), -(-shape[-1] // 16)
        held = q._rowwise_scale_inv[:lines, :blocks].reshape(file["scale_inv"].shape)
        assert_same_bytes(held, file["scale_inv"].view(torch.uint8))


def test_from_codes_infers_the_shape_and_takes_a_scalar():
    file = file_of((32, 64))
    file["global_scale_inv"] = file["global_scale_inv"].reshape(())
    quantizer = qtensor.quantizer("nvfp4", with_global_scale_inv=True)
    q = quantizer.from_codes(**file, dtype=torch.float32)
    assert q.shape == (32, 64)
    assert_same_values(q.dequantize(), decode_file(file, (32, 64)))
    factor = q._rowwise_global_scale_inv
    assert torch.allclose(decode_factor(q._amax_rowwise, 448.0), factor, rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"with_global_scale_inv": False}, {}, "must have with_global_scale_inv=True"),
        ({"columnwise": True}, {}, "must have columnwise=False"),
        ({"with_rht": True}, {}, "must have with_rht=False"),
        ({"with_2d_quantization": True}, {}, "must have with_2d_quantization=False"),
        ({}, {"codes": torch.zeros(32, 32)}, "codes must be torch.uint8; got torch.float32"),
        ({}, {"scale_inv": torch.zeros(32, 4)}, "scale_inv must be torch.float8_e4m3fn or torch.u"),
        ({}, {"scale_inv": torch.zeros(128, 4).byte()}, "scale_inv must have shape (32, 4)"),
        ({}, {"global_scale_inv": torch.ones(32)}, "global_scale_inv must have shape (1,)"),
        ({"row_scaled": True}, {}, "global_scale_inv must have shape (32,)"),
        ({}, {"global_scale_inv": torch.ones(1).bfloat16()}, "must be torch.float32"),
        ({}, {"shape": (32, 65)}, "codes must have shape (32, 33)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_codes_refuses(options: dict[str, Any], change: dict[str, Any], message: str):
    quantizer = qtensor.quantizer("nvfp4", **{"with_global_scale_inv": True, **options})
    with pytest.raises(qtensor.QTensorError) as caught:
        quantizer.from_codes(**{**file_of((32, 64)), "dtype": torch.float32, **change})
    assert message in str(caught.value)
