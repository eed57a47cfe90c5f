"""benchmarks.decode and benchmarks.generation: peers, rows, files. No time is asserted."""

import dataclasses
import json
import re
from pathlib import Path

import numpy
import pytest
import torch

import qtensor
from benchmarks import bandwidth, decode, decode_llama_cpp, decode_peers, machine
from benchmarks.settings import Settings
from benchmarks.timer import summary

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
SMALL = (128, 256)


@pytest.mark.parametrize("count", [0, 255, 256, 4096, (1 << 20) + 1000, (3 << 20) + 256])
def test_reading_adds_up_the_words(count):
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    words = data[: count // 256 * 256].numpy().view(numpy.int64)
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert bandwidth.read(data) == int(words.sum()), "the sum of 64-bit words wraps"
        finally:
            torch.set_num_threads(before)


def test_calls_take_the_copies_in_turn():
    seen = []
    call = bandwidth.in_turn([lambda i=i: seen.append(i) for i in range(3)])
    for _ in range(5):
        call()
    assert seen == [1, 2, 0, 1, 2]


def test_every_format_and_option_of_weights_is_measured():
    for quick in (False, True):
        found = {q.format for q in decode.quantizers(quick)}
        assert found == set(qtensor.formats()) - {"fp8_delayed"}
    names = {q.canonical for q in decode.quantizers(quick=False)}
    assert names >= {"mxfp6(packed=True)", "fp8_blockwise(block_scaling_dim=2)"}


@pytest.mark.parametrize("way", decode_peers.WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("rows", [1, 4])
def test_peers_multiply(way, rows):
    """A peer that computes another product would be no comparison.

    Activations in 8 bits have an error of 1/127 of the largest of a group, bfloat16 2^-8: less than
    a fiftieth of the sum of magnitudes.
    """
    if way.name.startswith("onnxruntime"):
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        pytest.importorskip("onnx", reason="onnx is not installed")
    if way.name.startswith("llama.cpp"):
        try:
            decode_llama_cpp.library()
        except ImportError as error:
            pytest.skip(reason=f"the library of llama.cpp is not installed: {error}")
    weight = way.make(*SMALL, torch.Generator().manual_seed(1))
    x = torch.randn(rows, SMALL[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    y = weight.bind(x, 1)().float()
    values = weight.values()
    exact = x.double() @ values.double().T
    magnitude = x.double().abs() @ values.double().abs().T
    assert bool(((y - exact).abs() <= magnitude / 50).all())
    assert not bool(((y * 1.2 - exact).abs() <= magnitude / 50).all())
    assert way.bits <= 8 * weight.nbytes / (SMALL[0] * SMALL[1]) <= way.bits + 1


def test_rows_have_shares_and_ratios():
    table = decode.Table((100, 1000), 4, 2)
    weights = [
        decode.Weights("fp8", 8, 100_000, None),
        decode.Weights("mxfp4", 4, 53_125, None),
        decode.Weights("bf16", 16, 200_000, None),
        decode.Weights("torch int8", 8, 100_200, None),
        decode.Weights("torch int4", 4, 62_500, None),
    ]
    times = {"read": 10, "fp8": 20, "mxfp4": 16, "bf16": 40, "torch int8": 30, "torch int4": 8}
    rows = decode.rows_of(table, weights, {name: summary([us]) for name, us in times.items()})
    fp8, mxfp4, bf16, *_ = rows
    assert (fp8["size"], fp8["threads"], fp8["tokens"]) == ("100x1000", "2 threads", "M = 4")
    assert fp8["read_gbs"] == 10.0
    assert (fp8["gbs"], fp8["share"], fp8["bits"]) == (5.0, 0.5, 8.0)
    assert mxfp4["share"] == pytest.approx(53_125 / 16 / 10_000)
    assert mxfp4["bits"] == 4.25
    ratios = {key: value for key, value in fp8.items() if key.endswith("_ratio")}
    assert ratios == {"bf16_ratio": 2.0, "torch_int8_ratio": 1.5}
    ratios = {key: value for key, value in mxfp4.items() if key.endswith("_ratio")}
    assert ratios == {"bf16_ratio": 2.5, "torch_int4_ratio": 0.5}
    assert not any(key.endswith("_ratio") for key in bf16)


def test_a_quick_run(tmp_path, monkeypatch):
    monkeypatch.setitem(decode.SIZES, True, (SMALL,))
    monkeypatch.setitem(decode.ROWS, True, (1,))
    monkeypatch.setitem(decode.COPIES_BYTES, True, 1)
    words = ["--quick", "--peers", "none", "--output", str(tmp_path)]
    assert decode.main([*words, "--threads", str(torch.get_num_threads())]) == 0
    written = json.loads((tmp_path / "decode_cpu_quick.json").read_text())
    cases = [row["case"] for row in written["rows"] if row["threads"] == "1 thread"]
    ways = [way.name for way in decode_peers.ways()[0]]
    ours = {name for name in qtensor.formats() if name != "fp8_delayed"}
    both = {f"{weight}, x in {left}" for weight, left in decode.BOTH}
    assert set(cases) == ours | both | set(ways)
    assert cases[0] == "fp8", "whose codes `read` takes"
    assert "## 128x256, 1 thread, M = 1" in (tmp_path / "decode_cpu_quick.md").read_text()


def few_formats(monkeypatch):
    """Let a run measure two formats alone."""
    chosen = [qtensor.quantizer("fp8"), qtensor.quantizer("nvfp4")]
    monkeypatch.setattr(decode, "quantizers", lambda quick: chosen)
    monkeypatch.setattr(decode, "BOTH", ())


def test_tables_of_chosen_rows_replace_those_of_the_file(tmp_path, monkeypatch):
    few_formats(monkeypatch)
    monkeypatch.setitem(decode.SIZES, True, (SMALL,))
    monkeypatch.setitem(decode.ROWS, True, (1, 16))
    monkeypatch.setitem(decode.COPIES_BYTES, True, 1)
    words = ["--quick", "--peers", "none", "--output", str(tmp_path), "--threads", "1"]
    decode.main(words)
    path = tmp_path / "decode_cpu_quick.json"
    before = json.loads(path.read_text())["rows"]
    decode.main([*words, "--rows", "2,16"])
    after = json.loads(path.read_text())["rows"]
    tables = list(dict.fromkeys(row["tokens"] for row in after))
    assert tables == ["M = 1", "M = 2", "M = 16"]
    assert [r for r in after if r["tokens"] == "M = 1"] == [
        r for r in before if r["tokens"] == "M = 1"
    ]
    assert len(after) == len(before) // 2 * 3


def test_tables_of_another_machine_are_not_kept(tmp_path, monkeypatch):
    """A heading names one machine; tables that another one measured are in its own file."""
    few_formats(monkeypatch)
    monkeypatch.setitem(decode.SIZES, True, (SMALL,))
    monkeypatch.setitem(decode.COPIES_BYTES, True, 1)
    words = ["--quick", "--peers", "none", "--output", str(tmp_path), "--threads", "1"]
    monkeypatch.setattr(machine, "cpu_name", lambda: "One Processor")
    monkeypatch.setattr(machine, "cores", lambda: 3)
    monkeypatch.setattr(machine, "instructions", lambda: "AVX2")
    decode.main([*words, "--rows", "1"])
    first = (tmp_path / "decode_cpu_quick.json").read_text()
    monkeypatch.setattr(machine, "cpu_name", lambda: "Another Processor")
    for rows in ("2", "3"):
        decode.main([*words, "--rows", rows])
    assert (tmp_path / "decode_cpu_quick.json").read_text() == first
    other = json.loads((tmp_path / "decode_cpu_another_3_cores_avx2_quick.json").read_text())
    assert other["environment"]["cpu"] == "Another Processor"
    assert list(dict.fromkeys(row["tokens"] for row in other["rows"])) == ["M = 2", "M = 3"]


def test_tables_of_other_versions_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(decode.SIZES, True, (SMALL,))
    monkeypatch.setitem(decode.COPIES_BYTES, True, 1)
    words = ["--quick", "--peers", "none", "--output", str(tmp_path), "--threads", "1"]
    decode.main([*words, "--rows", "1"])
    monkeypatch.setattr(decode, "collect", lambda *_: pytest.fail("it measured first"))
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(SystemExit, match=r"was measured with torch .*, not 1\.0: measure all rows"):
        decode.main([*words, "--rows", "2"])


def test_the_text_says_whether_a_weight_may_be_in_the_cache():
    """Rows of a table are measured in turns: each copy waits for all of its row's other copies."""
    row = {"size": "1x1", "threads": "1 thread", "tokens": "M = 1"}
    rows = [row | {"bytes": nbytes << 20} for nbytes in (10, 30, 60)]
    assert decode.read_between(rows, 100 << 20) == 2 * 100 << 20
    assert decode.read_between(rows, 200 << 20) == 4 * 100 << 20
    small = [row | {"tokens": "M = 2", "bytes": 50 << 20}]
    assert decode.read_between(rows + small, 100 << 20) == 2 * 50 << 20
    for megabytes, said in ((50, "so that none is in it"), (51, "so that some may be in it")):
        text = decode.cache_text(100 << 20, megabytes << 20)
        assert f"read 100 MB or more; the last cache level holds {megabytes} MB, {said}" in text
    assert decode.cache_text(100 << 20, 0).endswith("read 100 MB or more.")


def test_llama_cpp_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv(decode_llama_cpp.FOLDER, str(tmp_path))
    decode_llama_cpp.library.cache_clear()
    try:
        ways, versions, absent = decode_peers.ways()
        missing = decode.document([], Settings(threads=1)).absent
    finally:
        decode_llama_cpp.library.cache_clear()
    names = {f"llama.cpp {name}" for name in decode_peers.LLAMA_CPP}
    assert names <= set(absent)
    assert not names & {way.name for way in ways}
    assert "ggml" not in versions
    (line,) = (text for text in missing if "llama.cpp" in text)
    assert line.startswith("llama.cpp q8_0, llama.cpp q6_K")
    assert "ImportError" in line


def test_the_tables_of_a_size():
    def named(*words, **options):
        made = decode.tables(SMALL, Settings(threads=2), *words, **options)
        return [(table.threads, table.rows) for table in made]

    assert named() == [(threads, rows) for threads in (1, 2) for rows in decode.ROWS[False]]
    assert named([3, 5]) == [(1, 3), (1, 5), (2, 3), (2, 5)]
    assert named([3], one_thread=False) == [(2, 3)]
    assert [table.threads for table in decode.tables(SMALL, Settings(threads=1), [3])] == [1]


def test_no_table_begins_when_time_is_over(monkeypatch):
    monkeypatch.setitem(decode.SIZES, True, (SMALL,))
    assert decode.collect(Settings(quick=True, seconds=-1.0), []) == []


def test_generation(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers (extra transformers) is not installed")
    generation = __import__("benchmarks.generation", fromlist=["main"])
    words = ["--quick", "--formats", "mxfp4", "--output", str(tmp_path)]
    assert generation.main([*words, "--threads", str(torch.get_num_threads())]) == 0
    written = json.loads((tmp_path / "generation_cpu_quick.json").read_text())
    rows = {row["case"]: row for row in written["rows"]}
    assert list(rows) == ["float32", "bfloat16", "mxfp4"]
    assert rows["bfloat16"]["ratio"] == rows["bfloat16"]["mb_ratio"] == 1.0
    assert rows["float32"]["mb_ratio"] == 2.0
    assert rows["mxfp4"]["mb_ratio"] < 0.35
    assert len(rows["mxfp4"]["tokens_s_all"]) == generation.ROUNDS[True]


def test_a_row_is_the_median_of_its_runs():
    generation = pytest.importorskip(
        "benchmarks.generation",
        reason="transformers (extra transformers) is not installed",
        exc_type=ImportError,
    )
    made = generation.Run("bfloat16", 100.0, 1.0, 2.0, torch.zeros(1, 1))
    runs = {
        "bfloat16": [dataclasses.replace(made, tokens_per_second=v) for v in (1.0, 2.0, 9.0)],
        "mxfp4": [dataclasses.replace(made, name="mxfp4", megabytes=30.0, tokens_per_second=5.0)],
    }
    (base, row) = generation.rows_of(runs)
    assert (base["tokens_s"], row["ratio"], row["mb_ratio"]) == (2.0, 2.5, 0.3)


# ---- the documents
# -------------------------------------------------------------------------------------------------

PEER_COLUMNS = ("bf16", "torch", "onnxruntime", "llama.cpp")


def measured_ratios(machine_name, weights):
    """Ratio of each peer, by weight and number of rows; of llama.cpp, that to its fastest type."""
    path = ROOT / f"benchmarks/results/decode_cpu_{machine_name}.json"
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        tokens = row["tokens"].removeprefix("M = ")
        chosen = row["threads"] == "2 threads" and row["size"] == "14336x4096"
        if chosen and row["case"] in weights and tokens in ("1", "4", "16"):
            ratios = {
                peer: [value for key, value in row.items() if re.match(rf"{peer}.*_ratio$", key)]
                for peer in PEER_COLUMNS
            }
            found[row["case"], tokens] = {peer: min(values) for peer, values in ratios.items()}
    return found


WEIGHTS = ("fp8", "mxfp8", "mxfp4", "nvfp4")


def test_the_documents_have_the_measured_ratios():
    """docs/kernels.md repeats the ratios of one machine."""
    measured = measured_ratios("amd_epyc_family_26_2_cores_avx512_with_bf16", WEIGHTS)
    table = (ROOT / "docs/kernels.md").read_text().partition("| weight | rows |")[2]
    found = re.findall(r"^\| `(\S+)` \| (\d+) \| (.*) \|$", table.split("\n\n")[0], re.MULTILINE)
    assert len(found) == len(measured) == 12
    for case, tokens, cells in found:
        texts = [f"{value:.2f}" for value in measured[case, tokens].values()]
        assert cells.split(" | ") == texts, (case, tokens)


@pytest.mark.parametrize(
    "machine_name", ["intel_xeon_2_cores_avx512", "amd_epyc_family_25_2_cores_avx2"]
)
def test_the_documents_have_the_range_of_ratios(machine_name):
    """docs/kernels.md has the lowest and highest ratio of other machines."""
    measured = measured_ratios(machine_name, WEIGHTS)
    assert len(measured) == 12
    document = (ROOT / "docs/kernels.md").read_text()
    (row,) = re.findall(rf"^\| .*/decode_cpu_{machine_name}.md\) \| (.*) \|$", document, re.M)
    columns = [[each[peer] for each in measured.values()] for peer in PEER_COLUMNS]
    assert row.split(" | ") == [f"{min(c):.2f}-{max(c):.2f}" for c in columns]
