"""Define the error of checkpoints: it names the file, the tensor and the layout."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from qtensor.core.errors import QTensorError

_LONGEST = 300
"""Characters of a value from a file that a message repeats."""


class CheckpointError(QTensorError):
    """Signal a checkpoint that cannot be read or written as asked.

    Attributes:
        file: path of the file, or "" if the problem lies in no file.
        tensor: name of the tensor, or "" if the problem concerns the whole file.
        layout: name of the layout, or "" if none was chosen yet.
    """

    def __init__(self, message: str, file: str = "", tensor: str = "", layout: str = "") -> None:
        super().__init__(message)
        self.file, self.tensor, self.layout = file, tensor, layout


class Place(NamedTuple):
    """Say where a problem lies: the file, the tensor and the layout."""

    file: str = ""
    tensor: str = ""
    layout: str = ""

    def __str__(self) -> str:
        words = [f"checkpoint {shorten(repr(self.file))}" if self.file else "checkpoint"]
        if self.tensor:
            words.append(f"tensor {shorten(repr(self.tensor))}")
        if self.layout:
            words.append(f"layout {self.layout}")
        return ", ".join(words)


def shorten(text: object) -> str:
    """Return a text of at most 300 characters; the rest is replaced by "..."."""
    text = str(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def refuse(
    place: Place, rule: str, got: object, fix: str, cause: BaseException | None = None
) -> NoReturn:
    """Raise a ``CheckpointError`` with the message "place: rule; got values. Fix.".

    Args:
        place: the file, the tensor and the layout.
        rule: the condition that must hold, or what is read.
        got: the values that were found.
        fix: a sentence, without its full stop, that tells the caller what to do.
        cause: the exception that this error replaces.
    """
    raise CheckpointError(f"{place}: {rule}; got {shorten(got)}. {fix}.", *place) from cause
