"""``qtensor inspect | convert | dequantize | diff | verify | report``: files of weights.

The exit status is 0 if all is well, 1 if ``diff`` finds a difference or ``verify`` an error, and 2
if the call or its input is wrong.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from qtensor.cli.errors import plain_errors, usage_errors
from qtensor.core.errors import check, fail


def _path(text: str) -> Path:
    """Return a path; pathlib reads an empty one as the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


def _existing(text: str) -> Path:
    """Return the path of a file or folder that exists."""
    path = _path(text)
    if not path.exists():
        raise typer.BadParameter(f"path {text!r} does not exist")
    return path


Source = Annotated[
    Path, typer.Argument(parser=_existing, metavar="PATH", help="A file, a folder or an index.")
]
From = Annotated[
    Path, typer.Argument(parser=_existing, metavar="SRC", help="A file, a folder or an index.")
]
FileLayout = Annotated[
    str | None, typer.Option(metavar="L", help="Layout of the file, if not recognised.")
]
SourceLayout = Annotated[
    str | None,
    typer.Option("--source-layout", metavar="L", help="Layout of the source, if not recognised."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON; docs/checkpoints.md lists the keys.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that exists.")]
ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Most bytes of tensors in a file, such as 5GB.")
]
Jobs = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads; by default one for each core.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Begin again after an interruption instead of going on.")
]
Every = Annotated[bool, typer.Option("--all", help="List every tensor.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (inspect, convert, dequantize, diff, verify, report):
        app.command()(command)


def inspect(
    path: Source,
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this tensor with its first blocks.")
    ] = None,
    layout: FileLayout = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="With --tensor: show codes of these rows.")
    ] = None,
    cols: Annotated[
        str | None, typer.Option(metavar="A:B", help="With --tensor: show codes of these columns.")
    ] = None,
    bits: Annotated[
        str | None, typer.Option(metavar="R,C", help="With --tensor: explain an element's bits.")
    ] = None,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """Show layout, formats, counts, bytes and odd tensors of a checkpoint."""
    region = (rows, cols, bits)
    if tensor is None and region != (None, None, None):
        raise typer.BadParameter("--rows, --cols and --bits need --tensor")
    if tensor == "":
        raise typer.BadParameter("the name of --tensor is empty; --all lists the names")
    with plain_errors():
        from qtensor import checkpoints  # noqa: PLC0415 - quick --help

        if tensor is None:
            _show(checkpoints.inspect(path, layout), as_json, every)
            return
        found = checkpoints.inspect_tensor(path, tensor, layout)
        view = None
        if any(region) or (found.blocks and not as_json):
            view = _view(path, tensor, layout, region)
        _show(found, as_json, every)
        if view is not None and not as_json:
            typer.echo(view)


def _view(
    path: Path, tensor: str, layout: str | None, region: tuple[str | None, str | None, str | None]
) -> Any:
    """Return the view that --rows, --cols and --bits ask for, or a view of the first blocks."""
    rows, cols, bits = region
    from qtensor.checkpoints.inspection.summary import view_tensor  # noqa: PLC0415

    with usage_errors():
        element = _numbers("--bits", bits, ",")
        chosen = (_numbers("--rows", rows, ":"), _numbers("--cols", cols, ":"))
        if element is not None:
            around = [e if c is None else c for e, c in zip(element, chosen, strict=True)]
            chosen = (around[0], around[1])
        return view_tensor(path, tensor, chosen, element or False, layout)


def _numbers(option: str, text: str | None, separator: str) -> Any:
    """Return the two numbers of an option such as ``0:8``; None without it."""
    if text is None:
        return None
    parts = text.split(separator)
    good = len(parts) == 2 and all(part.isdecimal() for part in parts)
    check(good, option, f"the form is 0{separator}8", repr(text), "Give two numbers")
    return int(parts[0]), int(parts[1])


def convert(
    src: From,
    dst: Annotated[
        Path,
        typer.Argument(
            parser=_path, metavar="DST", help="A folder, or a .safetensors or .gguf file."
        ),
    ],
    layout: Annotated[
        str,
        typer.Option(metavar="L", help="Layout of the result: compressed-tensors, modelopt, ..."),
    ] = "qtensor",
    format: Annotated[
        str | None,
        typer.Option(metavar="F", help="Quantize to this format: mxfp8, 'mxfp6(packed=True)', ..."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Apply --format only to these names.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Keep these names as they are.")
    ] = None,
    source_layout: SourceLayout = None,
    shard_size: ShardSize = "5GB",
    jobs: Jobs = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another layout; codes are moved, or quantized with --format.

    A weight that the layout cannot hold is an error without --format. A wrong layout prints the
    list of layouts. After an interruption, the same command goes on after the last finished file.
    """
    options = _options(source_layout, shard_size, jobs, overwrite, restart)
    options |= {"include": include or None, "exclude": exclude or None}
    with plain_errors("--source-layout"):
        from qtensor import checkpoints  # noqa: PLC0415 - quick --help
        from qtensor.checkpoints.conversion.request import checked_format  # noqa: PLC0415
        from qtensor.checkpoints.saving import parse_size, writable  # noqa: PLC0415

        with usage_errors():
            writable(layout, dst)
            parse_size(shard_size)
            quantizer = None if format is None else checked_format(format)
        with _progress(quiet=as_json) as progress:
            report = checkpoints.convert(src, dst, layout, quantizer, progress=progress, **options)
        _show(report, as_json, every)


def dequantize(
    src: From,
    dst: Annotated[
        Path,
        typer.Argument(parser=_path, metavar="DST", help="A folder or a .safetensors file."),
    ],
    dtype: Annotated[str, typer.Option(metavar="D", help="bf16, f16 or f32.")] = "bf16",
    ours: Annotated[
        bool, typer.Option("--ours", help="Decode by qtensor's arithmetic, not the origin's.")
    ] = False,
    source_layout: SourceLayout = None,
    shard_size: ShardSize = "5GB",
    jobs: Jobs = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of plain weights, decoded as their origin does to the last bit."""
    options = _options(source_layout, shard_size, jobs, overwrite, restart)
    with plain_errors("--source-layout"):
        from qtensor import checkpoints  # noqa: PLC0415 - quick --help
        from qtensor.checkpoints.conversion.request import checked_dtype  # noqa: PLC0415
        from qtensor.checkpoints.saving import parse_size  # noqa: PLC0415

        with usage_errors():
            found = checked_dtype(dtype)
            parse_size(shard_size)
        rounding = None if ours else "origin"
        with _progress(quiet=as_json) as progress:
            report = checkpoints.dequantize(src, dst, found, rounding, progress=progress, **options)
        _show(report, as_json, every)


def diff(
    a: Annotated[
        Path, typer.Argument(parser=_existing, metavar="A", help="A file, a folder or an index.")
    ],
    b: Annotated[Path, typer.Argument(parser=_existing, metavar="B", help="The other one.")],
    layout_a: Annotated[
        str | None, typer.Option(metavar="L", help="Layout of A, if not recognised.")
    ] = None,
    layout_b: Annotated[
        str | None, typer.Option(metavar="L", help="Layout of B, if not recognised.")
    ] = None,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: equal bytes, equal values, SQNR. The status is 1 if they differ."""
    with plain_errors("--layout-a or --layout-b"):
        from qtensor import checkpoints  # noqa: PLC0415 - quick --help

        comparison = checkpoints.compare(a, b, (layout_a, layout_b))
        _show(comparison, as_json, every)
    if not comparison.equal:
        raise typer.Exit(1)


def verify(path: Source, layout: FileLayout = None, as_json: AsJson = False) -> None:
    """Check structure, factors, values and checksums. The status is 1 if there is an error."""
    with plain_errors():
        from qtensor import checkpoints  # noqa: PLC0415 - quick --help

        found = checkpoints.verify(path, layout)
        _show(found, as_json, True)
    if not found.ok:
        raise typer.Exit(1)


def report(
    path: Source,
    against: Annotated[
        Path | None,
        typer.Option(
            parser=_existing, metavar="BASE", help="The checkpoint from before the quantization."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", parser=_path, metavar="FILE", help="The page.")
    ] = Path("report.html"),
    log: Annotated[
        Path | None,
        typer.Option(
            parser=_existing, metavar="FILE", help="A recording, of qtensor.debug.record(jsonl=)."
        ),
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(parser=_existing, metavar="FILE", help="A result, of SearchResult.save."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="L", help="Layout of PATH, if not recognised.")
    ] = None,
    against_layout: Annotated[
        str | None, typer.Option(metavar="L", help="Layout of BASE, if not recognised.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file.")] = False,
) -> None:
    """Write one HTML page about the weights: errors, heat map, codes, factors, worst blocks."""
    with plain_errors("--layout or --against-layout"):
        from qtensor import reporting  # noqa: PLC0415 - quick --help

        if output.exists() and not overwrite:
            fix = "Choose another path, or pass overwrite=True"
            fail("model_report", "the report is a new file", f"{str(output)!r}, which exists", fix)
        with _progress(counted=True) as progress:
            found = reporting.model_report(
                path,
                against=against,
                log=log,
                search=search,
                layouts=(layout, against_layout),
                progress=progress,
            )
        found.save(output, overwrite=overwrite)
        typer.echo(found)
        typer.echo(f"wrote {output}")


# ---- shared by the commands


def _options(
    source_layout: str | None, shard_size: str, jobs: int | None, overwrite: bool, restart: bool
) -> dict[str, Any]:
    return {
        "source_layout": source_layout,
        "shard_size": shard_size,
        "jobs": jobs,
        "overwrite": overwrite,
        "resume": not restart,
    }


def _progress(**options: bool) -> AbstractContextManager[Any]:
    from qtensor.cli import tables  # noqa: PLC0415 - rich.progress is slow to import

    return tables.progress_bar(**options)


def _show(found: Any, as_json: bool, every: bool) -> None:
    """Print a result as JSON or as a table."""
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return
    from qtensor.cli import tables  # noqa: PLC0415 - quick --help

    tables.show(found, every)
