"""Ops outside the tables: an error that names the op, the format and the way out; nothing
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from formats import (
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    rand,
    refusal,
    snapshot,
)

import qtensor
from qtensor.storage.ops.decoded import DEQUANTIZE_OPS, IN_PLACE_OPS
from qtensor.storage.ops.dispatch import classify
from qtensor.storage.ops.table import COMPUTE, PRESERVE

Op = Callable[[Any], Any]

REFUSED: dict[str, tuple[str, Op]] = {
    "roll": ("aten.roll", lambda q: torch.roll(q, 1)),
    "flip": ("aten.flip", lambda q: q.flip(0)),
    "repeat": ("aten.repeat", lambda q: q.repeat(2, 1)),
    "stack": ("aten.stack", lambda q: torch.stack([q, q])),
    "gather": ("aten.gather", lambda q: q.gather(0, torch.zeros(1, 1, dtype=torch.long))),
    "scatter": ("aten.scatter", lambda q: q.scatter(0, torch.zeros(1, 1, dtype=torch.long), 1.0)),
    "tril": ("aten.tril", lambda q: q.tril()),
    "cumprod": ("aten.cumprod", lambda q: q.cumprod(0)),
    "max_pool1d": ("aten.max_pool2d_with_indices", lambda q: F.max_pool1d(q, 2)),
    "lu": ("aten.linalg_lu_factor_ex", lambda q: torch.linalg.lu_factor(q)),
    "to_sparse": ("aten._to_sparse", lambda q: q.to_sparse()),
    "floor_": ("aten.floor_", lambda q: q.floor_()),
    "resize_": ("aten.resize_", lambda q: q.resize_(3)),
    "set_": ("aten.set_", lambda q: q.set_(torch.ones(3))),
    "unsqueeze_": ("aten.unsqueeze_", lambda q: q.unsqueeze_(0)),
}


@pytest.mark.parametrize("name", REFUSED)
@formats
def test_refused_ops_name_op_format_and_fix(case: FormatCase, name: str) -> None:
    q = case.quantize(rand(8, 64))
    before = snapshot(q)
    op, call = REFUSED[name]
    with pytest.raises(
        qtensor.UnsupportedError, match=rf"^{op}.*: .*got {case.name}.*\.dequantize\(\)"
    ) as caught:
        call(q)
    assert isinstance(caught.value, qtensor.QTensorError | NotImplementedError)
    assert_same_tensor(q, before)


@formats
def test_a_quantized_source_of_a_refused_write(case: FormatCase) -> None:
    """A plain destination stays as it is."""
    q, plain = case.quantize(rand(8, 64)), torch.zeros(8, 64)
    with pytest.raises(qtensor.UnsupportedError, match=r"aten\.scatter_"):
        plain.scatter_(0, torch.zeros(8, 64, dtype=torch.long), q)
    assert torch.equal(plain, torch.zeros(8, 64))


@formats
def test_expand(case: FormatCase) -> None:
    """To its own sizes it is the tensor; a repetition has the repeated values or is refused."""
    q = case.quantize(rand(8, 64))
    assert_same_tensor(q.expand(8, 64), q)
    assert_same_tensor(q.expand(-1, 64), q)
    assert_same_tensor(q.expand_as(torch.empty(8, 64)), q)
    for sizes in ((2, 8, 64), (3, 1, 8, 64)):
        refused = refusal(lambda s=sizes: q.expand(s))
        if refused:
            assert refused.startswith(f"expand[{case.name}]: ")
        else:
            repeated = q.expand(sizes)
            values = repeated.dequantize() if isinstance(repeated, type(q)) else repeated
            assert_same_bytes(values.contiguous(), q.dequantize().expand(sizes).contiguous())
    with pytest.raises((RuntimeError, ValueError), match=r"expand"):
        q.expand(3, 64)


@formats
def test_access_to_memory_is_refused(case: FormatCase) -> None:
    """There is no memory of the nominal dtype to hand out."""
    q = case.quantize(rand(8, 64))
    for name, access in {
        "dlpack": q.__dlpack__,
        "data_ptr": q.data_ptr,
        "storage": q.storage,
    }.items():
        rule = rf"{name}\[{case.name}\]: .*not one block of memory.*buffers\(\)"
        with pytest.raises(qtensor.UnsupportedError, match=rule):
            access()
    with pytest.raises(qtensor.UnsupportedError, match=r"apply_\[.*dequantize\(\)"):
        q.apply_(abs)


def test_every_aten_op_is_in_one_class() -> None:
    """The four tables do not overlap, and what is in none of them raises."""
    tables = [set(PRESERVE), set(COMPUTE), set(DEQUANTIZE_OPS), set(IN_PLACE_OPS)]
    assert sum(len(t) for t in tables) == len(set().union(*tables))
    known = set().union(*tables)
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if "aten::" in name
    }
    assert known <= names, sorted(known - names)
    for name in sorted(names - known)[:200]:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            assert {classify(getattr(packet, o)) for o in packet.overloads()} == {"raises"}, name


def test_ops_of_other_libraries_are_refused() -> None:
    q = qtensor.quantize(rand(8, 64), "mxfp8")
    with torch.library._scoped_library("qtensor_test_raises", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        with pytest.raises(
            qtensor.UnsupportedError, match=r"qtensor_test_raises\.twice.*got mxfp8"
        ):
            torch.ops.qtensor_test_raises.twice(q)


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@formats
def test_reductions_are_refused(case: FormatCase, group: Any) -> None:
    """They carry no alias information: a dequantize fallback would return zeros."""
    functional, name = torch.ops._c10d_functional, group.group_name
    q = case.quantize(rand(8, 64))
    before = snapshot(q)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(q),
        lambda: dist.reduce(q, 0),
        lambda: functional.all_reduce(q, "sum", name),
        lambda: functional.reduce_scatter_tensor(q, "sum", 1, name),
    ]
    for call in calls:
        with pytest.raises(
            qtensor.UnsupportedError, match=rf"reduction.*got {case.name}.*all_gather"
        ):
            call()
    assert_same_tensor(q, before)


@formats
def test_collectives_refuse_plain_tensors_beside_quantized_ones(
    case: FormatCase, group: Any
) -> None:
    q, plain = case.quantize(rand(8, 64)), torch.zeros(8, 64)
    before = snapshot(q)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([plain], q),
        lambda: dist.gather(q, [plain], 0),
        lambda: dist.all_to_all_single(plain, q),
        lambda: dist.all_to_all_single(q, plain),
        lambda: dist.scatter(q, [torch.ones(8, 64)], 0),
    ]
    for call in calls:
        with pytest.raises(
            qtensor.QTensorError, match=rf"all tensors of the call must be {case.name}"
        ):
            call()
    assert_same_tensor(q, before)
    assert torch.equal(plain, torch.zeros(8, 64))
