"""The registry: every format has a row, names are unique, and a new format is two classes and a
quantizer.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from formats import (
    BY_NAME,
    FORMATS,
    USAGES,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    rand,
    shares_memory,
)

import qtensor
from qtensor.core import quantizer_registry as codec
from qtensor.core.formats import E4M3, LEAD, ONE, Buffer, FormatSpec, K
from qtensor.quantizers.base import Quantizer
from qtensor.storage import registry
from qtensor.storage.base import BareStorage
from qtensor.storage.tensor import QuantizedTensor

USAGE_OPTIONS = {"rowwise", "columnwise", "columnwise_value", "rht_side"}
"""Usages, and what transposing sets: not options to be tried one by one."""


def without_a_row() -> list[str]:
    """Registered formats that ``tests/helpers/formats.py`` does not know."""
    return [name for name in qtensor.formats() if name not in BY_NAME]


def test_every_registered_format_has_a_row() -> None:
    assert without_a_row() == []
    assert [case.name for case in FORMATS] == list(BY_NAME)
    assert set(BY_NAME) == set(qtensor.formats())


def test_every_row_lists_every_option() -> None:
    for case in FORMATS:
        options = {field.name for field in dataclasses.fields(case.quantizer())} - USAGE_OPTIONS
        if len(case.quantizer().spec.elements) == 1:
            options -= {"dtype"}
        assert set(case.options) == options, case.name
        for name, values in case.options.items():
            assert getattr(case.quantizer(), name) in (
                values[0],
                case.quantizer()._default(name, values[0]),
            ), name


def test_classes_come_in_pairs() -> None:
    # Other tests of this process may have registered classes of their own.
    classes = {c for c in registry.registered() if c.__module__.startswith("qtensor.")}
    assert len(classes) == 2 * len({case.quantizer().spec for case in FORMATS})
    for case in FORMATS:
        quantizer = case.quantizer()
        tensor_cls, storage_cls = quantizer.tensor_cls, quantizer.storage_cls
        assert {tensor_cls, storage_cls} <= classes
        assert storage_cls.__qualname__ == f"{tensor_cls.__qualname__}Storage"
        assert tensor_cls.spec is storage_cls.spec is quantizer.spec
        assert tensor_cls._FLATTEN_TENSOR_BUFFERS == storage_cls._FLATTEN_TENSOR_BUFFERS
        assert [a for a, _ in tensor_cls._FLATTEN_TENSOR_BUFFERS] == list(quantizer.spec.attributes)
        assert getattr(qtensor, tensor_cls.__qualname__) is tensor_cls
        assert getattr(qtensor, storage_cls.__qualname__) is storage_cls
        assert registry.lookup(tensor_cls.__qualname__) is tensor_cls


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(qtensor.QTensorError, match=r"got 'NoSuch'.*known: .*MXFP8Tensor"):
        registry.lookup("NoSuch")
    with pytest.raises(
        qtensor.QTensorError, match=r"format must be a registered one; got 'fp5'.*mxfp8"
    ):
        qtensor.quantizer("fp5")


def define_toy() -> types.SimpleNamespace:
    """A format of one's own: a spec, two class statements, a quantizer. Eight-bit integers and one
    factor.
    """
    spec = FormatSpec(
        name="toy",
        elements=(E4M3,),
        block=None,
        scale="float32",
        inner=(
            Buffer("_codes", torch.int8, "rowwise", lambda q: (LEAD, K)),
            Buffer("_codes_t", torch.int8, "columnwise", lambda q: (K, LEAD)),
            Buffer("_factor", torch.float32, "both", lambda q: (ONE,)),
        ),
    )

    class ToyTensorStorage(BareStorage, spec=spec):
        __slots__ = spec.attributes

    class ToyTensor(QuantizedTensor, spec=spec):
        pass

    @dataclass(frozen=True, kw_only=True)
    class ToyQuantizer(Quantizer):
        levels: int = 127

        format = "toy"
        tensor_cls = ToyTensor
        storage_cls = ToyTensorStorage

        def encode_(self, out: Any, x: Any, scale: Any, amax: Any, seed: Any) -> None:
            factor = (x.float().abs().amax() / self.levels).clamp_min(2.0**-100)
            codes = (x.float() / factor).round().to(torch.int8)
            out["_factor"].copy_(factor)
            if self.rowwise:
                out["_codes"].copy_(codes)
            if self.columnwise:
                out["_codes_t"].copy_(codes.movedim(-1, 0))

        def decode(self, buffers: Any, shape: Any, columnwise: Any = None) -> torch.Tensor:
            codes = buffers["_codes"] if self.rowwise else buffers["_codes_t"].movedim(0, -1)
            return codes.float() * buffers["_factor"]

    ToyQuantizer.spec = spec
    for cls in (ToyTensorStorage, ToyTensor, ToyQuantizer):
        globals()[cls.__name__] = cls
    return types.SimpleNamespace(
        spec=spec, Tensor=ToyTensor, Storage=ToyTensorStorage, Quantizer=ToyQuantizer
    )


@pytest.fixture(scope="module")
def toy() -> Iterator[FormatCase]:
    """The toy format, forgotten again afterwards."""
    kept = dict(registry._CLASSES), dict(codec._CLASSES)
    define_toy()
    yield FormatCase("toy", 2.0**-8, {"levels": (127, 63)})
    for table, old in zip((registry._CLASSES, codec._CLASSES), kept, strict=True):
        table.clear()
        table.update(old)
    codec.parse.cache_clear()


def test_a_format_without_a_row_is_noticed(toy: FormatCase) -> None:
    assert without_a_row() == ["toy"]


USAGE_KWARGS = [pytest.param({"rowwise": r, "columnwise": c}, id=f"{r:d}{c:d}") for r, c in USAGES]


@pytest.mark.parametrize("usage", USAGE_KWARGS)
@pytest.mark.parametrize("shape", [(5,), (8, 64), (2, 3, 40)], ids=str)
def test_toy_quantizes_copies_and_flattens(
    toy: FormatCase, usage: dict, shape: tuple[int, ...]
) -> None:
    q = toy.quantize(rand(*shape), **usage)
    d = q.dequantize()
    # Half a step of 1/127 of the maximum, and the rounding of the division.
    assert ((d - rand(*shape)).abs() <= rand(*shape).abs().amax() / 254 * (1 + 2**-16)).all()
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    for again in (
        q.clone(),
        q.detach(),
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        torch.load(file, weights_only=True),
        type(q).__tensor_unflatten__(inner, context, q.shape, q.stride()),
        type(q).restore_from_saved(*q.prepare_for_saving()[::-1])[0],
    ):
        assert_same_tensor(again, q)
    assert repr(q).startswith("define_toy.<locals>.ToyTensor(") or repr(q).startswith("ToyTensor(")
    assert q.get_usages() == usage
    proto = qtensor.to_tensor_proto(q)
    assert proto.inner_names() == names
    assert [b.shape for b in proto.create_inner_tensors()] == [b.shape for b in q.buffers()]


@pytest.mark.parametrize("usage", USAGE_KWARGS)
def test_toy_views_and_in_place(toy: FormatCase, usage: dict) -> None:
    q = toy.quantize(rand(8, 64), **usage)
    d = q.dequantize()
    for op in (
        lambda t: t[2:6],
        lambda t: t.narrow(1, 3, 40),
        lambda t: t.view(2, 4, 64),
        lambda t: t.unsqueeze(0),
    ):
        assert_same_bytes(op(q).dequantize(), op(d))
        assert shares_memory(op(q).buffers()[0], q.buffers()[0])
    assert_same_tensor(torch.cat(q.chunk(2)), q)
    assert_same_tensor(torch.cat(q.chunk(2, 1), 1), q)
    assert_same_tensor(q.clone().add_(1), toy.quantize(d + 1, **usage))
    assert type(q + 1) is torch.Tensor
    assert torch.equal(q + 1, d + 1)
    assert torch.equal(torch.zeros_like(q) + 0, torch.zeros(8, 64))
    assert type(torch.empty_like(q)) is type(q)
    with pytest.raises(qtensor.UnsupportedError, match=r"aten.roll.*got toy"):
        torch.roll(q, 1)


def test_toy_products(toy: FormatCase) -> None:
    w, x = toy.quantize(rand(8, 64)), rand(3, 64, seed=1)
    torch.testing.assert_close(
        F.linear(x, w), F.linear(x, w.dequantize()), rtol=2**-18, atol=2**-14
    )
    parameter = torch.nn.Parameter(w)
    F.linear(x, parameter).sum().backward()
    assert type(parameter.grad) is torch.Tensor


def test_toy_options_are_a_value(toy: FormatCase) -> None:
    assert toy.quantizer(levels=63).canonical == "toy(levels=63)"
    assert codec.parse("toy(levels=63)") == toy.quantizer(levels=63) != toy.quantizer()
    with pytest.raises(qtensor.QTensorError, match="levels"):
        toy.quantizer(level=3)


def test_toy_compiles(toy: FormatCase) -> None:
    """In, out, made and decoded inside one graph."""
    quantizer = toy.quantizer(columnwise=True)

    def step(x: torch.Tensor, w: Any) -> tuple[Any, torch.Tensor]:
        y = F.linear(x, w)
        q = quantizer.quantize(y)
        return q, q.dequantize() + w.dequantize().sum()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    w = toy.quantize(rand(8, 64))
    for seed in range(2):
        want, got = step(rand(3, 64, seed=seed), w), compiled(rand(3, 64, seed=seed), w)
        assert_same_tensor(got[0], want[0])
        assert_same_bytes(got[1], want[1])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_taken_class_name_is_refused(toy: FormatCase) -> None:
    before = dict(registry._CLASSES)
    namespace = {"__module__": "elsewhere", "__qualname__": "MXFP8Tensor"}
    with pytest.raises(
        qtensor.QTensorError, match=r"class MXFP8Tensor: names .* unique; got .*elsewhere.*Rename"
    ):
        types.new_class(
            "MXFP8Tensor",
            (QuantizedTensor,),
            {"spec": qtensor.MXFP8Tensor.spec},
            lambda ns: ns.update(namespace),
        )
    assert before == registry._CLASSES


def test_a_taken_format_id_is_refused(toy: FormatCase) -> None:
    before = dict(codec._CLASSES)
    with pytest.raises(
        qtensor.QTensorError,
        match=r"format 'mxfp8': .*one quantizer class; got .*Other.*Choose another",
    ):

        class Other(Quantizer):
            format = "mxfp8"

    with pytest.raises(qtensor.QTensorError, match="needs its own format id"):

        class Nameless(qtensor.MXFP8Quantizer):
            pass

    assert before == codec._CLASSES


@pytest.mark.parametrize("name", ["a|b", "a(b)", "a b", "", "1a", "a-b"])
def test_a_format_id_that_would_break_texts_is_refused(name: str) -> None:
    with pytest.raises(qtensor.QTensorError, match=r"Bad: a format id is made of letters"):

        class Bad(qtensor.Quantizer):
            format = name

    assert name not in qtensor.formats()
