"""The pure parts of the benchmarks: the floor, tables, files, peers that are absent. No time is
asserted.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import qtensor
from benchmarks import (
    cases,
    dequantize,
    floor,
    linear,
    machine,
    peer,
    quantize,
    report,
    run,
    settings,
    suite,
)
from benchmarks.cases import Spec
from benchmarks.floor import Traffic
from benchmarks.peer import Job, Peer
from benchmarks.report import Column, Report
from benchmarks.settings import Settings
from benchmarks.timer import measure, summary
from qtensor.kernels.cpu import sources

pytestmark = pytest.mark.project


TWO_READS = {"fp8", "nvfp4"}
MXFP8 = Spec(qtensor.quantizer("mxfp8"), cases.TINY, torch.bfloat16)
HERE = {
    "date": "2001-02-03",
    "cpu": "Some CPU",
    "cores": 4,
    "instructions": "AVX2",
    "threads": 2,
    "machine": "m",
    "system": "s",
    "python": "3",
    "torch": "2",
    "qtensor": "0",
    "peers": {"other": "1.2"},
    "variables": {"OMP_WAIT_POLICY": "passive"},
}
MADE = Report(
    "quantize",
    "Title",
    "Text.",
    HERE,
    (
        Column("case", "case"),
        Column("fresh_us", "fresh us", 1),
        Column("share", "share", 0, percent=True),
        Column("other_ratio", "x other", 2),
    ),
    ("size", "dtype"),
    (
        {
            "size": "2x2",
            "dtype": "a",
            "case": "f",
            "fresh_us": 1.25,
            "share": 0.5,
            "other_ratio": 3.0,
        },
        {
            "size": "4x4",
            "dtype": "a",
            "case": "f",
            "fresh_us": 2.0,
            "share": 1.25,
            "other_ratio": None,
        },
    ),
    ("other has no g",),
)


# ---- floor ---------------------------------------------------------------------------------------


def test_traffic_charges_each_read():
    traffic = Traffic(read=100, written=30, reads=2)
    assert (traffic.moved, traffic.moved_once) == (230, 130)


@pytest.mark.parametrize("name", qtensor.formats())
def test_formats_with_a_tensor_wide_maximum_read_twice(name):
    assert floor.reads(qtensor.quantizer(name), (64, 256)) == 1 + (name in TWO_READS)


def test_a_maximum_a_row_is_one_read():
    assert floor.reads(qtensor.quantizer("nvfp4", row_scaled=True), (64, 256)) == 1


def test_traffic_is_input_and_all_outputs():
    x = torch.ones(64, 256, dtype=torch.bfloat16)
    one, both = (
        floor.quantize_traffic(x, qtensor.quantize(x, "mxfp8", columnwise=c)) for c in (False, True)
    )
    assert one == Traffic(64 * 256 * 2, 64 * 256 + 128 * 8, 1)
    assert both.written == one.written + 64 * 256 + 4 * 256
    back = floor.dequantize_traffic(qtensor.quantize(x, "mxfp8"), torch.float32)
    assert back == Traffic(one.written, 64 * 256 * 4, 1)


def test_shares_and_bandwidths():
    assert floor.gbs(3_000_000, us=1000.0) == 3.0
    assert floor.share(3_000_000, us=1000.0, bandwidth=6.0) == 0.5
    x = torch.zeros(1000, dtype=torch.bfloat16)
    assert floor.copy_gbs(x, copy_us=1.0) == 4.0, "read and written"


def test_the_copy_reuses_its_buffers():
    call = floor.copy_call(torch.arange(4.0))
    assert call().data_ptr() == call().data_ptr()
    assert call().tolist() == [0, 1, 2, 3]


# ---- plan ----------------------------------------------------------------------------------------


def test_every_format_is_measured():
    for quick in (False, True):
        for plan in (cases.grid(quick), dequantize.plan(quick), linear.plan(quick)):
            assert {spec.quantizer.format for spec in plan} == set(qtensor.formats())
    assert all(max(spec.shape) <= 4096 for spec in cases.grid(quick=True))


def test_the_main_options_are_measured():
    names = {quantizer.canonical for quantizer in cases.quantizers(quick=False)}
    assert names >= {
        "mxfp8(columnwise=True)",
        "mxfp8(rowwise=False,columnwise=True)",
        "fp8_blockwise(block_scaling_dim=2)",
        "nvfp4(with_2d_quantization=True)",
        "nvfp4(stochastic_rounding=True)",
        "nvfp4(rowwise=False,columnwise=True,with_rht=True)",
    }


def test_dequantize_takes_one_direction():
    assert not any(s.quantizer.rowwise and s.quantizer.columnwise for s in dequantize.plan(False))


# ---- reports -------------------------------------------------------------------------------------


def test_json_round_trip():
    assert report.from_json(report.to_json(MADE)) == MADE
    changed = dataclasses.replace(MADE, absent=())
    assert report.from_json(report.to_json(changed)) != MADE


def test_tables():
    assert report.table(MADE.columns, MADE.rows) == [
        "| case | fresh us | share | x other |",
        "|---|---:|---:|---:|",
        "| `f` | 1.2 | 50% | 3.00 |",
        "| `f` | 2.0 | 125% |  |",
    ]


def test_a_column_without_values_is_left_out():
    assert report.table(MADE.columns, MADE.rows[1:])[0] == "| case | fresh us | share |"


def test_the_document_names_device_versions_date_and_absences():
    text = report.markdown(MADE)
    for part in (
        "2001-02-03",
        "Some CPU, 4 cores, AVX2, 2 threads",
        "other 1.2",
        "OMP_WAIT_POLICY=passive",
    ):
        assert part in text
    assert text.index("## 2x2, a") < text.index("## 4x4, a") < text.index("- other has no g")


def test_a_quick_run_does_not_overwrite(tmp_path):
    full, quick = (report.write(MADE, tmp_path, quick) for quick in (False, True))
    assert {p.name for p in tmp_path.iterdir()} == {
        f"quantize_cpu{suffix}{kind}" for suffix in ("", "_quick") for kind in (".md", ".json")
    }
    assert (full.name, quick.name) == ("quantize_cpu.md", "quantize_cpu_quick.md")
    assert report.read(tmp_path / "quantize_cpu_quick.json") == MADE


def test_generations_of_a_cpu_without_a_number_have_names_of_their_own(tmp_path):
    """Virtual machines hide the number of a model."""
    cpuinfo = tmp_path / "cpuinfo"

    def name(vendor: str, family: int, model: str) -> str:
        cpuinfo.write_text(
            f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: {model}\n"
        )
        return machine.cpu_name(cpuinfo)

    assert name("AuthenticAMD", 25, "AMD EPYC") == "AMD EPYC (family 25)"
    assert name("AuthenticAMD", 26, "AMD EPYC") == "AMD EPYC (family 26)"
    assert name("AuthenticAMD", 26, "AMD EPYC 9575F") == "AMD EPYC 9575F"
    assert name("GenuineIntel", 6, "Intel(R) Xeon(R)") == "Intel(R) Xeon(R)"


def test_every_machine_has_its_own_file(tmp_path):
    others = [
        HERE | {"cpu": "AMD EPYC 9454P 48-Core Processor @ 2.75GHz"},
        HERE | {"cores": 2},
        HERE | {"instructions": "AVX-512 with BF16"},
    ]
    names = [
        report.write(dataclasses.replace(MADE, environment=here), tmp_path, quick=False).name
        for here in (HERE, *others, HERE)
    ]
    assert names == [
        "quantize_cpu.md",
        "quantize_cpu_amd_epyc_9454p_48_core_4_cores_avx2.md",
        "quantize_cpu_some_2_cores_avx2.md",
        "quantize_cpu_some_4_cores_avx512_with_bf16.md",
        "quantize_cpu.md",
    ]
    quick = report.data_path(tmp_path, "quantize", True, others[1])
    assert quick.name == "quantize_cpu_quick.json", "there is no other machine's quick run"
    report.write(MADE, tmp_path, quick=True)
    quick = report.data_path(tmp_path, "quantize", True, others[1])
    assert quick.name == "quantize_cpu_some_2_cores_avx2_quick.json"


def test_a_file_from_before_instruction_sets_is_of_the_same_machine(tmp_path):
    old = {key: value for key, value in HERE.items() if key != "instructions"}
    report.write(dataclasses.replace(MADE, environment=old), tmp_path, quick=False)
    assert report.data_path(tmp_path, "quantize", False, HERE).stem == "quantize_cpu"
    assert report.data_path(tmp_path, "quantize", False, HERE | {"cores": 5}).stem != "quantize_cpu"


def test_the_heading_names_the_instructions(monkeypatch):
    def named(isa, found):
        monkeypatch.setattr(sources, "choose_isa", lambda: isa)
        monkeypatch.setattr(sources, "capabilities", lambda: found)
        return machine.instructions()

    monkeypatch.setattr(machine.native, "library", object)
    assert named("avx512", {"avx512_bf16": True}) == "AVX-512 with BF16"
    both = {"avx512_bf16": True, "amx_bf16": True}
    assert named("avx512", both) == "AVX-512 with BF16 and AMX"
    assert named("avx512", {"avx512_bf16": False}) == "AVX-512"
    assert named("avx2", {"avx512_bf16": True}) == "AVX2", "QTENSOR_CPU_ISA may choose less"
    assert named("baseline", {}) == "portable C++"
    monkeypatch.setattr(machine.native, "library", lambda: "switched off")
    assert machine.instructions() == "no native kernels"


def test_the_last_cache_level_of_the_cores_of_this_process(tmp_path, monkeypatch):
    """Four cores, in two groups that share a third level each; the other levels do not count."""
    assert machine.last_cache_bytes(tmp_path) == 0
    for core in range(4):
        group = "0-1" if core < 2 else "2-3"
        for index, (level, shared, size) in enumerate([
            (1, core, "48K"),
            (1, core, "32K"),
            (2, core, "2048K"),
            (3, group, "32768K"),
        ]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (folder / name).write_text(f"{text}\n")
    for cores, megabytes in (([0, 1], 32), ([1, 2], 64), ([3], 32)):
        monkeypatch.setattr(machine, "core_numbers", lambda cores=cores: cores)
        assert machine.last_cache_bytes(tmp_path) == megabytes << 20


def test_missing_rows_are_grouped_by_reason():
    results = suite.Results()
    for case in ("a", "b"):
        for size in ("2x2", "4x4"):
            results.note("fails", {"size": size, "dtype": "d", "case": case})
    results.note("slow", {"size": "8x8", "dtype": "d", "case": "a"})
    assert results.lines() == ["fails: `a`, `b` (2x2 d, 4x4 d)", "slow: `a` (8x8 d)"]


# ---- peers ---------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, peer.MODULES["torchao"], raising=False)
    peers, absent = peer.load(["torchao"])
    assert peers == []
    assert absent["torchao"].startswith("not installed (")
    made = suite.report("quantize", ("", ""), [], suite.Results(), Settings(absent_peers=absent))
    assert made.absent == (f"torchao, {absent['torchao']}",)


def test_an_unknown_peer_is_an_error():
    with pytest.raises(
        ValueError, match="unknown peer 'nobody'; known: torchao, compressed-tensors"
    ):
        peer.load(["nobody"])
    with pytest.raises(SystemExit, match="unknown peer"):
        settings.parse("quantize", "", ["--peers", "nobody"])


def test_every_peer_has_a_module():
    root = Path(peer.__file__).parents[1]
    assert all((root / f"{m.replace('.', '/')}.py").exists() for m in peer.MODULES.values())


def test_names_of_peers():
    assert settings.peer_names("torchao, compressed-tensors") == ["torchao", "compressed-tensors"]
    assert settings.peer_names("none") == []


def failing(*_):
    raise RuntimeError("broken\nby design")


@pytest.mark.parametrize(
    ("spec", "quick", "expected"),
    [
        (MXFP8, False, {"p eager": "fails with RuntimeError: broken", "p compiled": "has none"}),
        (
            MXFP8,
            True,
            {"p eager": "fails with RuntimeError: broken", "p compiled": "is left out of most"},
        ),
        (
            Spec(qtensor.quantizer("mxfp8"), cases.LARGE, torch.bfloat16),
            True,
            {"p": "is left out of large"},
        ),
        (
            Spec(qtensor.quantizer("fp8"), cases.TINY, torch.bfloat16),
            False,
            {"p": "has no such format"},
        ),
    ],
)
def test_what_a_peer_cannot_do_is_named(spec, quick, expected):
    other = Peer("p", "1", {"mxfp8": Job(failing)})
    cell = suite.Cell({}, {}, torch.zeros(1))
    chosen = Settings(quick=quick, peers=(other,))
    suite.add_peers(cell, spec, chosen, lambda job, c: "has none" if c else lambda: job.quantize(0))
    assert cell.functions == {}
    assert cell.absent.keys() == expected.keys()
    assert all(cell.absent[name].startswith(text) for name, text in expected.items())


# ---- measuring -----------------------------------------------------------------------------------


def test_a_row():
    """One row from end to end, with a peer that is ourselves."""
    mine = Peer("my-self", "1", {"mxfp8": Job(lambda x: qtensor.quantize(x, "mxfp8"))})
    chosen = Settings(quick=True, peers=(mine,))
    results = suite.collect(
        [MXFP8], quantize.build, lambda cell, t: suite.bounded(cell, t, chosen), chosen
    )
    (row,) = results.rows
    assert (row["size"], row["dtype"], row["case"]) == ("16x32", "bfloat16", "mxfp8")
    assert row["moved_bytes"] == 2 * 16 * 32 + 16 * 32 + 128 * 4
    assert row["my_self_eager_ratio"] == row["my_self_eager_us"] / row["fresh_us"]
    assert row["share"] == pytest.approx(
        row["moved_bytes"] / row["reused_us"] / 1000 / row["copy_gbs"]
    )
    assert row["floor_gbs"] * row["share"] == pytest.approx(row["throughput_gbs"])
    shown = {column.key for column in suite.bounded_columns(chosen, "input GB/s")}
    assert shown - set(row) == {"my_self_compiled_us", "my_self_compiled_ratio"}


def test_the_share_that_instructions_leave():
    """The limit is that of a call whose tensor stays in the cache, spread over the threads."""
    chosen = Settings(quick=True, threads=2)
    spec = dataclasses.replace(MXFP8, shape=(1024, 1024))  # four times the cached bytes
    cell = quantize.build(spec, chosen)
    timings = {
        "copy": summary([100.0]), "reused": summary([200.0]), "fresh": summary([300.0]),
        "in cache": summary([80.0]),
    }  # fmt: skip
    values = quantize.values(cell, timings, chosen)
    assert values["share"] / values["limit"] == pytest.approx(80 * 4 / 2 / 200)
    del timings["in cache"]
    assert quantize.values(cell, timings, chosen)["limit"] is None


def test_no_row_begins_when_time_is_over():
    chosen = Settings(seconds=-1.0)
    results = suite.collect([MXFP8], quantize.build, lambda cell, t: {}, chosen)
    assert results.rows == []
    assert results.lines() == ["out of time after -1 s: `mxfp8` (16x32 bfloat16)"]


def test_only_the_sizes_that_were_asked_for():
    words = ["--quick", "--peers", "none", "--sizes", "4x32"]
    words += ["--threads", str(torch.get_num_threads())]
    chosen = settings.parse("quantize", "", words)
    wanted = dataclasses.replace(MXFP8, shape=(4, 32))
    results = suite.collect([MXFP8, wanted], quantize.build, lambda cell, t: {}, chosen)
    assert [row["size"] for row in results.rows] == ["4x32"]
    assert results.lines() == []


def test_the_timer_takes_turns_and_restores_the_threads():
    order = []
    before = torch.get_num_threads()
    functions = {"a": lambda: order.append(torch.get_num_threads()), "b": lambda: order.append("b")}
    timings = measure(functions, bursts=4, threads=before + 1)
    assert torch.get_num_threads() == before
    assert {n: t.bursts for n, t in timings.items()} == {"a": 4, "b": 4}
    assert set(order) == {before + 1, "b"}


def test_a_limit_of_time_leaves_some_bursts():
    assert measure({"a": lambda: None}, bursts=50, seconds=0.0)["a"].bursts == 2


def test_median_and_quartiles():
    found = summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median_us, found.low_us, found.high_us, found.bursts) == (3.0, 1.5, 52.0, 5)
    assert summary([7.0]).median_us == 7.0
    assert summary([7.0]).bursts == 1


# ---- run -----------------------------------------------------------------------------------------


def test_run_passes_the_options_on():
    options = settings.parser("run", "").parse_args(["--quick", "--threads", "3", "--output", "x"])
    words = run.command("linear", options)[4:]
    assert words[:4] == ["benchmarks.linear", "--output", "x", "--quick"]
    assert words[4:] == [
        "--peers",
        "torchao",
        "--threads",
        "3",
        "--seconds",
        str(run.QUICK_SECONDS["linear"]),
    ]
    assert run.command("plot", options)[4:] == ["benchmarks.plot", "--output", "x", "--quick"]


def test_the_plot_takes_the_largest_size(tmp_path):
    plot = pytest.importorskip(
        "benchmarks.plot",
        reason="matplotlib is not installed (extra 'bench')",
        exc_type=ImportError,
    )
    rows = tuple(
        {
            "size": f"{n}x{n}",
            "dtype": "bfloat16",
            "case": case,
            "throughput_gbs": 1.0,
            "floor_gbs": 2.0,
            "share": 0.5,
            "copy_gbs": 3.0,
        }
        for n in (64, 1024, 128)
        for case in ("fp8", "mxfp8", "mxfp8(columnwise=True)")
    )
    made = dataclasses.replace(MADE, rows=rows, environment=HERE | machine.identity())
    assert plot.chosen(made)[0] == "1024x1024"
    assert [row["case"] for row in plot.chosen(made)[1]] == ["fp8", "mxfp8"]
    with pytest.raises(FileNotFoundError, match=r"run benchmarks.quantize first"):
        plot.make(tmp_path, quick=False)
    report.write(MADE, tmp_path, quick=False)
    with pytest.raises(FileNotFoundError, match=r"no results of this machine"):
        plot.make(tmp_path, quick=False)
    stem = report.write(made, tmp_path, quick=False).stem.replace("quantize", "throughput")
    assert stem.startswith("throughput_cpu_"), "the first file is another machine's"
    drawn = plot.make(tmp_path, quick=False)
    assert [path.name for path in drawn] == [f"{stem}.png", f"{stem}.svg"]
