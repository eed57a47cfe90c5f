"""``qtensor inspect | convert | dequantize | diff | verify``: output, JSON and exit status."""

import builtins
import io
import json
import os
import re
import select
import signal

import pytest
import torch
import torch_process
from checkpoint_cases import EXAMPLES, weight

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from typer.testing import CliRunner

import qtensor
from qtensor import checkpoints, cli

NVFP4 = EXAMPLES / "ct_nvfp4"
NAME = "model.layers.0.mlp.down_proj.weight"


def invoke(*args, status=0):
    done = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    assert done.exit_code == status, done.output
    assert "Traceback" not in done.output
    return done


def as_json(*args, status=0):
    return json.loads(invoke(*args, "--json", status=status).stdout)


@pytest.fixture
def plain(tmp_path):
    state = {f"layers.{i}.weight": torch.randn(64, 64).bfloat16() for i in range(25)}
    checkpoints.save(state, tmp_path / "plain", layout="plain")
    return tmp_path / "plain"


def test_inspect():
    text = invoke("inspect", NVFP4, "--all").stdout
    for word in ("layout compressed-tensors", "nvfp4-pack-quantized", "4.510", NAME):
        assert word in text
    found = as_json("inspect", NVFP4)
    assert found == checkpoints.inspect(NVFP4).to_dict()
    keys = ["path", "layout", "container", "files", "bytes", "kinds", "odd", "tensors"]
    assert list(found) == keys
    text = invoke("inspect", NVFP4, "--tensor", NAME).stdout
    for word in ("weight_global_scale", "codes", "rms"):
        assert word in text
    assert "block at" not in text
    with checkpoints.open(NVFP4) as opened:
        assert str(qtensor.debug.show(opened[NAME])) in text
    plain = NAME.replace("weight", "input_global_scale")
    assert "values" in invoke("inspect", NVFP4, "--tensor", plain).stdout
    found = as_json("inspect", NVFP4, "--tensor", NAME)
    assert found["stored"]["codes"]["shape"] == [48, 48]
    text = invoke("inspect", NVFP4, "--tensor", NAME, "--rows", "2:4", "--cols", "0:32").stdout
    with checkpoints.open(NVFP4) as opened:
        view = qtensor.debug.show(opened[NAME], (2, 4), (0, 32))
    assert str(view) in text
    text = invoke("inspect", NVFP4, "--tensor", NAME, "--bits", "7,5").stdout
    assert "[7, 5] e2m1 code 0x" in text
    error = invoke("inspect", NVFP4, "--tensor", NAME, "--rows", "2-4", status=2).stderr
    assert "--rows: the form is 0:8; got '2-4'" in error
    error = invoke("inspect", NVFP4, "--rows", "2:4", status=2).stderr
    assert "--rows, --cols and --bits need --tensor" in error
    assert "'absent'" in invoke("inspect", NVFP4, "--tensor", "absent", status=2).stderr


def test_convert_and_verify(plain, tmp_path):
    out = tmp_path / "out"
    args = ("convert", plain, out, "--layout", "compressed-tensors", "--format", "nvfp4")
    text = invoke(*args, "--exclude", "*.3.weight", "--shard-size", "20KB").stdout
    assert "24 quantized, 1 plain" in text
    assert "the 20 of 24 with the lowest SQNR" in text
    assert "checksums of files: 4 compared" in invoke("verify", out).stdout
    assert "error: " in invoke(*args, status=2).stderr
    found = as_json(*args, "--overwrite", "--include", "*.3.weight")
    assert found["counts"] == {"quantized": 1, "plain": 24}
    keys = "name source action before after shape sqnr_db max_abs_error bytes"
    assert list(found["tensors"][0]) == keys.split()
    assert invoke("verify", out).stdout == "ok: 25 tensors; checksums of files: none recorded\n"
    assert as_json("verify", out)["ok"] is True


def test_dequantize_and_diff(tmp_path):
    out = tmp_path / "out"
    assert "2 decoded" in invoke("dequantize", NVFP4, out, "--dtype", "bf16").stdout
    found = as_json("diff", NVFP4, out, status=1)
    assert found["counts"] == {"equal values": 2, "only in a": 2}
    assert "only in a" in invoke("diff", NVFP4, out, status=1).stdout
    assert invoke("diff", out, out).stdout.strip() == "2 equal bytes"
    assert "bfloat16" in invoke("diff", out, out, "--all").stdout
    ours = as_json("dequantize", NVFP4, tmp_path / "ours", "--dtype", "f32", "--ours")
    assert ours["counts"] == {"decoded": 2}
    assert as_json("diff", NVFP4, tmp_path / "ours", status=1)["counts"]["different"] == 2


def test_diff_takes_the_layout_of_each_side(tmp_path):
    folder = EXAMPLES / "gptoss_mxfp4"
    alone = tmp_path / "alone.safetensors"  # without its config.json, as the single-file release
    alone.write_bytes((folder / "model.safetensors").read_bytes())
    assert "layout" in invoke("diff", folder, alone, status=2).stderr
    assert as_json("diff", folder, alone, "--layout-b", "gpt-oss")["equal"] is True
    assert as_json("diff", alone, folder, "--layout-a", "gpt-oss")["equal"] is True


@pytest.mark.parametrize(
    ("command", "names"),
    [("convert", ("SRC", "DST")), ("dequantize", ("SRC", "DST")), ("diff", ("A", "B"))],
)
def test_the_help_names_both_arguments(command, names):
    usage = next(line for line in invoke(command, "--help").stdout.splitlines() if "Usage" in line)
    assert [word.strip("{}") for word in usage.split()[-2:]] == list(names)


def test_a_damaged_file(tmp_path):
    """An error is what ``verify`` looks for; the other commands cannot begin."""
    checkpoints.save({"a.weight": weight("mxfp8")}, tmp_path / "a", layout="fine-grained-fp8")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "error: " in invoke("verify", path, status=1).stdout
    assert as_json("verify", path, status=1)["problems"][0]["severity"] == "error"
    assert "error: " in invoke("inspect", path, status=2).stderr
    assert "error: " in invoke("diff", path, path, status=2).stderr


@pytest.mark.parametrize(
    "args",
    [
        ("inspect",),
        ("inspect", "missing"),
        ("verify", "missing"),
        ("diff", NVFP4),
        ("diff", NVFP4, "missing"),
        ("convert", NVFP4, "out", "--layout", "ggml"),
        ("convert", NVFP4, "out", "--format", "int4"),
        ("convert", NVFP4, "out", "--shard-size", "much"),
        ("convert", NVFP4, "out", "--jobs", "0"),
        ("dequantize", NVFP4, "out", "--dtype", "int8"),
        ("verify", NVFP4, "--fast"),
        ("inspect", "."),
        ("inspect", NVFP4 / "config.json"),
        ("inspect", NVFP4, "--tensor", ""),
        ("inspect", NVFP4, "--tensor", "absent"),
        ("inspect", NVFP4, "--tensor", NAME, "--rows", "40:60"),
        ("inspect", NVFP4, "--tensor", NAME, "--rows", "8:2"),
        ("inspect", NVFP4, "--tensor", NAME, "--rows", ""),
        ("inspect", NVFP4, "--tensor", NAME, "--bits", "0,96"),
        ("inspect", NVFP4, "--rows", ""),
        ("diff", NVFP4, "."),
        ("report", "."),
        ("report", NVFP4, "-o", "."),
        ("report", NVFP4, "-o", ".", "--overwrite"),
        ("report", NVFP4, "--log", "."),
        ("report", NVFP4, "--search", NVFP4 / "config.json"),
        ("demo", "--weights", "."),
        ("demo", "--formats", "int4"),
        ("kernels", "build", "--isa", "sse"),
        ("kernels", "list", "--arch", "sm_1"),
    ],
)
def test_a_wrong_call_has_status_2(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = invoke(*args, status=2).stderr
    assert text.count("error: ") + text.count("Error") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_may_not_be_read(tmp_path, monkeypatch):
    """The tests may run as a user who may read everything."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((NVFP4 / "model.safetensors").read_bytes())

    def refuse(file, *args, **options):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **options)

    real = builtins.open
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    out = tmp_path / "out"
    for args in (
        ("inspect", path),
        ("diff", NVFP4, path),
        ("convert", path, out),
        ("dequantize", path, out),
        ("report", path, "-o", out),
        ("report", NVFP4, "--against", path, "-o", out),
    ):
        assert "Permission denied" in invoke(*args, status=2).stderr
    assert "Permission denied" in invoke("verify", path, status=1).stdout
    assert not out.exists()


def test_the_package_runs_as_a_module():
    code = "import runpy; runpy.run_module('qtensor', run_name='__main__', alter_sys=True)"
    done = torch_process.run(code, "inspect", str(NVFP4), "--json")
    assert json.loads(done.stdout)["layout"] == "compressed-tensors"


def test_errors_name_options_of_the_command(plain, tmp_path):
    """The library names its arguments, such as overwrite=True, which a command does not have."""
    out, nvfp4 = tmp_path / "out", (EXAMPLES / "ct_nvfp4", tmp_path / "new")
    out.mkdir()
    (out / "notes").mkdir()
    moved = invoke("convert", *nvfp4, "--layout", "fine-grained-fp8", status=2).stderr
    assert "pass --format." in moved
    assert "pass --overwrite." in invoke("convert", plain, out, status=2).stderr
    assert "--overwrite replaces" in invoke("convert", plain, out, "--overwrite", status=2).stderr
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((EXAMPLES / "gptoss_mxfp4" / "model.safetensors").read_bytes())
    for args, option in (
        (("inspect", alone), "--layout"),
        (("convert", alone, tmp_path / "new"), "--source-layout"),
        (("dequantize", alone, tmp_path / "new"), "--source-layout"),
        (("diff", alone, plain), "--layout-a or --layout-b"),
    ):
        text = invoke(*args, status=2).stderr
        assert f"leave out {option}." in text or f"Pass {option}, or" in text
        assert not re.search(r"\b[a-z]+=", text)


@pytest.mark.parametrize(
    "args", [("inspect", ""), ("verify", ""), ("diff", NVFP4, ""), ("convert", NVFP4, "")]
)
def test_an_empty_path_is_not_the_current_folder(args, tmp_path, monkeypatch):
    monkeypatch.chdir(NVFP4)
    invoke(*args, status=2)


def start(output, *command):
    """Start the program itself, its output to a device or pipe; a terminal has the errors too."""
    code = (
        "import os, sys\n"
        "output = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_NOCTTY)\n"
        "os.dup2(output, 1)\n"
        "if os.isatty(output): os.dup2(output, 2)\n"
        "from qtensor.cli import main\n"
        "main()\n"
    )
    return torch_process.TorchProcess(code, str(output), *map(str, command), name="qtensor")


def test_names_are_whole_in_a_narrow_terminal(monkeypatch):
    """They are folded to several lines, where "model.layers.0.ml..." could be any tensor."""
    monkeypatch.setattr("qtensor.cli.console._LOG_WIDTH", 60)
    monkeypatch.setenv("COLUMNS", "60")
    text = invoke("inspect", NVFP4, "--tensor", NAME).stdout
    text += invoke("diff", NVFP4, NVFP4, "--all").stdout
    assert "\u2026" not in text
    assert max(map(len, text.splitlines()[2:8])) <= 60


def test_an_output_that_is_full_is_one_line():
    done = start("/dev/full", "inspect", NVFP4).finish()
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_pipe_whose_reader_ends_ends_the_program(tmp_path):
    """As ``qtensor inspect --all PATH | head -1``: no traceback, and status 141 in a shell."""
    state = {f"{'long' * 20}.{i}": torch.zeros(1) for i in range(2000)}
    checkpoints.save(state, tmp_path / "many", layout="plain")
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path / "pipe", "inspect", tmp_path / "many", "--all")
    with (tmp_path / "pipe").open() as pipe:
        assert "many" in pipe.readline()
    done = process.finish(60)
    assert done.returncode == -signal.SIGPIPE
    assert done.stderr == ""


def test_a_bar_shows_the_rate_on_a_terminal(plain, tmp_path):
    terminal, other = os.openpty()
    process = start(os.ttyname(other), "convert", plain, tmp_path / "out", "--format", "mxfp8")
    text = b""
    while not (b"100%" in text and b"B/s" in text) and select.select([terminal], [], [], 60)[0]:
        text += os.read(terminal, 65536)
    assert b"100%" in text
    assert b"B/s" in text
    assert process.finish(60).returncode == 0
    os.close(terminal)
    os.close(other)
