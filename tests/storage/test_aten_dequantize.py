"""The named list: every op in it works on dequantized operands, equals the op on them and returns
plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    rand,
    refusal,
    requantized,
    snapshot,
)
from torch.utils import _pytree as pytree

import qtensor
from qtensor.storage.ops.decoded import DEQUANTIZE_OPS, IN_PLACE_OPS
from qtensor.storage.ops.dispatch import classify

aten = torch.ops.aten
ROW = torch.linspace(0.5, 2.0, 64)


def args_of(name: str, q: Any) -> tuple[Any, ...]:
    """Arguments with which to call ``aten.<name>``; ``q`` is (8, 64)."""
    base = name.removeprefix("_foreach_").rstrip("_")
    if name.startswith("_foreach_"):
        others = {
            "neg": (), "sqrt": (), "abs": (), "norm": (), "reciprocal": (), "max": (), "zero": (),
            "addcmul": ([ROW], [ROW]), "addcdiv": ([ROW], [ROW]),
            "lerp": ([q.dequantize() + 1], 0.5), "copy": ([q],),
            "maximum": ([ROW],), "pow": (2.0,), "clamp_max": (0.5,), "clamp_min": (0.5,), "exp": (),
        }  # fmt: skip
        return ([q], *others.get(base, (2.0,)))
    special: dict[str, Callable[[], tuple[Any, ...]]] = {
        "lerp": lambda: (q, ROW.expand(8, 64), 0.25),
        "addcmul": lambda: (q, q, ROW),
        "addcdiv": lambda: (q, q, ROW),
        "where": lambda: (torch.eye(8, 64) > 0, q, ROW),
        "clamp": lambda: (q, -0.5, 0.5),
        "masked_fill": lambda: (q, torch.eye(8, 64) > 0, 3.0),
        "_softmax": lambda: (q, -1, False),
        "_log_softmax": lambda: (q, -1, False),
        "native_layer_norm": lambda: (q, [64], ROW, ROW, 1e-5),
        "native_dropout": lambda: (q, 0.5, True),
        "mv": lambda: (q, ROW),
        "dot": lambda: (q[0], ROW),
        "vdot": lambda: (q[0], ROW),
        "_local_scalar_dense": lambda: (one(q),),
        "item": lambda: (one(q),),
        "is_nonzero": lambda: (one(q),),
        "topk": lambda: (q, 3),
        "cumsum": lambda: (q, 0),
        "logsumexp": lambda: (q, [1]),
        "quantile": lambda: (q, torch.tensor(0.5)),
        "sum": lambda: (q,),
        "random": lambda: (q,),
        "bincount": lambda: (torch.arange(64), q[0]),
        "histc": lambda: (q, 10),
        "full_like": lambda: (q, 1.5),
        "fill": lambda: (q, 1.5),
        "new_full": lambda: (q, [2, 3], 1.5),
        "new_ones": lambda: (q, [2, 3]),
        "norm": lambda: (q, 2),
        "prod": lambda: (q,),
        "bernoulli": lambda: (q, 0.5),
        "gather": lambda: (q, 0, torch.zeros(1, 1, dtype=torch.long)),
    }
    if base in special:
        return special[base]()
    schema = getattr(aten, name)
    overload = getattr(schema, schema.overloads()[0])
    tensors = [
        a
        for a in overload._schema.arguments
        if str(a.type) == "Tensor" and not a.has_default_value()
    ]
    binary = "Tensor" in schema.overloads() and len(schema.Tensor._schema.arguments) > 1
    second = schema.Tensor._schema.arguments[1] if binary else None
    if len(tensors) > 1 or (second is not None and str(second.type) == "Tensor"):
        return (q, ROW)
    required = [
        a for a in overload._schema.arguments[1:] if not a.has_default_value() and not a.kwarg_only
    ]
    return (q, *[0.5 for _ in required])


def one(q: Any) -> Any:
    """A tensor of one element with the quantizer of ``q``."""
    return requantized(q, torch.tensor(0.75))


def plain(tree: Any) -> Any:
    """Every quantized leaf dequantized."""
    return pytree.tree_map(
        lambda t: t.dequantize() if isinstance(t, qtensor.QuantizedTensor) else t, tree
    )


def assert_same_tree(got: Any, want: Any) -> None:
    leaves, structure = pytree.tree_flatten(got)
    wanted, wanted_structure = pytree.tree_flatten(want)
    assert structure == wanted_structure
    for a, b in zip(leaves, wanted, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert type(a) is torch.Tensor
            assert_same_bytes(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("name", sorted(DEQUANTIZE_OPS))
def test_named_op_equals_the_op_on_values(name: str) -> None:
    for case in FORMATS:
        q = case.quantize(rand(8, 64))
        before = snapshot(q)
        packet, args = getattr(aten, name), args_of(name, q)
        torch.manual_seed(0)
        want = packet(*plain(args))
        torch.manual_seed(0)
        assert_same_tree(packet(*args), want)
        assert_same_tensor(q, before)


# test_fused_optimizers.py calls these four, whose arguments are the state of an optimizer.
FUSED = {f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")}


@pytest.mark.parametrize("name", sorted(IN_PLACE_OPS - FUSED))
def test_named_in_place_op_writes_back(name: str) -> None:
    for case in FORMATS:
        q = case.quantize(rand(8, 64))
        values = q.dequantize()
        packet, args = getattr(aten, name), args_of(name, q)
        rest = plain(args[1:])
        torch.manual_seed(0)
        first = [values] if name.startswith("_foreach_") else values
        packet(first, *rest)
        target = q.clone()
        torch.manual_seed(0)
        result = packet([target] if name.startswith("_foreach_") else target, *args[1:])
        assert_same_tensor(target, requantized(q, values))
        if not name.startswith("_foreach_"):
            assert result is target


def test_every_named_op_exists_and_is_classified() -> None:
    for name in sorted(DEQUANTIZE_OPS | IN_PLACE_OPS):
        packet = getattr(aten, name)
        want = "in place" if name in IN_PLACE_OPS else "dequantizes"
        assert {classify(getattr(packet, o)) for o in packet.overloads()} == {want}, name
    assert not DEQUANTIZE_OPS & IN_PLACE_OPS


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda q: q + 1,
    "radd": lambda q: 1 + q,
    "rsub": lambda q: 1 - q,
    "rtruediv": lambda q: 1 / q,
    "rpow": lambda q: 2**q,
    "floordiv": lambda q: q // 2,
    "mod": lambda q: q % 0.75,
    "neg": lambda q: -q,
    "abs": lambda q: abs(q),
    "eq": lambda q: q == q,
    "lt": lambda q: q < rand(64, seed=2),
    "both": lambda q: q * q - q / 3,
    "softmax": lambda q: torch.softmax(q, -1),
    "log_softmax": lambda q: F.log_softmax(q, 0),
    "layer_norm": lambda q: F.layer_norm(q, (64,)),
    "rms_norm": lambda q: F.rms_norm(q, (64,)),
    "gelu": lambda q: F.gelu(q),
    "silu": lambda q: F.silu(q),
    "relu": lambda q: F.relu(q),
    "cross_entropy": lambda q: F.cross_entropy(q, torch.arange(8)),
    "l1_loss": lambda q: F.l1_loss(q, torch.zeros(8, 64)),
    "cosine": lambda q: F.cosine_similarity(q, rand(8, 64, seed=2)),
    "std": lambda q: q.std(),
    "var": lambda q: q.var(0),
    "norm": lambda q: q.norm(),
    "mean_keepdim": lambda q: q.mean(-1, keepdim=True),
    "max_dim": lambda q: q.max(1).values,
    "sort": lambda q: q.sort(1).values,
    "topk": lambda q: q.topk(3).indices,
    "cumsum": lambda q: q.cumsum(1),
    "isfinite": lambda q: q.isfinite().all(),
    "nan_to_num": lambda q: q.nan_to_num(),
    "ones_like": lambda q: torch.ones_like(q),
    "full_like": lambda q: torch.full_like(q, 3.0),
    "where": lambda q: torch.where(q > 0, q, 0.0),
    "clamp": lambda q: q.clamp(min=0.1),
    "square": lambda q: q.square(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@formats
def test_everyday_functions(case: FormatCase, name: str) -> None:
    q = case.quantize(rand(8, 64), columnwise=True)
    before = snapshot(q)
    assert_same_tree(FUNCTIONS[name](q), FUNCTIONS[name](q.dequantize()))
    with torch.inference_mode():
        assert_same_bytes(FUNCTIONS[name](q), FUNCTIONS[name](q.dequantize()))
    assert_same_tensor(q, before)


@formats
def test_python_scalars_and_printing(case: FormatCase) -> None:
    q = case.quantize(torch.ones(1))
    assert (float(q), int(q), bool(q), q.item()) == (1.0, 1, True, 1.0)
    assert f"{q.item():.2f}" == "1.00"
    assert len(case.quantize(rand(8, 64))) == 8
    assert torch.allclose(q, torch.ones(1))
    torch.testing.assert_close(q, q.dequantize())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(q, q.dequantize() + 1)


OUT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "add": lambda q, out: torch.add(q, 1, out=out),
    "mul": lambda q, out: torch.mul(q, q, out=out),
    "abs": lambda q, out: torch.abs(q, out=out),
    "clamp": lambda q, out: torch.clamp(q, -0.5, 0.5, out=out),
    "cumsum": lambda q, out: torch.cumsum(q, 0, out=out),
    "cat": lambda q, out: torch.cat([q, q], out=out),
    "mm": lambda q, out: torch.mm(q, torch.eye(64), out=out),
    "addmm": lambda q, out: torch.addmm(torch.ones(64), q, torch.eye(64), out=out),
    "matmul": lambda q, out: torch.matmul(q, torch.eye(64), out=out),
    "bmm": lambda q, out: torch.bmm(q.unsqueeze(0), torch.eye(64)[None], out=out),
    "index_select": lambda q, out: torch.index_select(q, 0, torch.tensor([1, 2]), out=out),
}


@pytest.mark.parametrize("name", OUT)
@formats
def test_out_is_written_or_refused(case: FormatCase, name: str) -> None:
    """``out=`` is never silently left as it was."""
    q = case.quantize(rand(8, 64))
    want = OUT[name](q.dequantize(), torch.empty(0))
    out = torch.full_like(want, -7.0)
    refused = refusal(lambda: OUT[name](q, out))
    if refused:
        assert "out" in refused
        assert torch.equal(out, torch.full_like(want, -7.0))
        return
    assert OUT[name](q, out) is out
    if name in ("mm", "addmm", "matmul", "bmm"):
        # One nonzero product a sum: exact whatever the order of the factors, up to the factors' own
        # rounding.
        torch.testing.assert_close(out, want, rtol=2**-22, atol=2**-22)
    else:
        assert_same_bytes(out, want)


@formats
def test_quantized_out_is_requantized(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    target = case.quantize(rand(8, 64, seed=1))
    before = snapshot(target)
    assert torch.add(q, 1, out=target) is target
    assert_same_tensor(target, requantized(before, q.dequantize() + 1))


@pytest.mark.parametrize("name", ["add", "mul", "sub"])
def test_mixed_formats_and_gradients(name: str) -> None:
    """Operands of two formats meet as plain values; the gradient passes straight through."""
    a = BY_NAME["mxfp8"].quantize(rand(8, 64)).requires_grad_()
    b = BY_NAME["nvfp4"].quantize(rand(8, 64, seed=1))
    function = getattr(torch, name)
    result = function(a, b)
    assert_same_bytes(result.detach(), function(a.dequantize().detach(), b.dequantize()))
    result.sum().backward()
    assert type(a.grad) is torch.Tensor
    assert torch.equal(a.grad, b.dequantize() if name == "mul" else torch.ones(8, 64))
