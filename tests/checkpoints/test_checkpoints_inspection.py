"""``checkpoints.inspect``, ``compare`` and ``verify``."""

import hashlib
import json
import math
import re

import pytest
import torch
from checkpoint_cases import READ, weight

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError
from qtensor.checkpoints.checkpoint import open_with_factors

CT = "compressed-tensors"


def saved(tmp_path, state, name="a", layout=CT, **options):
    checkpoints.save(state, tmp_path / name, layout=layout, **options)
    return tmp_path / name


def change(folder, stored, data, at=0):
    """Overwrite bytes of a stored tensor."""
    with checkpoints.open(folder) as checkpoint:
        info = checkpoint.source.tensors[stored]
    with open(info.file, "r+b") as file:
        file.seek(info.start + at)
        file.write(data)


# ---- inspect


@pytest.mark.parametrize("example", READ, ids=lambda example: example.folder)
def test_examples_are_described(example):
    found = checkpoints.inspect(example.path)
    assert found.layout == example.layout
    kinds = {kind.kind for kind in found.kinds} - {"plain"}
    with checkpoints.open(example.path) as checkpoint:
        dense = ("dense",) if checkpoint.groups else ()
        assert kinds == set(example.formats or dense)
        assert {row.name for row in found.rows} == set(checkpoint)
        assert found.nbytes == sum(i.nbytes for i in checkpoint.source.tensors.values())
    with open_with_factors(example.path) as checkpoint:
        for name in checkpoint.groups:
            one = checkpoints.inspect_tensor(example.path, name)
            values = checkpoint[name].float()
            if isinstance(checkpoint[name], qtensor.QuantizedTensor):
                values = checkpoint[name].dequantize(torch.float32)
                assert one.blocks[0].values[0] == values.reshape(-1)[0]
            assert (one.minimum, one.maximum) == (values.min().item(), values.max().item())
            json.dumps(one.to_dict(), allow_nan=False)
    json.dumps(found.to_dict(), allow_nan=False)


def test_odd_tensors(tmp_path):
    state = {
        "a.weight": torch.rand(16, 16).to(torch.float8_e8m0fnu),
        "b.weight": torch.empty(0, 4),
        "c.weight": torch.ones(2),
    }
    found = checkpoints.inspect(saved(tmp_path, state, layout="plain"))
    assert set(found.odd) == {"a.weight", "b.weight"}


def test_blocks_show_codes_factors_and_values(tmp_path):
    made = weight("mxfp4", 4, 64)
    one = checkpoints.inspect_tensor(saved(tmp_path, {"a.weight": made}), "a.weight")
    assert [block.col for block in one.blocks] == [0, 32]
    for block in one.blocks:
        at = slice(block.col, block.col + 32)
        assert block.values == tuple(made.dequantize(torch.float32)[0, at].tolist())
        codes = made.buffers()[0][0, block.col // 2 : block.col // 2 + 16]
        assert block.codes == bytes(codes.tolist()).hex()
        assert block.factor == max(map(abs, block.values)) / 6 or block.factor > 0


def test_a_missing_tensor_names_similar_ones(tmp_path):
    path = saved(tmp_path, {"model.up.weight": weight("mxfp8")})
    with pytest.raises(CheckpointError, match=r"Similar ones: model\.up\.weight"):
        checkpoints.inspect_tensor(path, "up")


# ---- compare


def test_equal_bytes_equal_values_and_differences(tmp_path):
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    state = {
        "same.weight": qtensor.quantize(values, "mxfp8"),
        "decoded.weight": qtensor.quantize(values, "mxfp4"),
        "rounded.weight": values,
        "shape.weight": torch.ones(2, 3),
        "here": torch.ones(1),
    }
    other = {
        "same.weight": state["same.weight"],
        "decoded.weight": state["decoded.weight"].dequantize(),
        "rounded.weight": qtensor.quantize(values, "fp8"),
        "shape.weight": torch.ones(3, 2),
        "there": torch.ones(1),
    }
    a, b = saved(tmp_path, state), saved(tmp_path, other, "b", "qtensor")
    found = checkpoints.compare(a, b)
    results = {t.name: t.result for t in found.tensors}
    assert results == {
        "same.weight": "equal bytes",
        "decoded.weight": "equal values",
        "rounded.weight": "different",
        "shape.weight": "other shape",
        "here": "only in a",
        "there": "only in b",
    }
    assert not found.equal
    (rounded,) = (t for t in found.tensors if t.name == "rounded.weight")
    about = qtensor.error_report(values, other["rounded.weight"])
    assert abs(rounded.sqnr_db - about.sqnr_db) < 0.1
    assert "other shape" in repr(found)
    json.dumps(found.to_dict(), allow_nan=False)
    assert checkpoints.compare(a, a).equal


def test_nan_equals_nan_and_zeros_of_both_signs_are_equal(tmp_path):
    a = saved(tmp_path, {"x": torch.tensor([math.nan, 0.0, 1.0])}, "a", "plain")
    b = saved(tmp_path, {"x": torch.tensor([-math.nan, -0.0, 1.0])}, "b", "plain")
    (found,) = checkpoints.compare(a, b).tensors
    assert (found.result, found.sqnr_db) == ("equal values", math.inf)
    c = saved(tmp_path, {"x": torch.tensor([math.nan, 0.0, 2.0])}, "c", "plain")
    (found,) = checkpoints.compare(a, c).tensors
    assert found.result == "different"
    assert math.isnan(found.sqnr_db)


# ---- verify


@pytest.mark.parametrize("example", READ, ids=lambda example: example.folder)
def test_examples_are_sound(example):
    found = checkpoints.verify(example.path)
    assert found.ok, found
    assert found.layout == example.layout


DAMAGE = {
    "nvfp4 factor": ("nvfp4", "weight_scale", b"\x7f", "1 of .* factors are NaN"),
    "nvfp4 negative factor": ("nvfp4", "weight_scale", b"\x81", "1 of .* factors are NaN"),
    "nvfp4 divisor": ("nvfp4", "weight_global_scale", b"\0\0\xc0\x7f", "positive and finite"),
    "mx factor": ("mxfp8", "weight_scale", b"\xff", "1 of .* factors are NaN"),
    "fp8 code": ("fp8_rowwise", "weight", b"\xff", "1 of .* codes are NaN"),
    "fp8 factor": ("fp8_rowwise", "weight_scale", b"\0\0\xc0\x7f", "factors are NaN"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_values_are_found(case, tmp_path):
    fmt, stored, data, message = DAMAGE[case]
    made = weight(fmt, 64, 128, nominal=torch.float32)
    path = saved(tmp_path, {"x.weight": made, "x.bias": torch.zeros(2)})
    name = "x.weight_packed" if (fmt, stored) == ("nvfp4", "weight") else f"x.{stored}"
    assert checkpoints.verify(path).ok
    change(path, name, data)
    found = checkpoints.verify(path)
    assert not found.ok
    (problem,) = found.problems
    assert problem.tensor.startswith("x.weight")
    assert re.search(message, problem.text)
    json.dumps(found.to_dict())


def test_plain_values_that_are_not_finite(tmp_path):
    state = {"mask": torch.tensor([0.0, -math.inf]), "b": torch.tensor([math.nan]).bfloat16()}
    found = checkpoints.verify(saved(tmp_path, state, layout="plain"))
    assert {(p.severity, p.tensor) for p in found.problems} == {("error", "b"), ("warning", "mask")}


def test_a_file_that_does_not_open_is_a_problem(tmp_path):
    path = saved(tmp_path, {"x": torch.ones(4)}, layout="plain") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = checkpoints.verify(path)
    assert not found.ok
    assert found.problems[0].file == "model.safetensors"
    assert not checkpoints.verify(tmp_path / "missing").ok


def test_checksums_of_the_index_and_of_sidecars(tmp_path):
    state = {f"{i}.weight": torch.randn(32, 64) for i in range(3)}
    source = saved(tmp_path, state, layout="plain")
    out = tmp_path / "out"
    checkpoints.convert(source, out, "plain", shard_size=9000)
    found = checkpoints.verify(out)
    assert (found.ok, found.files_hashed) == (True, 3)
    change(out, "1.weight", b"\1")
    found = checkpoints.verify(out)
    assert [problem.file for problem in found.problems] == ["model-00002-of-00003.safetensors"]

    sidecar, data = source / "SHA256SUMS", (source / "model.safetensors").read_bytes()
    sidecar.write_text(f"{hashlib.sha256(data).hexdigest()}  model.safetensors\n0 junk\n")
    assert checkpoints.verify(source).files_hashed == 1
    sidecar.write_text(f"{'0' * 64} *model.safetensors\n")
    assert not checkpoints.verify(source).ok


def test_a_checksum_names_no_file_outside_the_folder(tmp_path):
    state = {f"{i}.weight": torch.randn(32, 64) for i in range(2)}
    out = tmp_path / "out"
    checkpoints.convert(saved(tmp_path, state, layout="plain"), out, "plain", shard_size=9000)
    index = out / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["metadata"]["sha256"] = {"../a/model.safetensors": "0" * 64, "missing": "0" * 64}
    index.write_text(json.dumps(text))
    found = checkpoints.verify(out)
    assert found.files_hashed == 0
    assert len(found.problems) == 2
    for damaged in ([1], {"model": 3}, "text"):
        text["metadata"]["sha256"] = damaged
        index.write_text(json.dumps(text))
        assert checkpoints.verify(out).files_hashed == 0


def test_a_sidecar_that_links_out_of_the_folder_is_not_read(tmp_path):
    source = saved(tmp_path, {"weight": torch.randn(32, 64)}, layout="plain")
    (tmp_path / "sums").write_text(f"{'0' * 64}  model.safetensors\n")
    (source / "SHA256SUMS").symlink_to(tmp_path / "sums")
    found = checkpoints.verify(source)
    assert found.files_hashed == 0
    (problem,) = found.problems
    assert problem.file == "SHA256SUMS"
    assert "does not link" in problem.text


def test_unlisted_tensors_are_a_warning(tmp_path):
    state = {f"{i}.weight": torch.randn(32, 64) for i in range(3)}
    out = tmp_path / "out"
    checkpoints.convert(saved(tmp_path, state, layout="plain"), out, "plain", shard_size=17000)
    index = out / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    del text["weight_map"]["0.weight"]  # its shard holds 1.weight too
    index.write_text(json.dumps(text))
    found = checkpoints.verify(out)
    assert found.ok
    assert [(p.severity, p.tensor) for p in found.problems] == [("warning", "0.weight")]
    assert list(checkpoints.inspect(out).odd) == ["0.weight"]
