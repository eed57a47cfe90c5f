"""examples/generate.py: tokens, memory and the layers' values in a decode step."""

import pytest
import torch
from transformers_models import transformers

import qtensor
from examples import generate as example

pytestmark = [
    pytest.mark.project,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

FORMATS = [name for name in qtensor.formats() if name != "fp8_delayed"]
"""A weight that is quantized while it loads has no delayed scale."""
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5]])
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with weights large enough that its tokens differ from each other."""
    path = tmp_path_factory.mktemp("dense")
    example.write_random(path, "tiny")
    model = example.load(path, "bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(path)
    return path


def plain_tokens(model):
    """The new tokens of a dynamic cache, without a streamer and in eager code."""
    return model.generate(PROMPT, max_new_tokens=COUNT, do_sample=False)[:, PROMPT.shape[1] :]


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_plain_generation(name, folder):
    model = example.load(folder, name)
    run = example.measure(model, name, PROMPT, COUNT)
    assert run.tokens.shape == (1, COUNT)
    assert torch.equal(run.tokens, plain_tokens(model))
    assert run.tokens.unique().numel() > 1, "a model that repeats a token would hide an error"
    assert run.tokens_per_second > 0


def test_a_quantized_cache(folder):
    """The cache changes no token of a model whose logits lie apart."""
    model = example.load(folder, "bfloat16")
    want = plain_tokens(model)
    run = example.measure(model, "bfloat16", PROMPT, COUNT, cache="fp8_rowwise")
    assert run.name == "bfloat16, fp8_rowwise cache"
    assert run.tokens.shape == want.shape
    assert (run.tokens == want).sum() > COUNT // 2


@pytest.mark.nightly(reason="inductor needs ten seconds for the two graphs")
def test_compiled_tokens(folder):
    model = example.load(folder, "mxfp4")
    torch._dynamo.reset()
    run = example.measure(model, "mxfp4", PROMPT, COUNT, compiled=True)
    assert run.name == "mxfp4, compiled"
    assert torch.equal(run.tokens, plain_tokens(model))


@pytest.mark.parametrize("name", FORMATS)
def test_layers_of_a_decode_step_against_float64(name, folder):
    """Each output is within the error of K float32 sums, in any order, and one rounding.

    A sum of K products has at most K roundings of 2^-24 on the way of each product, and the factors
    that are applied after it two more. The result is rounded to bfloat16 (2^-8) once.
    """
    model = example.load(folder, name)
    seen = {}
    layers = [(k, m) for k, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    linears = {k: m for k, m in layers if isinstance(m.weight, qtensor.QuantizedTensor)}
    assert len(linears) == 2 * 7
    for key, module in linears.items():
        module.register_forward_hook(lambda _, x, y, key=key: seen.__setitem__(key, (x[0], y)))
    plain_tokens(model)
    for key, (x, y) in seen.items():
        assert x.shape[:2] == (1, 1), "the last call decodes one token"
        assert within_bound(x, linears[key].weight, y), key
        assert not within_bound(x, linears[key].weight, y * 1.02), "the check must be able to fail"


def within_bound(x, weight, y):
    x, w = x[0].double(), weight.dequantize(torch.float32).double()
    exact, magnitude = x @ w.T, x.abs() @ w.abs().T
    bound = (x.shape[-1] + 2) * 2.0**-24 * magnitude
    return bool(((y[0].double() - exact).abs() <= bound + 2.0**-8 * (exact.abs() + bound)).all())


def test_the_table_compares_memory_and_speed(folder, capsys):
    example.main(["--model", str(folder), "--formats", "mxfp4", "--prompt", "6", "--tokens", "4"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]
    assert [row[0] for row in rows] == ["float32", "bfloat16", "mxfp4"]
    assert [row[2] for row in rows[:2]] == ["2.00", "1.00"]
    # Of 270 thousand values 262 thousand are in linear layers: 17 bytes for 32 values.
    shapes = example.SIZES["tiny"]
    hidden, inner = shapes["hidden_size"], shapes["intermediate_size"]
    linear = 2 * (hidden * (2 * hidden + hidden) + 3 * hidden * inner)
    others = hidden * (shapes["vocab_size"] + 2 * 2 + 1)
    expected = (linear * 17 / 32 + 2 * others) / (2 * (linear + others))
    assert float(rows[2][2]) == pytest.approx(expected, abs=0.02)
    assert all(float(row[3]) > 0 for row in rows)


def test_too_few_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        example.main(["--tokens", "3"])
    assert "--tokens must be at least 4; got 3" in capsys.readouterr().err


def test_the_largest_size_has_about_a_billion_parameters():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(example.config("1b"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.04e9, rel=0.01)
