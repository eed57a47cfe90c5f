"""Read a model or a checkpoint, tensor by tensor, into a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from qtensor.checkpoints.checkpoint import Checkpoint, open_with_factors
from qtensor.checkpoints.modes import in_memory
from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.texts import some
from qtensor.debug.log import Log
from qtensor.reporting.findings import Findings, TensorReport, WorstBlock
from qtensor.reporting.measuring import Block, measure, view_of
from qtensor.reporting.page import page
from qtensor.reporting.recorded import OP, Recorded, recorded
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.search_result import SearchResult

_WORST = 6
"""Blocks that are shown."""

Weights = Mapping[str, Tensor]
Source = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor]


class ModelReport(Findings):
    """Hold what ``model_report`` found. ``str()`` is a summary, ``save`` writes a page.

    Attributes:
        title: path or class of the model.
        layout: layout of the checkpoint; "" for a model in memory.
        against: path or class of the originals; None without a comparison.
        tensors: all tensors, in the order of the model.
        worst: the worst blocks, worst first.
        notes: what could not be compared, in sentences.
        recorded: layers and roles of a recording.
        search: result of a search.
    """

    def html(self) -> str:
        """Return the report as one HTML page that needs no network."""
        return page(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the page.

        Args:
            path: a file, such as "report.html".
            overwrite: replace a file that exists.

        Raises:
            QTensorError: the file exists or cannot be written.
        """
        name, text = os.fspath(path), self.html()
        try:
            with open(name, "w" if overwrite else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            fix = "Choose another path, or pass overwrite=True"
            fail(OP, "the report is a new file", f"{name!r}, which exists", fix)
        except OSError as error:
            fail(OP, "the report can be written", f"{name!r} ({error.strerror})", "Fix the path")


@in_memory
def model_report(
    source: Source,
    *,
    against: Source | None = None,
    log: Log | str | os.PathLike[str] | None = None,
    search: SearchResult | str | os.PathLike[str] | None = None,
    layouts: tuple[str | None, str | None] = (None, None),
    progress: Callable[[int, int, str], None] | None = None,
) -> ModelReport:
    """Return a report on the weights of a model: formats, bytes, errors, codes and factors.

    Tensors are read one by one, in parts of whole rows.

    Args:
        source: a checkpoint that ``qtensor.checkpoints`` reads (a file, a folder or an index), a
            module, or a state dict.
        against: the model from before the quantization, in the same forms. Without it, the report
            shows only what codes and factors tell.
        log: the recording of a run: a ``qtensor.debug.Log``, or the path of a file that
            ``record(jsonl=...)`` wrote.
        search: a ``SearchResult``, or the path of a file that ``SearchResult.save`` wrote.
        layouts: names of the layouts of both checkpoints; by default they are recognised.
        progress: called after each tensor with the number of finished tensors, of all tensors, and
            the name.

    Raises:
        QTensorError: a file cannot be read, the originals share no name and shape with the
            quantized tensors, or the log has no layer of the model.
    """
    result = _search_result(search)
    steps = () if log is None else recorded(log)
    notes: list[str] = []
    with _opened(source, layouts[0]) as weights, _opened(against, layouts[1]) as originals:
        if steps:
            _check_log(weights, steps)
        if result is not None:
            _check_search(weights, result)
        chosen = None if against is None else _matching(weights, originals, notes)
        tensors: list[TensorReport] = []
        worst: list[WorstBlock] = []
        for number, name in enumerate(weights, 1):
            original = originals[name] if chosen is not None and name in chosen else None
            tensor, block = _tensor(weights, name, original)
            tensors.append(tensor)
            if block is not None and (chosen is None or original is not None):
                _keep(worst, weights[name], original, name, block)
            del original
            for opened in (weights, originals):
                if isinstance(opened, Checkpoint) and name in opened:
                    opened.release(name)
            if progress is not None:
                progress(number, len(weights), name)
        if not any(t.kind != "plain" for t in tensors):
            notes.append("No tensor of this model is quantized.")
        return ModelReport(
            title=_title(source),
            layout=weights.layout if isinstance(weights, Checkpoint) else "",
            against=None if against is None else _title(against),
            tensors=tuple(tensors),
            worst=tuple(worst),
            notes=tuple(notes),
            recorded=steps,
            search=result,
        )


@contextmanager
def _opened(source: Source | None, layout: str | None) -> Iterator[Weights]:
    """Open a source; None is an empty one."""
    if source is None:
        yield {}
        return
    if isinstance(source, str | os.PathLike):
        with open_with_factors(source, layout) as checkpoint:
            yield checkpoint
        return
    state = source.state_dict() if isinstance(source, nn.Module) else source
    rule = "a model is a path, a torch.nn.Module or a state dict"
    good = isinstance(state, Mapping)
    check(good, OP, rule, type(source).__name__, "Pass one of them", ArgumentTypeError)
    # A state dict may hold states of modules that are not tensors.
    yield {str(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _title(source: Source) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return type(source).__name__ if isinstance(source, nn.Module) else "a state dict"


def _search_result(search: object) -> SearchResult | None:
    if search is None or isinstance(search, SearchResult):
        return search
    rule = "search is a SearchResult or the path of its file"
    if not isinstance(search, str | os.PathLike):
        fail(OP, rule, type(search).__name__, "Pass one of them", ArgumentTypeError)
    name = os.fspath(search)
    try:
        return SearchResult.load(name)
    except OSError as error:
        fix = "Pass a file that SearchResult.save wrote"
        fail(OP, "the result of the search must be readable", f"{name!r} ({error.strerror})", fix)


def _names(names: Iterable[str]) -> str:
    return some(names, 3) or "(none)"


def _check_log(weights: Weights, steps: tuple[Recorded, ...]) -> None:
    """Refuse a log of another model."""
    layers = {step.layer for step in steps}
    modules = {name.rpartition(".")[0] for name in weights} | set(weights)
    rule = f"the log must have layers of this model, such as {_names(weights)}"
    fix = "Pass the log of this model, recorded with the names of its modules"
    check(not layers.isdisjoint(modules), OP, rule, _names(layers), fix)


def _check_search(weights: Weights, result: SearchResult) -> None:
    """Refuse the result of another model."""
    layers = set(result.formats)
    modules = {name.rpartition(".")[0] for name in weights}
    rule = f"the search must have layers of this model, such as {_names(weights)}"
    check(not layers.isdisjoint(modules), OP, rule, _names(layers), "Pass the result of this model")


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    if isinstance(weights, Checkpoint):
        return {row.name: tuple(row.shape) for row in weights.table().rows}
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _matching(weights: Weights, originals: Weights, notes: list[str]) -> set[str]:
    """Return the names of tensors that can be compared, and note those that cannot."""
    here, there = _shapes(weights), _shapes(originals)
    kinds = _is_quantized(weights)
    wanted = [name for name in here if kinds[name]] or list(here)
    missing = [name for name in wanted if name not in there]
    other = [name for name in wanted if name in there and there[name] != here[name]]
    if len(missing) + len(other) == len(wanted):
        rule = "the originals must have a tensor with the name and shape of a quantized one"
        got = f"{_names(wanted)} in the model, and {_names(there)} in the originals"
        if other:
            name = other[0]
            got = f"{name} of shape {here[name]}, and of shape {there[name]} in the originals"
        fail(OP, rule, got, "Pass the model from before the quantization, with the same names")
    for names, reason in ((missing, "not in the originals"), (other, "of another shape there")):
        if names:
            count = f"{len(names)} of {len(wanted)} quantized tensors"
            notes.append(f"Not compared: {count} are {reason}: {_names(names)}.")
    return {name for name, shape in here.items() if there.get(name) == shape}


def _is_quantized(weights: Weights) -> dict[str, bool]:
    if isinstance(weights, Checkpoint):
        return {name: name in weights.groups for name in weights}
    return {name: isinstance(tensor, QuantizedTensor) for name, tensor in weights.items()}


def _tensor(
    weights: Weights, name: str, original: Tensor | None
) -> tuple[TensorReport, Block | None]:
    """Return the report of one tensor, and its worst block."""
    tensor = weights[name]
    kind = "dense" if isinstance(weights, Checkpoint) and name in weights.groups else "plain"
    if isinstance(tensor, QuantizedTensor):
        kind = tensor.quantizer.canonical
    nbytes = weights.nbytes(name) if isinstance(weights, Checkpoint) else tensor.nbytes
    statistics, codes, worst = None, None, None
    if tensor.is_floating_point() and tensor.device.type != "meta":
        if original is not None and not original.is_floating_point():
            original = None
        statistics, codes, worst = measure(tensor, original)
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = TensorReport(name, kind, tuple(tensor.shape), dtype, nbytes, statistics, codes)
    return found, worst


def _keep(
    worst: list[WorstBlock], tensor: Tensor, original: Tensor | None, name: str, block: Block
) -> None:
    """Add a block to the worst ones if it is among them."""
    if len(worst) == _WORST and worst[-1].badness >= block.badness:
        return
    worst.append(WorstBlock(name, block.badness, view_of(tensor, original, block)))
    worst.sort(key=lambda found: -found.badness)
    del worst[_WORST:]
