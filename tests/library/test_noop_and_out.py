"""Writing into existing tensors: ``out=``, ``update_quantized``, ``quantize_``, ``noop_flag``;
maxima reduced over a group.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adversarial import call_of
from formats import (
    BY_NAME,
    USAGES,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    dtypes,
    formats,
    requantized,
    snapshot,
    usages,
)
from torch import Tensor

import qtensor

FLAGS = [torch.float32, torch.bool, torch.int32, torch.uint8]


def addresses(q: Any) -> list[int]:
    return [buffer.data_ptr() for buffer in q.buffers()]


@formats
@usages
@dtypes
def test_out_gets_the_bytes_of_a_new_tensor(
    case: FormatCase, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> None:
    """In the buffers that are there, whatever they held."""
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    x, y = torch.randn(33, 50).to(dtype), (torch.randn(33, 50) * 50).to(dtype)
    q = case.quantize(x, **usage)
    where = addresses(q)
    assert q.quantizer.quantize(y, out=q, **case.call()) is q
    assert_same_tensor(q, case.quantize(y, **usage))
    assert addresses(q) == where


@formats
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 40), (0, 40), (3, 0)], ids=str)
def test_every_option_into_an_empty_tensor(case: FormatCase, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for options in case.each_option():
        quantizer, call = case.quantizer(columnwise=True, **options), call_of(case, options)
        q = quantizer.make_empty(shape)
        for buffer in q.buffers()[:1]:
            buffer.fill_(0x55)
        quantizer.update_quantized(x, q, **call)
        assert_same_tensor(q, quantizer(x, **call))


@formats
def test_the_four_ways_agree(case: FormatCase) -> None:
    x, y = torch.randn(33, 50), torch.randn(33, 50)
    want = case.quantize(y)
    made = [case.quantize(x) for _ in range(4)]
    made[0].quantizer.quantize(y, out=made[0], **case.call())
    made[1].quantizer.update_quantized(y, made[1])
    made[2].quantize_(y)
    qtensor.quantize(y, case.name, out=made[3])
    for q in made:
        assert_same_tensor(q, want)


@formats
def test_bare_storages_are_written_too(case: FormatCase) -> None:
    x, y = torch.randn(33, 50), torch.randn(33, 50)
    q = case.quantize(x)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    assert bare.quantize_(y) is bare
    assert_same_tensor(q, case.quantize(y))


@formats
@pytest.mark.parametrize("flag", FLAGS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_noop_flag(case: FormatCase, flag: torch.dtype, shape: tuple[int, ...]) -> None:
    """Non-zero: every byte stays; zero: every byte is written."""
    for rowwise, columnwise in USAGES:
        x, y = torch.randn(33, 50), torch.randn(33, 50) * 9
        q = case.quantize(x, rowwise=rowwise, columnwise=columnwise)
        before, where = snapshot(q), addresses(q)
        assert q.quantize_(y, noop_flag=torch.ones(shape, dtype=flag)) is q
        assert_same_tensor(q, before)
        q.quantize_(y, noop_flag=torch.zeros(shape, dtype=flag))
        assert_same_tensor(q, case.quantize(y, rowwise=rowwise, columnwise=columnwise))
        assert addresses(q) == where


@formats
def test_noop_flag_keeps_any_byte(case: FormatCase) -> None:
    """Bytes that no quantization makes, NaN factors and padding included."""
    q = case.quantize(torch.randn(33, 50), columnwise=True)
    for buffer in q.buffers():
        buffer.view(torch.uint8).copy_(
            torch.randint(0, 256, buffer.view(torch.uint8).shape, dtype=torch.uint8)
        )
    before = snapshot(q)
    call = case.call()
    q.quantizer.quantize(torch.randn(33, 50), out=q, noop_flag=torch.tensor([1.0]), **call)
    for a, b in zip(q.buffers(), before.buffers(), strict=True):
        assert_same_bytes(a, b)


@formats
def test_noop_flag_skips_stochastic_and_other_options(case: FormatCase) -> None:
    for options in case.each_option():
        quantizer, call = case.quantizer(columnwise=True, **options), call_of(case, options)
        x, y = torch.randn(33, 50), torch.randn(33, 50)
        q = quantizer(x, **call)
        quantizer.update_quantized(y, q, noop_flag=torch.tensor([1]), **call)
        assert_same_tensor(q, quantizer(x, **call))
        quantizer.update_quantized(y, q, noop_flag=torch.tensor([0]), **call)
        assert_same_tensor(q, quantizer(y, **call))


@formats
def test_a_refused_write_changes_nothing(case: FormatCase) -> None:
    q = case.quantize(torch.randn(33, 50))
    before = snapshot(q)
    other = qtensor.quantizer("mxfp8" if case.name != "mxfp8" else "fp8")
    bad_calls = [
        lambda: q.quantize_(torch.zeros(50, 33)),
        lambda: q.quantize_(torch.zeros(33, 50, dtype=torch.float64)),
        lambda: q.quantize_(torch.zeros(33, 50, dtype=torch.int32)),
        lambda: q.quantize_([[1.0]]),
        lambda: q.quantize_(torch.zeros(33, 50), noop_flag=torch.zeros(2)),
        lambda: q.quantize_(torch.zeros(33, 50), noop_flag=0),
        lambda: q.quantize_(torch.zeros(33, 50), generator=torch.Generator()),
        lambda: other.update_quantized(torch.zeros(33, 50), q),
        lambda: q.quantizer.with_usage(columnwise=True).update_quantized(torch.zeros(33, 50), q),
    ]
    for call in bad_calls:
        with pytest.raises(qtensor.QTensorError):
            call()
        assert_same_tensor(q, before)


@formats
def test_source_keeps_its_gradient_flag_and_out_gets_none(case: FormatCase) -> None:
    x = torch.randn(33, 50, requires_grad=True)
    q = case.quantize(torch.zeros(33, 50))
    q.quantize_(x)
    assert not q.requires_grad
    assert x.requires_grad
    assert all(not buffer.requires_grad for buffer in q.buffers())
    assert_same_tensor(q, case.quantize(x.detach()))


@formats
def test_out_refuses_to_drop_a_gradient(case: FormatCase) -> None:
    """As torch's own ``out=``; every way out that the message names works, and a refused call
    writes nothing.
    """
    x = torch.randn(33, 50, requires_grad=True)
    q, want = case.quantize(torch.zeros(33, 50)), case.quantize(x.detach())
    before = case.quantize(torch.zeros(33, 50))
    message = (
        f"quantize[{case.name}]: out= does not support automatic differentiation; got an input "
        "that "
        "requires grad. Pass x.detach(), call under torch.no_grad(), or drop out=."
    )
    for source in (x, x * 1):
        with pytest.raises(qtensor.QTensorError, match=re.escape(message)):
            qtensor.quantize(source, q.quantizer, out=q, **case.call())
    assert_same_tensor(q, before)
    qtensor.quantize(x.detach(), q.quantizer, out=q, **case.call())
    assert_same_tensor(q, want)
    q.copy_(before)
    with torch.no_grad():
        q.quantizer.quantize(x, out=q, **case.call())
    assert_same_tensor(q, want)


@formats
def test_what_writes_inside_keeps_working(case: FormatCase) -> None:
    """``copy_`` from a leaf that requires grad, and an optimizer's step on a quantized
    parameter.
    """
    x = torch.randn(33, 50, requires_grad=True)
    q = case.quantize(torch.zeros(33, 50))
    with torch.no_grad():
        assert_same_tensor(q.copy_(x), requantized(case.quantize(torch.zeros(33, 50)), x))
    weight = torch.nn.Parameter(case.quantize(x.detach()))
    weight.grad = torch.ones(33, 50)
    before = weight.detach().dequantize()
    torch.optim.SGD([weight], lr=0.5).step()
    assert not torch.equal(weight.detach().dequantize(), before)


# ---- maxima over a process group ---------------------------------------------------------------

# (format, options, dim along which the ranks hold parts): parts are whole blocks, so that only
# tensor-wide factors could differ from those of the whole.
GROUPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fp8": ("fp8", {"columnwise": True}, 0),
    "fp8_pow2": ("fp8", {"dtype": "e5m2", "force_pow_2_scales": True}, 1),
    "fp8_rowwise": ("fp8_rowwise", {}, 1),
    "fp8_columns": ("fp8_rowwise", {"axis": 0, "columnwise": True}, 0),
    "fp8_blockwise": ("fp8_blockwise", {"block_scaling_dim": 2}, 0),
    "mxfp8": ("mxfp8", {"columnwise": True}, 0),
    "mxfp4": ("mxfp4", {"swizzled": True}, 1),
    "nvfp4": ("nvfp4", {"columnwise": True}, 0),
    "nvfp4_2d": ("nvfp4", {"with_2d_quantization": True, "columnwise": True}, 1),
    "nvfp4_rht": ("nvfp4", {"with_rht": True, "columnwise": True}, 0),
    "nvfp4_rows": ("nvfp4", {"row_scaled": True}, 1),
    "nvfp4_columns": ("nvfp4", {"row_scaled": True, "rowwise": False, "columnwise": True}, 0),
    "nvfp4_4over6": ("nvfp4", {"use_4over6": True}, 0),
}
EXTRAS = ["gradient", "out", "nan_first", "nan_second"]


def same_values(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places"
    assert_same_bytes(got.nan_to_num(0.0), want.nan_to_num(0.0).contiguous())


def check_group(rank: int, name: str) -> None:
    """One rank's part against the whole."""
    group = {"amax_reduction_group": dist.group.WORLD}
    torch.manual_seed(0)
    whole = torch.randn(256, 256)
    # Halves along either dim have maxima that differ by more than a power of two.
    whole[:128] *= torch.exp2(torch.arange(256.0) % 7)
    whole[:, :128] *= 8
    fmt, options, dim = GROUPS.get(name, ("fp8", {}, 0))
    part = whole.narrow(dim, 128 * rank, 128)
    if name.startswith("nan"):
        whole[0 if name == "nan_first" else 255, 0] = float("nan")
    if name == "gradient":
        part = part.clone().requires_grad_()
    if name == "out":
        got = qtensor.quantize(torch.zeros(128, 256), fmt)
        qtensor.quantize(part, fmt, out=got, **group)
    else:
        got = qtensor.quantize(part, fmt, **options, **group)
    if fmt in ("fp8", "nvfp4") and not name.startswith("nan"):
        alone = qtensor.quantize(part.detach(), fmt, **options)
        same = all(
            torch.equal(a, b) for a, b in zip(alone.buffers(), got.detach().buffers(), strict=True)
        )
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, same)
        assert not all(gathered), "the group made no difference: the test would pass without it"
    if name == "gradient":
        grad = torch.randn(128, 256)
        got.dequantize().backward(grad)
        assert_same_bytes(part.grad, grad)
    want = qtensor.quantize(whole, fmt, **options)
    same_values(got.detach().dequantize(), want.dequantize().narrow(dim, 128 * rank, 128))
    for slot in want.quantizer.slots:
        if slot.name.startswith("_amax") or (slot.name == "_scale_inv" and fmt == "fp8"):
            assert_same_bytes(getattr(got, slot.name), getattr(want, slot.name), slot.name)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name in [*GROUPS, *EXTRAS]:
        try:
            check_group(rank, name)
        except Exception as error:  # noqa: BLE001 - reported by the test of that name
            results[name] = f"rank {rank}: {type(error).__name__}: {error}"
        dist.barrier()
    left = torch._C._distributed_c10d._get_work_registry_size()
    if left:
        results["every_result_is_waited_for"] = (
            f"rank {rank}: {left} collectives were started and never used"
        )
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def group_failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in two gloo processes, by name."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    # The server of torch_process.py, whose processes have torch.
    torch.multiprocessing.start_processes(worker, (str(folder),), 2, start_method="forkserver")
    return torch.load(folder / "0.pt") | torch.load(folder / "1.pt")


@pytest.mark.parametrize("name", [*GROUPS, *EXTRAS, "every_result_is_waited_for"])
def test_group_maxima_equal_quantizing_the_whole(group_failures: dict[str, str], name: str) -> None:
    """Two gloo processes, each with half of the tensor. A NaN on either rank decides as it does in
    the whole.
    """
    assert group_failures.get(name) is None


def test_group_without_a_process_group() -> None:
    with pytest.raises(
        qtensor.QTensorError,
        match=r"amax_reduction_group needs torch\.distributed; got not initialised",
    ):
        qtensor.quantize(torch.randn(2, 40), "fp8", amax_reduction_group=object())
    assert BY_NAME["mxfp8"].quantizer().amax(torch.ones(3)) == []
