"""Every view of tiny and empty tensors, in every layout: torch's own result bit for bit, or an
error that names a rule.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from formats import FormatCase, assert_same_bytes, formats, layouts, rand, snapshot, usages
from torch import Tensor

import qtensor

SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (0, 0),
    (0, 4),
    (4, 0),
    (1, 1),
    (2, 0, 3),
    (2, 3, 0),
    (2, 1, 5),
]


def views(shape: tuple[int, ...]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Name and call of each view that may be asked of a tensor of ``shape``; torch refuses some of
    them.
    """
    rank, count = len(shape), math.prod(shape)
    yield "squeeze", lambda t: t.squeeze()
    yield "t", lambda t: t.t()
    yield "permute", lambda t: t.permute(tuple(reversed(range(rank))))
    for dim in range(-rank, rank) if rank else (-1, 0):
        yield f"squeeze {dim}", lambda t, d=dim: t.squeeze(d)
        yield f"transpose {dim}", lambda t, d=dim: t.transpose(d, 0)
    for dim in range(-rank - 1, rank + 1):
        yield f"unsqueeze {dim}", lambda t, d=dim: t.unsqueeze(d)
    yield "flatten", lambda t: t.flatten()
    for first, last in itertools.combinations(range(rank), 2):
        yield f"flatten {first} {last}", lambda t, a=first, b=last: t.flatten(a, b)
        yield f"transpose {first} {last}", lambda t, a=first, b=last: t.transpose(a, b)
    targets = [shape, (-1,), (count, 1), (1, count), (1, 1, count), (2, -1), (-1, 32), (), (5, 0)]
    for target in targets:
        yield f"view {target}", lambda t, s=target: t.view(s)
    yield "reshape", lambda t: t.reshape(-1, 1)
    for dim in range(rank):
        for bounds in ((0, 0), (1, None), (0, -1), (5, 9)):
            at = (*(slice(None),) * dim, slice(*bounds))
            yield f"{dim} {bounds}", lambda t, at=at: t[at]
        yield f"select {dim}", lambda t, d=dim: t.select(d, 0)
        yield f"split {dim}", lambda t, d=dim: t.split(2, d)[-1]
        for sizes in ((-1, 1), (1, shape[dim])):
            yield f"unflatten {dim} {sizes}", lambda t, d=dim, s=sizes: t.unflatten(d, s)


AGAIN: dict[str, Callable[[Any], Any]] = {
    "": lambda t: t,
    "flatten": lambda t: t.flatten(),
    "[0:0]": lambda t: t[0:0],
}
"""What is done to the view: a view has to be as good as a tensor that was quantized."""


@functools.cache
def plain_shape(name: str, again: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that torch gives, None where it refuses."""
    try:
        return tuple(AGAIN[again](dict(views(shape))[name](torch.empty(shape))).shape)
    except (RuntimeError, IndexError):
        return None


def outcome(call: Callable[[], Any], want: Callable[[], Tensor]) -> str:
    """``"exact"``, ``"refused"``, or what is wrong."""
    try:
        got = call().dequantize()
    except qtensor.QTensorError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - any other error is what this looks for
        return repr(error)
    values = want()
    return "exact" if got.shape == values.shape and torch.equal(got, values) else "other values"


@layouts
@usages
def test_every_view(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool
) -> None:
    found: dict[str, list[str]] = {}
    for shape in SHAPES:
        q = case.quantize(rand(*shape), rowwise=rowwise, columnwise=columnwise, **options)
        before, values = snapshot(q), q.dequantize()
        for (name, view), (again, then) in itertools.product(views(shape), AGAIN.items()):
            if plain_shape(name, again, shape) is None or (again and math.prod(shape) > 1):
                continue
            result = outcome(lambda: then(view(q)), lambda: then(view(values)))  # noqa: B023
            found.setdefault(result, []).append(f"{shape} {name} {again}")
        for got, want in zip(q.buffers(), before.buffers(), strict=True):
            assert_same_bytes(got, want)
    wrong = {result: cases for result, cases in found.items() if result not in ("exact", "refused")}
    assert not wrong
    assert len(found["exact"]) > 2 * len(found.get("refused", []))


def test_the_sweep_sees_an_error_and_a_wrong_value() -> None:
    q = qtensor.quantize(rand(2, 32), "mxfp8")

    def broken() -> Any:
        raise RuntimeError("shape '[1]' is invalid")

    assert "is invalid" in outcome(broken, q.dequantize)
    assert outcome(lambda: q, lambda: q.dequantize() * 2) == "other values"
    assert outcome(lambda: q[0], q.dequantize) == "other values"
    assert outcome(lambda: q.narrow(1, 3, 20), q.dequantize) == "refused"
    assert outcome(lambda: q, q.dequantize) == "exact"


def test_a_packed_scalar() -> None:
    """A 0-d tensor keeps a whole packed group: 3 bytes of FP6, 8 of rotated FP4."""
    for name, options in (("mxfp6", {"packed": True}), ("nvfp4", {"with_rht": True})):
        q = qtensor.quantize(rand(1), name, columnwise=True, **options)
        assert q.squeeze().shape == ()
        assert_same_bytes(q.squeeze().dequantize(), q.dequantize().squeeze())
        assert_same_bytes(q.squeeze().view(1).dequantize(), q.dequantize())


def test_rows_without_an_element() -> None:
    """The number of rows changes where nothing is stored but what each row has: factors and their
    padding.
    """
    q = qtensor.quantize(rand(4, 0), "nvfp4", row_scaled=True)
    assert q._amax_rowwise.shape == (4,)
    assert q.flatten()._amax_rowwise.shape == (1,)
    assert q.flatten().dequantize().shape == (0,)
    q = qtensor.quantize(rand(4, 0), "mxfp6", packed=True)
    assert q[0:0].flatten().dequantize().shape == (0,)


@formats
def test_writing_into_nothing_changes_nothing(case: FormatCase) -> None:
    """As in torch: an empty part takes an empty write, and the factors of the whole stay."""
    q = case.quantize(rand(8, 128))
    before = snapshot(q)
    for part in (q[0:0], q[0:0].flatten(), q[8:].view(128, 0), q[:, 128:]):
        part.copy_(torch.empty(part.shape))
        part.mul_(2)
    for got, want in zip(q.buffers(), before.buffers(), strict=True):
        assert_same_bytes(got, want)
