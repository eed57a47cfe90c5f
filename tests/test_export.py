"""torch.export of programs that quantize, decode and multiply; saved, loaded, packaged ahead of time."""

from __future__ import annotations

import io

import pytest
import torch
from compile_helpers import adversarial, assert_same, ordinary
from formats import BY_NAME, FORMATS, FormatCase, formats
from torch import Tensor, nn
from torch.nn import functional

import qtensor

BATCHES = (260, 300, 700)
"""Several blocks of 128: an exported size may be no constant, and 1 is one to torch.export."""
DYNAMIC = {"x": {0: torch.export.Dim("batch", min=129, max=4096)}, "scale": None}


class Program(nn.Module):
    """Quantizes its input in some ways, decodes, multiplies with a weight that it holds quantized or plain."""

    def __init__(self, case: FormatCase, quantized_weight: bool = False):
        super().__init__()
        self.case = case
        self.quantizers = [case.quantizer(columnwise=True, **options) for options in case.each_option()]
        self.quantizers = [q for q in self.quantizers if not q.stochastic_rounding]
        weight = ordinary((48, 72), seed=1)
        if quantized_weight:
            weight = case.quantize(weight, columnwise=True)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, scale: Tensor) -> list[Tensor]:
        state = {"scale": scale} if self.case.name == "fp8_delayed" else {}
        tensors = [q.quantize(x, **state) for q in self.quantizers]
        decoded = [t.dequantize() for t in tensors]
        return [*decoded, functional.linear(x, self.weight), functional.linear(tensors[0], self.weight)]


def ops_of(program: torch.export.ExportedProgram) -> set[str]:
    return {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


def round_trip(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@formats
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@pytest.mark.parametrize("weight", ["plain", "quantized"])
def test_export_save_load(case: FormatCase, strict: bool, weight: str):
    """One program for all batches, with the leaf ops in it, gives the bytes of eager mode before and after a file."""
    module = Program(case, weight == "quantized")
    scale = torch.tensor([2.0])
    x = ordinary((BATCHES[0], 72))
    program = torch.export.export(module, (x, scale), dynamic_shapes=DYNAMIC, strict=strict)
    assert "qtensor.quantize.default" in " ".join(ops_of(program))
    decomposed = program.run_decompositions()
    for p in (program, decomposed, round_trip(decomposed)):
        loaded = p.module()
        for batch in BATCHES:
            x = adversarial((batch, 72), torch.float32, seed=batch)
            assert_same(loaded(x, scale), module(x, scale))
        loaded = None


def test_a_quantized_weight_stays_quantized():
    """The file holds the inner buffers, not the decoded weight."""
    for case in FORMATS:
        module = Program(case, quantized_weight=True)
        x, scale = ordinary((BATCHES[0], 72)), torch.tensor([2.0])
        program = torch.export.export(module, (x, scale), dynamic_shapes=DYNAMIC).run_decompositions()
        loaded = round_trip(program)
        held = [v for v in loaded.state_dict.values() if isinstance(v, Tensor)]
        assert held
        flat = [b for t in held for b in (t.buffers() if isinstance(t, qtensor.QuantizedTensor) else [t])]
        assert sorted(b.nbytes for b in flat) == sorted(b.nbytes for b in module.weight.buffers())


@formats
def test_amax_leaves_an_exported_program(case: FormatCase):
    """Delayed scaling: the amax is an output; other formats say that they have none, at export too."""
    q = case.quantizer()

    class Observe(nn.Module):
        def forward(self, x, scale):
            t, amax = q.quantize_with_amax(x, scale=scale)
            return t.dequantize(), amax

    x, scale = ordinary((40, 72)), torch.tensor([2.0])
    if q.returns_amax:
        program = round_trip(torch.export.export(Observe(), (x, scale)).run_decompositions())
        assert_same(program.module()(x, scale), Observe()(x, scale))
    else:
        with pytest.raises(qtensor.UnsupportedError, match="only delayed scaling returns the amax"):
            torch.export.export(Observe(), (x, scale))


def test_stochastic_rounding_is_exported_with_its_seed():
    q = qtensor.NVFP4Quantizer(stochastic_rounding=True)

    class Draw(nn.Module):
        def forward(self, x, seed):
            return q.quantize(x, generator=seed).dequantize()

    x = ordinary((40, 72))
    program = round_trip(torch.export.export(Draw(), (x, torch.tensor([1]))).run_decompositions())
    for seed in (1, 2):
        assert_same(program.module()(x, torch.tensor([seed])), Draw()(x, torch.tensor([seed])))


@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_NAME["mxfp8"], BY_NAME["nvfp4"]], ids=lambda c: c.name)
def test_ahead_of_time_package(case: FormatCase, tmp_path):
    """AOTInductor: plain op schemas go into the package; the loaded one gives the bytes of eager mode."""
    module = Program(case, quantized_weight=True)
    module.quantizers = module.quantizers[:2]
    scale = torch.tensor([2.0])
    program = torch.export.export(module, (ordinary((BATCHES[0], 72)), scale), dynamic_shapes=DYNAMIC)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for batch in BATCHES:
        x = adversarial((batch, 72), torch.float32, seed=batch)
        assert_same(list(loaded(x, scale)), module(x, scale))
