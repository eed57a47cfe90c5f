"""Each undocumented part of torch that the package uses is listed and watched by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import running
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qtensor.core.torch_state import watched
from qtensor.library.delayed import ADVANCE_STEP
from qtensor.library.gemm import GEMM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLE = PAGE.partition("## What we use of torch")[2].partition("## Glossary")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> list[str]:
    """Return ["torch", "_C", "_name"] for the expression ``torch._C._name``."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return [*start, node.attr] if start else []
    return [node.id] if isinstance(node, ast.Name) else []


def internals(source: str) -> Iterator[str]:
    """Yield the dotted names of torch in a source that contain a private part.

    A class that only annotations name is not used.
    """
    tree = ast.parse(source)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in running(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [".".join(dotted(node))]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and any(map(is_private, parts)):
                yield name


LISTED = [n for n in re.findall(r"`(torch\.[\w.]+)`", TABLE) if any(map(is_private, n.split(".")))]
"""The names of the table; a module there stands for everything in it."""


def is_listed(name: str) -> bool:
    return any(f"{name}.".startswith(f"{entry}.") for entry in LISTED)


@pytest.mark.project
def test_every_internal_of_torch_is_listed() -> None:
    sources = sorted((ROOT / "qtensor").rglob("*.py"))
    used = {name for path in sources for name in internals(path.read_text())}
    assert len(used) > 20
    assert {name for name in used if not is_listed(name)} == set()
    unused = [e for e in LISTED if not any(f"{name}.".startswith(f"{e}.") for name in used)]
    assert unused == []


def test_the_state_of_a_call_is_read_in_one_file() -> None:
    own = ROOT / "qtensor" / "core" / "torch_state.py"
    names = {name for name in internals(own.read_text()) if is_private(name.split(".")[-1])}
    assert len(names) > 8
    for path in sorted(set((ROOT / "qtensor").rglob("*.py")) - {own}):
        used = set(internals(path.read_text()))
        assert not used & names, path
        assert not [name for name in used if name.startswith("torch._C.")], path
        assert "_dynamo_marked" not in path.read_text(), path


def test_nothing_reads_frames_or_searches_objects() -> None:
    words = ("_getframe", "currentframe", "inspect.stack", "f_locals", "f_globals", "get_objects")
    for path in sorted((ROOT / "qtensor").rglob("*.py")):
        assert [word for word in words if word in path.read_text()] == [], path


def test_an_internal_is_found() -> None:
    source = "import torch\nfrom torch._dynamo import x\ntorch._C._y()\ntorch.nn.Linear\n_a.b"
    source += "\nif TYPE_CHECKING:\n    from torch._ops import OpOverload"
    assert list(internals(source)) == ["torch._dynamo.x", "torch._C._y"]


@pytest.mark.project
def test_every_listed_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert all("`tests/" in row for row in rows)
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` of plain operands, (M, K) and (N, K), by the op ``gemm``."""
    result: Tensor = GEMM([a], "", a.shape, [b], "", b.shape, "TN", dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_do_not_see_torch_autocast(dtype: torch.dtype) -> None:
    a, b = torch.randn(8, 16), torch.randn(4, 16)
    expected = product(a, b, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(a, b, dtype), expected)
        assert torch.mm(a, b.t()).dtype == torch.bfloat16


def test_fills_run_below_autograd() -> None:
    """Without it, torch refuses ``out=`` for a product whose operand requires grad."""
    a, b = torch.randn(8, 16), torch.randn(4, 16)
    expected = product(a, b, torch.float32)
    assert torch.equal(product(a.requires_grad_(), b, torch.float32), expected)


def in_grad(note: Any) -> None:
    torch.func.grad(lambda x: note() or x.sum())(torch.ones(2))


def in_vmap(note: Any) -> None:
    torch.func.vmap(lambda x: note() or x.sum())(torch.ones(2, 2))


def in_trace(note: Any) -> None:
    torch.jit.trace(lambda x: note() or x + 1, torch.ones(2), check_trace=False)


def within(context: Any) -> Any:
    def run(note: Any) -> None:
        with context():
            note()

    return run


def profiler() -> AbstractContextManager[Any]:
    return torch.profiler.profile(acc_events=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (within(nullcontext), False),
        (within(FakeTensorMode), True),
        (within(profiler), True),
        (in_grad, True),
        (in_vmap, True),
        (in_trace, True),
    ],
    ids=["nothing", "mode", "profiler", "grad", "vmap", "trace"],
)
def test_what_watches_ops(call: Any, expected: bool) -> None:
    seen: list[bool] = []
    call(lambda: seen.append(watched()))
    assert seen
    assert set(seen) == {expected}
    assert not watched()


class CountInBackward(torch.autograd.Function):
    """The identity; its backward counts a step, unless the step is one of a forward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, forward_only: bool) -> Tensor:
        ctx.step, ctx.forward_only = step, forward_only
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ADVANCE_STEP(ctx.step, ctx.forward_only)
        return grad, None, None


@pytest.mark.parametrize(("forward_only", "steps"), [(True, 0), (False, 1)])
def test_a_step_is_not_counted_inside_a_backward_pass(forward_only: bool, steps: int) -> None:
    """A checkpoint computes a layer again there; the step of the forward has been counted."""
    step = torch.zeros(1, dtype=torch.int64)
    x = torch.ones(2, requires_grad=True)
    CountInBackward.apply(x, step, forward_only).sum().backward()
    assert step.item() == steps
    ADVANCE_STEP(step, True)
    assert step.item() == steps + 1
