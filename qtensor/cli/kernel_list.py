"""``qtensor kernels list``: the compiled kernels in the cache, and those that this machine uses."""

import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from qtensor.build.cache import Built, cache_dir, library_path, list_built
from qtensor.cli.console import make_table
from qtensor.core.errors import QTensorError
from qtensor.cutlass_gemm.library import built_specs
from qtensor.kernels.cpu import prebuilt, sources


def show_kernels(console: Console) -> None:
    """Print a table of the libraries, and below it what this machine uses."""
    built = list_built()
    current, problem = current_libraries()
    current |= dict.fromkeys(built_specs().values(), "current")
    if built:
        table = make_table("kernels", "state", ">size", "built", "folder")
        for entry in built:
            table.add_row(*row(entry, current, known=problem is None))
        console.print(table)
    else:
        console.print("No kernels are built. Run: qtensor kernels build")
    console.print(f"cache: {escape(str(cache_dir()))}", soft_wrap=True)
    packaged = [isa for isa in sources.ISAS if prebuilt.find(sources.build_spec(isa))]
    if packaged:
        console.print(f"compiled with the package: {', '.join(packaged)}", soft_wrap=True)
    console.print(f"this CPU has: {', '.join(sources.usable_isas())}", soft_wrap=True)
    if problem:
        console.print(f"[yellow]{escape(problem)}[/]", soft_wrap=True)


def current_libraries() -> tuple[dict[Path, str], str | None]:
    """Return the libraries of this version and compiler with their states.

    The second value is the reason if they cannot be determined, else None.
    """
    try:
        chosen = sources.choose_isa()
        paths = {
            library_path(spec): isa
            for isa in sources.ISAS
            for spec in sources.kernel_build_specs(isa)
        }
        ops = sources.ops_build_spec()
    except QTensorError as error:
        return {}, str(error)
    states = {path: "in use" if isa == chosen else "current" for path, isa in paths.items()}
    return states | {library_path(ops): "in use"}, None


def row(entry: Built, current: dict[Path, str], *, known: bool) -> tuple[str, ...]:
    """Return the cells of a library's row. "out of date": no kernel of this version uses it."""
    state = current.get(entry.path, "out of date" if known else "unknown")
    when = datetime.datetime.fromtimestamp(entry.time).strftime("%Y-%m-%d %H:%M")
    return entry.name, state, f"{entry.size / 1e6:.1f} MB", when, escape(entry.path.parent.name)
