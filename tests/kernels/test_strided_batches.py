"""Batches whose rows are not evenly spaced, times a quantized weight: nothing decodes the weight.

torch computes ``linear`` and ``matmul`` of such a batch by expanding the weight, and an expanded
weight has plain values.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import few_rows_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
import torch_process
from compile_helpers import Compiled, backends
from few_rows_cases import quantized, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter

import qtensor
from qtensor.core.torch_state import OWN_KEY_NAME
from qtensor.storage.ops import views

formats = pytest.mark.parametrize(
    "fmt", ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]
)
modes = pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__
)
N, K = 130, 320

BATCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "the last token": lambda h: h[:, -1:],
    "the last tokens": lambda h: h[:, -3:],
    "every second token": lambda h: h[:, ::2],
    "transposed": lambda h: h.transpose(0, 1),
    "expanded": lambda h: h[:, :1].expand(-1, 3, -1),
    "four dims": lambda h: h.view(4, 3, 2, K)[:, -2:],
    "columns": lambda h: h.mT.contiguous().mT,
}
BIAS = torch.arange(N) / 8 - 8
"""Values that bfloat16 holds."""
CALLS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear": F.linear,
    "linear with a bias": lambda x, w: F.linear(x, w, BIAS.to(x.dtype)),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "@": lambda x, w: x @ w.t(),
    "matmul, out=": lambda x, w: torch.matmul(x, w.t(), out=x.new_empty(*x.shape[:-1], N)),
    "weight @ x": lambda x, w: (w @ x.mT).mT,
    "a batch of one weight": lambda x, w: torch.matmul(x, w.t().unsqueeze(0)),
}


def hidden(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(4, 6, K, dtype=dtype)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of the weights that `expand` has decoded since the test began."""
    seen: list[Any] = []

    def watched(t: Any, *args: Any) -> Tensor:
        seen.append(tuple(t.shape))
        return decode(t, *args)

    decode = views.plain
    monkeypatch.setattr(views, "plain", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@modes
@formats
def test_the_bytes_of_an_evenly_spaced_batch(
    fmt: str, mode: Any, dtype: torch.dtype, decoded: list[Any]
) -> None:
    """The nominal dtype of the weight is float32: it takes no part in a product."""
    torch.manual_seed(0)
    w, h = quantized(N, K, fmt, {}), hidden(dtype)
    with mode():
        for batch, select in BATCHES.items():
            x = select(h)
            rows = x.reshape(-1, K)
            wants = {None: oracle.product(rows, w), "bias": oracle.product(rows, w, BIAS)}
            for name, call in CALLS.items():
                if fmt == "fp8_rowwise" and name == "a batch of one weight":
                    continue  # Factors of columns belong to a whole tensor, not to a batch.
                got = call(x, w)
                want = wants["bias" if "bias" in name else None].to(dtype)
                assert got.shape == (*x.shape[:-1], N), f"{name}, {batch}"
                same_bits(got.reshape(-1, N), want)
                assert not decoded, f"{name}, {batch}"
            assert qtensor.explain(x, w).backend == "few_rows", batch


@pytest.mark.parametrize("usages", [(True, True), (False, True)], ids=["both", "columnwise"])
@formats
def test_other_usages_have_one_order_of_sums(fmt: str, usages: tuple[bool, bool]) -> None:
    """With and without gradients, and in inference mode."""
    torch.manual_seed(6)
    rowwise, columnwise = usages
    w = qtensor.quantize(torch.randn(N, K), fmt, rowwise=rowwise, columnwise=columnwise)
    x = torch.randn(4, 6, K)[:, -2:]
    want = F.linear(x.contiguous().requires_grad_(), w).detach()
    same_bits(F.linear(x, w), want)
    with torch.inference_mode():
        same_bits(F.linear(x, w), want)


ORIGINS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda w: w.detach(),
    "a parameter": lambda w: Parameter(w, requires_grad=False),
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "another dtype": lambda w: w.bfloat16(),
    "twice transposed": lambda w: w.t().t(),
    "rows": lambda w: torch.cat([w, w])[N:],
    "a matrix of a stack": lambda w: w.view(1, N, K)[0],
    "unbind": lambda w: w.view(1, N, K).unbind()[0],
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("origin", ORIGINS.values(), ids=ORIGINS)
def test_every_weight_has_the_dispatch_key(origin: Callable[[Any], Any]) -> None:
    """However it was made."""
    torch.manual_seed(7)
    w, x = quantized(N, K, "mxfp8", {}), hidden()[:, -2:]
    for made in (origin(w), origin(w).view(1, N, K).mT):
        assert OWN_KEY_NAME in repr(torch._C._dispatch_keys(made))
    same_bits(F.linear(x, origin(w)), F.linear(x.contiguous(), w))


def losses(x: Tensor, w: Any) -> Tensor:
    """Return one number that depends on every product of ``CALLS`` that has a gradient."""
    return sum(
        call(x, w).float().square().mean() for name, call in CALLS.items() if "out=" not in name
    )


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_gradients(fmt: str, frozen: bool, decoded: list[Any]) -> None:
    """The same bytes as those of a contiguous x, for x and a weight that requires grad."""
    torch.manual_seed(1)
    h = hidden()
    for batch, select in BATCHES.items():
        gradients = []
        for change in (lambda x: x, torch.Tensor.contiguous):
            torch.manual_seed(2)
            w = Parameter(quantized(N, K, fmt, {}, spread=0.1), requires_grad=not frozen)
            x = h.clone().requires_grad_()
            losses(change(select(x)), w).backward()
            gradients.append([x.grad] if frozen else [x.grad, w.grad])
        assert gradients[0][0].any()
        for got, want in zip(*gradients, strict=True):
            assert torch.equal(got, want), batch
    assert not decoded


@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param(False, id="static"),
        pytest.param(
            True,
            id="dynamic",
            marks=pytest.mark.nightly(reason="symbolic shapes take five times as long to trace"),
        ),
    ],
)
@backends
def test_compiled(backend: str, dynamic: bool, decoded: list[Any]) -> None:
    """Every batch, and every call."""
    torch.manual_seed(3)
    w = Parameter(quantized(N, K, "mxfp4", {}), requires_grad=False)

    names = [name for name in BATCHES if name != "four dims"]
    if dynamic:
        names = names[:2]  # symbolic shapes take five times as long to trace
    calls = [call for name, call in CALLS.items() if "out=" not in name]
    pairs = list(zip(names, itertools.cycle(calls)))
    pairs += [(names[0], call) for call in calls[1:]]

    def every_product(h: Tensor, w: Any) -> list[Tensor]:
        return [call(BATCHES[name](h), w) for name, call in pairs]

    compiled = Compiled(every_product, backend, dynamic=dynamic)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            h = hidden()
            for got, want in zip(compiled(h, w), every_product(h, w), strict=True):
                same_bits(got.contiguous(), want.contiguous())
    assert not decoded


@backends
def test_compiled_gradients(backend: str, decoded: list[Any]) -> None:
    torch.manual_seed(4)
    w = Parameter(quantized(N, K, "fp8", {}), requires_grad=False)

    def last_token(h: Tensor, w: Any) -> Tensor:
        return F.linear(h[:, -1:], w)

    gradients = []
    for function in (last_token, Compiled(last_token, backend)):
        torch.manual_seed(5)
        h = hidden().requires_grad_()
        function(h, w).sum().backward()
        gradients.append(h.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()
    assert not decoded


def test_fake_tensors() -> None:
    w, h = quantized(N, K, "mxfp8", {}), hidden()

    def layouts(h: Tensor, w: Any) -> list[Any]:
        calls = [call for name, call in CALLS.items() if "bias" not in name]
        results = [call(select(h), w) for select in BATCHES.values() for call in calls]
        return [(y.shape, y.dtype, y.stride()) for y in results]

    with FakeTensorMode() as mode:
        fake = layouts(mode.from_tensor(h), mode.from_tensor(w))
    assert fake == layouts(h, w)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_a_single_op_would_lose() -> None:
    """Transforms, tangents and the dtype of autocast."""
    w, x = quantized(N, K, "fp8", {}, spread=0.1), torch.randn(4, 6, K)[:, -2:]
    want = F.linear(x, w)
    assert torch.equal(torch.vmap(lambda x: F.linear(x, w))(x), want)
    slope = torch.func.grad(lambda x: F.linear(x, w).sum())(x)
    torch.testing.assert_close(slope, w.dequantize().sum(0).expand_as(x))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, x), w)).tangent
    assert torch.equal(tangent, want)
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(F.linear(x, w), F.linear(x.contiguous(), w))
        assert F.linear(x, w).dtype == torch.bfloat16


class Noting(qtensor.MXFP8Tensor):
    """A tensor that answers every op itself."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func._schema.name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_class_with_its_own_dispatch_sees_the_ops() -> None:
    w, x = quantized(N, K, "mxfp8", {}), hidden()[:, -1:]
    own = Noting(
        w.shape,
        w.dtype,
        w.quantizer,
        **dict(zip([slot.keyword for slot in w.quantizer.slots], w.buffers(), strict=True)),
    )
    assert torch.equal(F.linear(x, own), F.linear(x, w))
    assert "aten::mm" in Noting.seen


def test_plain_calls_do_not_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = torch.randn(N, K), torch.randn(2, 6, K)[:, -1:]
    want = F.linear(x, w)
    monkeypatch.setattr(torch._C, "_ExcludeDispatchKeyGuard", None)
    assert torch.equal(F.linear(x, w), want)
    assert torch.equal(x @ w.t(), want)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_a_weight_that_user_code_repeats_is_decoded(fmt: str, decoded: list[Any]) -> None:
    """`expand` to more rows is in the op matrix under "dequantizes"."""
    w, x = quantized(N, K, fmt, {}), torch.randn(4, 6, K)
    repeated = w.expand(4, N, K)
    assert type(repeated) is Tensor
    assert decoded == [(N, K)]
    assert torch.equal(torch.bmm(x, repeated.mT), torch.bmm(x, w.dequantize().expand(4, N, K).mT))
    assert "the right operand is not quantized" in qtensor.explain(x, repeated)


def test_a_torch_without_the_key():
    """The library loads and multiplies as before: torch decomposes the calls."""
    program = """
import torch

def refuse(name):
    raise RuntimeError(f"no key {name}")

torch._C._dispatch_key_parse = refuse
import qtensor
from qtensor.core.torch_state import OWN_KEY

assert OWN_KEY is None
x, w = torch.randn(2, 3, 64), qtensor.quantize(torch.randn(32, 64), "mxfp4")
y = torch.nn.functional.linear(x, w)
assert torch.equal(y, qtensor.gemm(x, w, "TN")), "another product"
"""
    torch_process.run(program)
