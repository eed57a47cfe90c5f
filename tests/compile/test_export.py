"""torch.export of programs that quantize, decode and multiply; saved, loaded, packaged ahead of
time.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch_process
from compile_helpers import adversarial, assert_same, ordinary
from formats import BY_NAME, FormatCase, formats
from torch import Tensor, nn
from torch._export.verifier import SpecViolationError
from torch.nn import functional

import qtensor

# torch.export.save uses a name that torch.utils._pytree deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")

BATCHES = (260, 300, 700)
"""Several blocks of 128: an exported size may be no constant, and 1 is one to torch.export."""
DYNAMIC = {"x": {0: torch.export.Dim("batch", min=129, max=4096)}, "scale": None}


class Program(nn.Module):
    """Quantize the input into bare storages in each way, decode, and multiply with the weight."""

    def __init__(self, case: FormatCase, quantized_weight: bool = False):
        super().__init__()
        self.case = case
        chosen = [case.quantizer(columnwise=True, **options) for options in case.each_option()]
        self.quantizers = [q for q in chosen if not q.stochastic_rounding]
        weight = ordinary((48, 72), seed=1)
        if quantized_weight:
            weight = case.quantize(weight, columnwise=True)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        given = scale if self.case.name == "fp8_delayed" else None
        bare = []
        for q in self.quantizers:
            buffers = torch.ops.qtensor.quantize(x, q.canonical, given)
            # The amax of delayed scaling follows.
            buffers = buffers[: len(q.slots)]
            bare.append(q.assemble(buffers, x.shape, x.dtype, bare=True))
        products = [functional.linear(x, self.weight), qtensor.gemm(bare[0], bare[0], "NT")]
        return [*(t.dequantize() for t in bare), *products]


def ops_of(program: torch.export.ExportedProgram) -> set[str]:
    return {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


def round_trip(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@formats
@pytest.mark.parametrize(
    ("strict", "weight"),
    [(True, "quantized"), (False, "plain")],
    ids=["strict-quantized", "non-strict-plain"],
)
def test_export_save_load(case: FormatCase, strict: bool, weight: str):
    """One program for all batches, with the leaf ops in it, gives the bytes of eager mode before
    and after a file.
    """
    module = Program(case, weight == "quantized")
    scale = torch.tensor([2.0])
    x = ordinary((BATCHES[0], 72))
    program = torch.export.export(module, (x, scale), dynamic_shapes=DYNAMIC, strict=strict)
    assert {
        "qtensor.quantize.default",
        "qtensor.dequantize.default",
        "qtensor.gemm.default",
    } <= ops_of(program)
    decomposed = program.run_decompositions()
    for p in (program, decomposed, round_trip(decomposed)):
        loaded = p.module()
        for batch in BATCHES:
            x = adversarial((batch, 72), torch.float32, seed=batch)
            assert_same(loaded(x, scale), module(x, scale))


@formats
def test_a_quantized_weight_stays_quantized(case: FormatCase):
    """The file holds the inner buffers, not the decoded weight."""
    module = Program(case, quantized_weight=True)
    module.quantizers = module.quantizers[:1]
    x, scale = ordinary((BATCHES[0], 72)), torch.tensor([2.0])
    program = torch.export.export(module, (x, scale), dynamic_shapes=DYNAMIC).run_decompositions()
    loaded = round_trip(program)
    held = [v for v in loaded.state_dict.values() if isinstance(v, Tensor)]
    assert held
    flat = [
        b for t in held for b in (t.buffers() if isinstance(t, qtensor.QuantizedTensor) else [t])
    ]
    assert sorted(b.nbytes for b in flat) == sorted(b.nbytes for b in module.weight.buffers())


class Inside(nn.Module):
    """Use parts, the transpose and a product of a tensor that the program quantizes."""

    def __init__(self, case: FormatCase):
        super().__init__()
        self.q = case.quantizer(columnwise=True)

    def quantized(self, x: Tensor, scale: Tensor) -> qtensor.QuantizedTensor:
        return self.q.quantize(x, **({"scale": scale} if self.q.needs_scale else {}))

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        q = self.quantized(x, scale)
        parts = q[:128].dequantize(), q.t().dequantize()
        return [functional.linear(x, q), q.dequantize(), *parts]


class Returns(Inside):
    """Return quantized tensors that the program makes."""

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        q = self.quantized(x, scale)
        return [q, q[:128], q.t(), x]


@formats
def test_a_program_makes_quantized_tensors(case: FormatCase):
    """Other inputs give other bytes, before and after saving: the program has no constants."""
    scale, module = torch.tensor([2.0]), Inside(case)
    program = torch.export.export(
        module, (ordinary((BATCHES[0], 72)), scale), dynamic_shapes=DYNAMIC, strict=False
    )
    for loaded in (program.module(), round_trip(program.run_decompositions()).module()):
        x = ordinary((BATCHES[1], 72), seed=1)
        assert_same(loaded(x, scale), module(x, scale))


@formats
def test_a_program_returns_quantized_tensors(case: FormatCase):
    """The result is quantized, from the bytes of the input of this call."""
    scale, module = torch.tensor([2.0]), Returns(case)
    args = (ordinary((BATCHES[0], 72)), scale)
    program = torch.export.export(module, args, dynamic_shapes=DYNAMIC, strict=False).module()
    x = ordinary((BATCHES[1], 72), seed=1)
    results, expected = program(x, scale), module(x, scale)
    assert [type(t) for t in results] == [type(t) for t in expected]
    assert_same(results, expected)


@pytest.mark.parametrize("module", [Inside, Returns], ids=["inside", "returned"])
def test_strict_export_of_a_quantized_tensor(module: type[Inside]):
    """Strict export traces with Dynamo first."""
    args, case = (ordinary((128, 72)), torch.tensor([2.0])), BY_NAME["mxfp8"]
    program = torch.export.export(module(case), args, strict=True)
    x = ordinary((128, 72), seed=4)
    assert_same(program.module()(x, args[1]), module(case)(x, args[1]))


@pytest.mark.parametrize("strict", [True, False])
def test_an_input_that_requires_grad(strict: bool):
    """A limit of torch that docs/concepts.md states; without gradients the same module exports."""
    module, scale = Inside(BY_NAME["mxfp8"]), torch.tensor([2.0])
    args = ordinary((128, 72)).requires_grad_(), scale
    refusal = pytest.raises(SpecViolationError, match="missing val field")
    with refusal if strict else contextlib.nullcontext():
        program = torch.export.export(module, args, strict=strict).module()
        assert_same(program(*args), module(*args))
    torch.export.export(module, (args[0].detach(), scale), strict=strict)


def test_live_state_is_exported():
    """Delayed scaling's factor and a seed go in as tensors, the amax comes out as one."""
    delayed = qtensor.Float8Quantizer()
    random = qtensor.NVFP4Quantizer(stochastic_rounding=True)

    class State(nn.Module):
        def forward(self, x, history, scale, seed):
            *buffers, amax = torch.ops.qtensor.quantize(x, delayed.canonical, scale)
            t = delayed.assemble(buffers, x.shape, x.dtype, bare=True)
            draws = torch.ops.qtensor.quantize(x, random.canonical, None, None, seed)
            update = qtensor.delayed_scaling_update(torch.maximum(history, amax), scale)
            return t.dequantize(), amax, *update, draws

    module, history = State(), torch.zeros(4, 1)
    args = (ordinary((40, 72)), history, torch.tensor([2.0]), torch.tensor([1]))
    program = round_trip(torch.export.export(module, args).run_decompositions()).module()
    for seed in (1, 2):
        args = (ordinary((40, 72), seed=seed), history, torch.tensor([4.0]), torch.tensor([seed]))
        assert_same(program(*args), module(*args))


@pytest.mark.nightly(reason="half a minute of the C++ compiler; every other test exports as well")
@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_NAME["nvfp4"]], ids=lambda c: c.name)
def test_ahead_of_time_package(case: FormatCase, tmp_path):
    """AOTInductor: plain op schemas go into the package; the loaded one gives the bytes of eager
    mode.
    """
    module = Program(case, quantized_weight=True)
    module.quantizers = module.quantizers[:2]
    scale = torch.tensor([2.0])
    program = torch.export.export(
        module, (ordinary((BATCHES[0], 72)), scale), dynamic_shapes=DYNAMIC
    )
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "program.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    for batch in BATCHES:
        x = adversarial((batch, 72), torch.float32, seed=batch)
        assert_same(list(loaded(x, scale)), module(x, scale))
    # A process without qtensor: torch offers no hook, but its error names the ops that are missing.
    load = f"import torch; torch._inductor.aoti_load_package({path!r})"
    result = torch_process.run(load, check=False)
    assert result.returncode == 1
    assert "Could not find schema for qtensor::" in result.stderr
    torch_process.run(f"import qtensor; {load}")
