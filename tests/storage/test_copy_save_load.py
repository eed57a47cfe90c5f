"""Copies, pickles, files, processes, modules: type, bytes, quantizer and Parameter-ness survive."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_process
from formats import (
    BY_NAME,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    requantized,
    shares_memory,
    snapshot,
    usages,
)
from places import DATA
from torch import Tensor, nn

import qtensor
from qtensor.storage.ops import write
from qtensor.storage.serialize import rebuild, reduce

SHAPES = [(), (5,), (0, 64), (33, 130), (2, 3, 40)]


def saved(value: Any, **kwargs: Any) -> Any:
    """``value`` through a file in memory, read with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **kwargs)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle-2": lambda t: pickle.loads(pickle.dumps(t, protocol=2)),
    "deepcopy": copy.deepcopy,
    "save-load": saved,
}


@pytest.mark.parametrize("name", COPIES)
@layouts
@usages
def test_every_layout_survives(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool, name: str
) -> None:
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    for t in (q, q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)):
        copied = COPIES[name](t)
        assert_same_tensor(copied, t)
        assert not any(
            shares_memory(a, b) for a, b in zip(copied.buffers(), t.buffers(), strict=True)
        )
    assert_same_tensor(q, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@formats
def test_every_shape_and_dtype_survives(
    case: FormatCase, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q = case.quantize(rand(*shape, dtype=dtype))
    for function in COPIES.values():
        assert_same_tensor(function(q), q)


@pytest.mark.parametrize("name", COPIES)
@formats
def test_parameters_survive(case: FormatCase, name: str) -> None:
    for requires_grad in (True, False):
        parameter = nn.Parameter(case.quantize(rand(8, 64)), requires_grad=requires_grad)
        copied = COPIES[name](parameter)
        assert isinstance(copied, nn.Parameter)
        assert isinstance(copied, type(parameter))
        assert copied.requires_grad is requires_grad
        assert_same_tensor(copied.detach(), parameter.detach())
    leaf = case.quantize(rand(8, 64)).requires_grad_()
    assert COPIES[name](leaf).requires_grad
    assert not isinstance(COPIES[name](leaf), nn.Parameter)


@formats
def test_shared_references_stay_shared(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    for function in COPIES.values():
        a, b = function([q, q])
        assert a is b or all(
            shares_memory(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True)
        )
    memo: dict[int, Any] = {}
    assert copy.deepcopy(q, memo) is copy.deepcopy(q, memo)


@formats
def test_a_file_of_another_quantizer_or_class_is_refused(
    case: FormatCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(case.quantize(rand(8, 64)))
    name = type(case.quantize(rand(1, 1))).__qualname__.encode()
    with pytest.raises(
        qtensor.QTensorError, match=r"class must be a registered one; got '.*'.*known: "
    ):
        pickle.loads(data.replace(name, b"X" * len(name)))


@formats
def test_map_location_and_mmap(case: FormatCase, tmp_path: Path) -> None:
    q = case.quantize(rand(8, 64))
    path = tmp_path / "q.pt"
    torch.save({"q": q}, path)
    for kwargs in ({"map_location": "cpu"}, {"mmap": True}):
        assert_same_tensor(torch.load(path, weights_only=True, **kwargs)["q"], q)
    on_meta = torch.load(path, weights_only=True, map_location="meta")["q"]
    assert type(on_meta) is type(q)
    assert {b.device.type for b in on_meta.buffers()} == {"meta"}
    assert on_meta.quantizer == q.quantizer


@formats
@usages
def test_nbytes_are_those_of_the_buffers(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    q = case.quantize(rand(256, 256), rowwise=rowwise, columnwise=columnwise)
    want = sum(b.untyped_storage().nbytes() for b in q.buffers())
    assert q.nbytes == want == nn.Parameter(q).nbytes
    assert q.nbytes < rand(256, 256).nbytes / (1.7 if rowwise and columnwise else 3.5)
    file = io.BytesIO()
    torch.save(q, file)
    assert want < file.tell() < want + 6000


@formats
def test_share_memory(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64), columnwise=True)
    before = snapshot(q)
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert all(b.is_shared() for b in q.buffers())
    assert_same_tensor(q, before)


def _child(inbox: Any, outbox: Any) -> None:
    for _ in range(inbox.get()):
        t = inbox.get()
        outbox.put((
            type(t).__qualname__,
            t.quantizer.canonical,
            isinstance(t, nn.Parameter),
            t.detach().dequantize(),
        ))
        with torch.no_grad():
            t.zero_()
        outbox.put("written")
    inbox.get()


def test_a_queue_to_a_spawned_process() -> None:
    """Every format arrives as it is, in shared memory: a write over there is seen here. One process
    for all.
    """
    context = torch_process.SERVER
    inbox, outbox = context.Queue(), context.Queue()
    sent = [case.quantize(rand(8, 64), columnwise=True) for case in BY_NAME.values()]
    sent.append(nn.Parameter(BY_NAME["mxfp8"].quantize(rand(8, 64))))
    process = context.Process(target=_child, args=(inbox, outbox))
    process.start()
    try:
        inbox.put(len(sent))
        for t in sent:
            values = t.dequantize().detach()
            inbox.put(t)
            name, canonical, is_parameter, seen = outbox.get(timeout=120)
            assert (name, canonical) == (type(t).__qualname__, t.quantizer.canonical)
            assert is_parameter == isinstance(t, nn.Parameter)
            assert_same_bytes(seen, values)
            assert outbox.get(timeout=120) == "written"
            assert t.is_shared()
            assert not t.dequantize().any()
        inbox.put("done")
        process.join(timeout=60)
        assert process.exitcode == 0
    finally:
        if process.is_alive():
            process.terminate()


def linear(case: FormatCase, seed: int = 0, **options: Any) -> nn.Linear:
    """A linear layer with a quantized weight."""
    module = nn.Linear(64, 32)
    module.weight = nn.Parameter(case.quantize(rand(32, 64, seed=seed), **options))
    module.bias = nn.Parameter(rand(32, seed=seed + 1))
    return module


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@formats
def test_state_dict_round_trip(case: FormatCase, assign: bool) -> None:
    source, target = linear(case), linear(case, seed=5)
    state = saved(source.state_dict())
    assert_same_tensor(state["weight"], source.weight.detach())
    old = target.weight
    assert not target.load_state_dict(state, assign=assign).missing_keys
    assert_same_tensor(target.weight.detach(), source.weight.detach())
    assert isinstance(target.weight, nn.Parameter)
    assert (target.weight is old) != assign
    x = rand(3, 64, seed=9)
    assert_same_bytes(target(x).detach(), source(x).detach())


@formats
def test_state_dict_onto_a_meta_model_and_from_plain(case: FormatCase) -> None:
    source = linear(case)
    with torch.device("meta"):
        empty = nn.Linear(64, 32)
    empty.load_state_dict(saved(source.state_dict()), assign=True)
    assert_same_tensor(empty.weight.detach(), source.weight.detach())
    plain = nn.Linear(64, 32)
    target = linear(case, seed=5)
    want = requantized(target.weight.detach(), plain.weight.detach())
    target.load_state_dict(plain.state_dict())
    assert_same_tensor(target.weight.detach(), want)
    plain.load_state_dict(source.state_dict())
    assert type(plain.weight) is nn.Parameter
    assert_same_bytes(plain.weight.detach(), source.weight.dequantize().detach())


def test_decoding_into_a_plain_model_is_said_once(monkeypatch) -> None:
    monkeypatch.setattr(write, "_SAID", [])
    source, target = linear(BY_NAME["mxfp8"]), nn.Linear(64, 32)
    with pytest.warns(UserWarning, match=r"of 2560 bytes .* of 8192\. .*assign=True"):
        target.load_state_dict(source.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
        target.load_state_dict(source.state_dict(), assign=True)
    assert_same_tensor(target.weight.detach(), source.weight.detach())


@formats
def test_deepcopy_of_a_module_and_its_optimizer(case: FormatCase) -> None:
    module = linear(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0)
    module(rand(3, 64)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    assert_same_tensor(twin.weight.detach(), module.weight.detach())
    assert not any(
        shares_memory(a, b)
        for a, b in zip(twin.weight.buffers(), module.weight.buffers(), strict=True)
    )
    other = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.0)
    other.load_state_dict(saved(optimizer.state_dict()))
    for m, o in ((module, optimizer), (twin, other)):
        o.zero_grad()
        m(rand(3, 64, seed=2)).square().sum().backward()
        o.step()
    assert_same_tensor(twin.weight.detach(), module.weight.detach())
    assert_same_bytes(twin.bias.detach(), module.bias.detach())


@formats
def test_module_to_dtype_device_and_meta(case: FormatCase) -> None:
    module = linear(case)
    codes = [b.clone() for b in module.weight.buffers()]
    module.to(torch.bfloat16)
    assert module.weight.dtype == module.weight.dequantize().dtype == torch.bfloat16
    for a, b in zip(module.weight.buffers(), codes, strict=True):
        assert_same_bytes(a, b)
    assert module(rand(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    module.to("cpu").cpu().share_memory().requires_grad_(False)
    assert module.weight.is_shared()
    assert isinstance(module.weight, nn.Parameter)
    module.to("meta")
    assert type(module.weight) is case.quantizer().tensor_cls
    assert {b.device.type for b in module.weight.buffers()} == {"meta"}
    module.to_empty(device="cpu")
    assert {b.device.type for b in module.weight.buffers()} == {"cpu"}
    assert [b.shape for b in module.weight.buffers()] == [b.shape for b in codes]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("double", torch.float64),
    ],
)
@formats
def test_module_float_and_the_like_keep_the_codes(
    case: FormatCase, name: str, dtype: torch.dtype
) -> None:
    """A model stays quantized, as it does under ``Module.to(dtype)``."""
    module = linear(case).bfloat16()
    before = snapshot(module.weight.detach())
    getattr(module, name)()
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.dtype == module.bias.dtype == dtype
    assert_same_tensor(module.weight.detach(), before.to(dtype))


def _tag(t: Any) -> Any:
    t.tag = "kept"
    return t


@pytest.mark.parametrize("name", [*COPIES, "copy"])
@formats
def test_attributes_survive_as_those_of_a_parameter_do(case: FormatCase, name: str) -> None:
    """Attributes of one's own; torch's tensors and parameters keep them in copies and pickles."""
    function = {**COPIES, "copy": copy.copy}[name]
    for make in (case.quantize, lambda x: nn.Parameter(case.quantize(x))):
        copied = function(_tag(make(rand(8, 64))))
        assert copied.tag == "kept"
        assert_same_tensor(copied.detach(), make(rand(8, 64)).detach())


def test_a_copy_shares_buffers_and_a_part_keeps_its_origin() -> None:
    q = BY_NAME["fp8"].quantize(rand(8, 64))
    shallow = copy.copy(q)
    assert all(shares_memory(a, b) for a, b in zip(shallow.buffers(), q.buffers(), strict=True))
    assert q[:4]._origin.is_part
    assert not COPIES["pickle"](q[:4])._origin.is_part


class Crafted:
    """A file that names ``rebuild`` with arguments of its own."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, self.arguments


def _float8(**changes: Any) -> dict[str, Tensor]:
    q = qtensor.quantize(rand(64, 64), "fp8_rowwise")
    return {"data": q._data, "scale_inv": q._scale_inv, **changes}


_SCALES = qtensor.quantize(rand(64, 64), "fp8_rowwise")._scale_inv
CRAFTED: dict[str, tuple[Any, ...]] = {
    "float64 factors": (_float8(scale_inv=_SCALES.double()),),
    "sparse codes": (_float8(data=torch.ones(64, 64, dtype=torch.uint8).to_sparse()),),
    "a number": (_float8(scale_inv=7),),
    "a third of the factors": (_float8(scale_inv=_SCALES[:21]),),
    "meta factors": (_float8(scale_inv=_SCALES.to("meta")),),
    "no factors": ({"data": torch.zeros(64, 64, dtype=torch.uint8)},),
    "a list": ([torch.zeros(64, 64, dtype=torch.uint8), _SCALES],),
    "requires grad": (_float8(scale_inv=_SCALES.clone().requires_grad_()),),
    "one buffer too many": (_float8(rowwise_data=_SCALES),),
    "another shape": (_float8(), (64, 128)),
    "a negative shape": (_float8(), (-64, -64)),
    "a shape of texts": (_float8(), ("64", "64")),
    "a number as shape": (_float8(), 4096),
    "an integer dtype": (_float8(), (64, 64), torch.int32),
    "a text as dtype": (_float8(), (64, 64), "float32"),
    "another format": (_float8(), (64, 64), torch.float32, "mxfp8"),
    "no quantizer": (_float8(), (64, 64), torch.float32, 7),
    "another class": (_float8(), (64, 64), torch.float32, "fp8_rowwise", "MXFP8Tensor"),
    "no class": (_float8(), (64, 64), torch.float32, "fp8_rowwise", ["Float8Tensor"]),
    "factors of other rows": (
        {"data": torch.zeros(4096, dtype=torch.uint8), "scale_inv": torch.ones(1)},
        (4096,),
        torch.float32,
        "fp8_rowwise(axis=0)",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_refused(name: str) -> None:
    """Before anything is made: reading such a tensor would read memory outside its buffers."""
    defaults = (_float8(), (64, 64), torch.float32, "fp8_rowwise", "Float8Tensor")
    given = CRAFTED[name]
    buffers, shape, dtype, canonical, cls = (*given, *defaults[len(given) :])
    for class_name in (cls, f"{cls}Storage" if isinstance(cls, str) else cls):
        file = io.BytesIO()
        torch.save(Crafted(class_name, shape, dtype, canonical, buffers, False, False), file)
        file.seek(0)
        with pytest.raises(qtensor.QTensorError, match=r"; got .*\."):
            torch.load(file, weights_only=True)


def test_a_file_without_attributes_still_loads() -> None:
    """Files of earlier versions name seven arguments."""
    q = qtensor.quantize(rand(64, 64), "fp8_rowwise")
    assert_same_tensor(saved(Crafted(*reduce(q)[1][:7])), q)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_of_an_older_version_loads(weights_only: bool) -> None:
    """Version 0.1.0 named ``qtensor.registry.parse``."""
    loaded = torch.load(
        DATA / "pickles" / "tensor_and_quantizer_0_1_0.pt", weights_only=weights_only
    )
    assert loaded["quantizer"] == qtensor.quantizer("nvfp4", columnwise=True)
    values = torch.arange(64.0).reshape(2, 32)
    assert_same_tensor(loaded["tensor"], qtensor.quantize(values, "mxfp4"))


@formats
def test_data_takes_over_the_other_tensor(case: FormatCase) -> None:
    parameter = nn.Parameter(case.quantize(rand(8, 64)))
    other = case.quantize(rand(8, 64, seed=1), columnwise=True)
    parameter.data = other
    assert isinstance(parameter, nn.Parameter)
    assert_same_tensor(parameter.detach(), other)
    assert all(
        shares_memory(a, b) for a, b in zip(parameter.buffers(), other.buffers(), strict=True)
    )
    assert_same_bytes(F.linear(rand(3, 64), parameter).detach(), F.linear(rand(3, 64), other))
    low = other.to(torch.bfloat16)
    parameter.data = low
    assert parameter.dtype == parameter.dequantize().dtype == torch.bfloat16
    for wrong in (case.quantize(rand(4, 64)), torch.ones(4, 64)):
        with pytest.raises(
            qtensor.QTensorError, match=r"data\[.*must be a .* of shape \(8, 64\).*copy_"
        ):
            parameter.data = wrong
    bucket = torch.ones(2 * 8 * 64)
    with pytest.raises(qtensor.UnsupportedError, match=r"data\[.*view of a plain tensor"):
        parameter.data = bucket[512:].view(8, 64)
    assert_same_tensor(parameter.detach(), low)
    parameter.data = bucket[512:].view(8, 64).clone()
    assert type(parameter) is nn.Parameter
    assert_same_bytes(parameter.detach(), torch.ones(8, 64))


@formats
def test_parameters_are_the_subclass(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    parameter = nn.Parameter(q)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, type(q))
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert_same_tensor(parameter.data, q)
    assert all(shares_memory(a, b) for a, b in zip(parameter.buffers(), q.buffers(), strict=True))
    listed = nn.ParameterList([parameter])
    assert listed[0] is parameter
    module = nn.Module()
    module.register_buffer("q", q)
    assert_same_tensor(saved(module.state_dict())["q"], q)
