"""A converted model through torch.export, a file, and an AOTInductor package."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from convert_models import convert
from formats import assert_same_bytes
from torch import nn

from qtensor.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

pytestmark = [
    # torch.export.save uses a name that torch.utils._pytree deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # Dynamo makes an object of torch.autograd.Function, which torch deprecates.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

BATCHES = (260, 300, 700)
"""Several blocks of 128: an exported size may be no constant, and 1 is one to torch.export."""
DYNAMIC = ({0: torch.export.Dim("batch", min=129, max=4096)},)

RECIPES = [
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
    DelayedScaling(),
]
WIDE = pytest.mark.nightly(reason="a second a cell; test_export_save_load has the other recipes")
LIKE = pytest.mark.nightly(reason="delayed scaling is exported with one factor a tensor too")


def converted(recipe: Recipe, quantized_params: bool) -> nn.Module:
    """A model after some steps of training, so that delayed scaling has factors; in evaluation
    mode.
    """
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32, bias=False))
    assert len(convert(model, recipe, quantized_params=quantized_params).swapped) == 2
    for _ in range(2):
        model(torch.randn(32, 64)).sum().backward()
    # torch makes a parameter of each inner buffer, which can need no gradient where it is of
    # integers.
    return model.eval().requires_grad_(not quantized_params)


def check(program: torch.nn.Module, model: nn.Module) -> None:
    for batch in BATCHES:
        x = torch.randn(batch, 64)
        assert_same_bytes(program(x), model(x).detach())


def through_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=LIKE) if isinstance(r, Float8CurrentScaling) else r for r in RECIPES],
    ids=lambda r: type(r).__name__,
)
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("quantized_params", [False, True], ids=["plain", "quantized"])
def test_export_save_load(recipe: Recipe, strict: bool, quantized_params: bool):
    """One program for all batches, of our ops, with the bytes of eager mode before and after a
    file.
    """
    model = converted(recipe, quantized_params)
    x = torch.randn(BATCHES[0], 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=DYNAMIC, strict=strict)
        flat = program.run_decompositions()
        ops = [str(n.target) for n in flat.graph.nodes if n.op == "call_function"]
        # A weight that is stored quantized is not quantized again.
        single = ("qtensor.quantize.default", "qtensor.gemm.default")
        names = single if quantized_params else ("qtensor.linear_forward.default",)
        others = ("qtensor.linear_forward.default",) if quantized_params else single
        assert [ops.count(name) for name in names] == [2] * len(names)
        assert not set(others) & set(ops)
        for one in (program, through_a_file(program), flat, through_a_file(flat)):
            check(one.module(), model)


@pytest.mark.parametrize(
    "recipe",
    [r if r is RECIPES[-1] else pytest.param(r, marks=WIDE) for r in RECIPES],
    ids=lambda r: type(r).__name__,
)
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_where_gradients_are_on(recipe: Recipe, strict: bool):
    """Nobody has to remember ``no_grad``: what is exported is the forward, with our ops in it."""
    model = converted(recipe, False)
    x = torch.randn(BATCHES[0], 64)
    program = torch.export.export(model, (x,), dynamic_shapes=DYNAMIC, strict=strict)
    check(program.module(), model)


@pytest.mark.nightly(reason="test_export.py builds one package in the default tier")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "quantized_params"),
    [(MXFP8BlockScaling(), True), (DelayedScaling(), False)],
    ids=["mxfp8-quantized", "delayed"],
)
def test_ahead_of_time_package(recipe: Recipe, quantized_params: bool, tmp_path: Path):
    """AOTInductor: the loaded package gives the bytes of eager mode."""
    model = converted(recipe, quantized_params)
    with torch.no_grad():
        x = torch.randn(BATCHES[0], 64)
        program = torch.export.export(model, (x,), dynamic_shapes=DYNAMIC)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        check(torch._inductor.aoti_load_package(path), model)
