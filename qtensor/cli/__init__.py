"""The command ``qtensor``. Slow imports stay inside the command that needs them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from qtensor.core.version import install_command

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"qtensor: the command line needs typer and rich. Run: {install_command('cli')}"
    ) from missing

from qtensor.cli import checkpoints
from qtensor.cli.errors import plain_errors, written_output

app = typer.Typer(
    name="qtensor",
    help="Quantized tensors for PyTorch: FP8, MXFP8, MXFP6, MXFP4, NVFP4.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
kernels = typer.Typer(help="Build, list or remove the native kernels.", no_args_is_help=True)
app.add_typer(kernels, name="kernels")
checkpoints.add_commands(app)

Arch = Annotated[
    str | None,
    typer.Option(metavar="ARCH", help="GEMMs for sm_90a (Hopper), sm_100f (Blackwell) or sm_120f."),
]
RecipeName = Annotated[
    str | None,
    typer.Option(metavar="RECIPE", help="GEMMs for fp8, fp8_blockwise, mxfp8, mxfp4 or nvfp4."),
]


class Backend(StrEnum):
    """Compiler backends that the demo counts graphs in."""

    aot_eager = "aot_eager"
    inductor = "inductor"


@app.command()
def demo(
    formats: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Run only these formats. The default is all."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Quantize this safetensors file instead of the model.",
        ),
    ] = None,
    json: Annotated[
        typer.FileTextWrite | None,
        typer.Option(lazy=False, metavar="FILE", help="Also write the results as JSON."),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="Compiler backend of part 3.")
    ] = Backend.aot_eager,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Run part 3, torch.compile.")
    ] = True,
) -> None:
    """Quantize a real model, run it, and compile it with torch.compile.

    1. Quantize every matrix of the sentence model all-MiniLM-L6-v2: size and error by format.
    2. Compare the model's embeddings with quantized weights to those of float32.
    3. Pass quantized tensors into and out of a compiled function: graphs, breaks, bytes.

    Nothing is downloaded. The exit status is 1 if a compile check fails.
    """
    with plain_errors():
        import qtensor  # noqa: PLC0415 - quick --help
        from qtensor.demo.run import run_demo  # noqa: PLC0415

        names = qtensor.formats() if formats is None else formats.split(",")
        # Each name once, in the order of the option; an unknown one is an error.
        quantizers = [qtensor.quantizer(name.strip()) for name in names]
        chosen = list(dict.fromkeys(quantizer.format for quantizer in quantizers))
        report = run_demo(chosen, weights, backend.value if compile else None, typer.echo)
    if json is not None:
        json.write(report.to_json())
        json.flush()
        typer.echo(f"\nWritten to {json.name}.")
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def formats() -> None:
    """List the formats with bits per value, block, scale and options."""
    with plain_errors():
        from qtensor.cli.console import make_console  # noqa: PLC0415
        from qtensor.cli.format_list import show_formats  # noqa: PLC0415 - quick --help

        show_formats(make_console())


@app.command()
def version() -> None:
    """Print the versions of qtensor, torch and Python."""
    import platform  # noqa: PLC0415 - quick --help

    import torch  # noqa: PLC0415

    import qtensor  # noqa: PLC0415

    python = platform.python_version()
    typer.echo(f"qtensor {qtensor.__version__} (torch {torch.__version__}, Python {python})")


@kernels.command("build")
def kernels_build(
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Build the CPU kernels together with GEMMs.")
    ] = False,
    isa: Annotated[
        str | None,
        typer.Option(
            metavar="ISA", help="avx512, avx2 or baseline. The default is the best of this CPU."
        ),
    ] = None,
    arch: Arch = None,
    recipe: RecipeName = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Number of parallel compilers for GEMMs.", min=1)
    ] = None,
) -> None:
    """Compile kernels now instead of at first use.

    The default is the CPU kernels. With --arch or --recipe, build GEMMs for GPUs; this needs
    torch-qtensor[cutlass-build] but no GPU.
    """
    with plain_errors():
        if arch is None and recipe is None:
            _build_cpu(isa)
            return
        from qtensor.cli.console import make_console  # noqa: PLC0415
        from qtensor.cli.gemm_list import build_gemms  # noqa: PLC0415
        from qtensor.cutlass_gemm import tuning  # noqa: PLC0415 - quick --help

        specs = tuning.select(arch, recipe)
        if cpu or isa is not None:
            _build_cpu(isa)
        build_gemms(make_console(), specs, jobs)


def _build_cpu(isa: str | None) -> None:
    import time  # noqa: PLC0415 - quick --help

    import qtensor.kernels  # noqa: PLC0415

    began = time.monotonic()
    path = qtensor.kernels.build(isa)
    typer.echo(f"{path} ({time.monotonic() - began:.1f} s)")


@kernels.command("list")
def kernels_list(arch: Arch = None, recipe: RecipeName = None) -> None:
    """List the kernels in the cache and those that this CPU uses, or the GEMMs for GPUs."""
    with plain_errors():
        from qtensor.cli.console import make_console  # noqa: PLC0415
        from qtensor.cli.gemm_list import show_gemms  # noqa: PLC0415
        from qtensor.cli.kernel_list import show_kernels  # noqa: PLC0415
        from qtensor.cutlass_gemm import tuning  # noqa: PLC0415 - quick --help

        if arch is None and recipe is None:
            show_kernels(make_console())
        else:
            show_gemms(make_console(), tuning.select(arch, recipe))


@kernels.command("clean")
def kernels_clean(arch: Arch = None, recipe: RecipeName = None) -> None:
    """Remove all compiled kernels, or the GEMMs of an architecture and recipe.

    A kernel that is needed again is compiled again.
    """
    with plain_errors():
        from qtensor.build.cache import cache_dir, clean  # noqa: PLC0415 - quick --help
        from qtensor.cutlass_gemm import library, tuning  # noqa: PLC0415

        every = arch is None and recipe is None
        removed = clean() if every else library.clean(tuning.select(arch, recipe))
        size = sum(entry.size for entry in removed) / 1e6
        noun = "library" if len(removed) == 1 else "libraries"
        typer.echo(f"removed {len(removed)} {noun}, {size:.1f} MB, from {cache_dir()}")


def main() -> None:
    """Run the command line."""
    with written_output():
        app()
