"""Convert a checkpoint to another layout, or to plain tensors."""

from __future__ import annotations

import os
import time
from typing import Any, Unpack

import torch

from qtensor.checkpoints.checkpoint import Checkpoint, open_with_factors
from qtensor.checkpoints.containers.shard_files import INDEX_SUFFIX
from qtensor.checkpoints.conversion.conversion_plan import PlannedShard, make_plan
from qtensor.checkpoints.conversion.conversion_report import ConversionReport
from qtensor.checkpoints.conversion.request import (
    Options,
    Request,
    checked_dtype,
    checked_format,
    make_request,
)
from qtensor.checkpoints.conversion.streaming import Stream, copy_other_files
from qtensor.checkpoints.conversion.work_folder import (
    WorkFolder,
    check_replaceable,
    source_identity,
)
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.input_transforms import ROTATED
from qtensor.checkpoints.layout_base import Writer
from qtensor.checkpoints.modes import in_memory
from qtensor.checkpoints.saving import (
    Shard,
    index_of,
    shard_names,
    texts_of,
    without_quantization,
    writable,
    write_json,
)
from qtensor.core.version import __version__
from qtensor.quantizers import Quantizer

PathLike = str | os.PathLike[str]


def convert(
    src: PathLike,
    dst: PathLike,
    layout: str = "qtensor",
    format: str | Quantizer | None = None,
    **options: Unpack[Options],
) -> ConversionReport:
    """Write a checkpoint in another layout, in bounded memory.

    A weight whose format the layout holds keeps its codes and factors: bytes are moved, nothing is
    decoded. With ``format``, plain matrices are quantized, and weights of another format are
    decoded as their origin does and quantized again; the report has the error of each. Without it,
    a weight that the layout cannot hold is refused.

    Files are written under temporary names and renamed at the end: at any moment either the old or
    the new checkpoint is there. After an interruption, the same call goes on after the last file
    that was finished; docs/checkpoints.md has the details.

    Args:
        src: a file, a folder or an index.
        dst: a folder, or a file that ends in ``.safetensors``.
        layout: name of the layout of the result.
        format: a format id, perhaps with options, or a quantizer. It concerns the weights that
            ``include`` and ``exclude`` leave; by default all matrices but embeddings, the output
            layer, norms and routers.
        **options: ``include``, ``exclude``, ``source_layout``, ``shard_size``, ``overwrite``,
            ``resume``, ``jobs`` and ``progress``, as ``Options`` describes them.

    Returns:
        What became of each tensor; the repr is a table.

    Raises:
        CheckpointError: the source is not sound, a weight cannot be carried as asked, the result
            exists, or the disk is full.
    """
    quantizer = None if format is None else checked_format(format)
    return _run(make_request(src, dst, layout, dict(options), quantizer=quantizer))


def dequantize(
    src: PathLike,
    dst: PathLike,
    dtype: torch.dtype | str = torch.bfloat16,
    rounding: str | None = "origin",
    **options: Unpack[Options],
) -> ConversionReport:
    """Write a checkpoint whose weights are plain tensors, in bounded memory.

    Args:
        src: a file, a folder or an index.
        dst: a folder, or a file that ends in ``.safetensors``.
        dtype: bfloat16, float16 or float32, or a name such as ``"bf16"``. Tensors that are plain in
            the source keep their dtype.
        rounding: ``"origin"`` decodes as the origin does, to the last bit; None by our arithmetic,
            which is faster for NVFP4 and differs there by one unit in some values.
        **options: as in ``convert``.

    Returns:
        What became of each tensor; factors of activations and of the KV cache are not carried.
        Weights for inputs that are scaled or rotated become those for plain inputs.

    Raises:
        CheckpointError: as in ``convert``.
    """
    if rounding not in (None, "origin"):
        refuse(Place(), "rounding is None or 'origin'", repr(rounding), "Pass one of them")
    more = {"dtype": checked_dtype(dtype), "rounding": rounding}
    return _run(make_request(src, dst, "plain", dict(options), **more))


@in_memory
def _run(request: Request) -> ConversionReport:
    """Open the source, plan, write and publish."""
    began = time.monotonic()
    writer_class = writable(request.layout, request.dst)
    single = request.dst.endswith(writer_class.suffix)
    size = None if single or writer_class.suffix != ".safetensors" else request.shard_size
    if request.overwrite and os.path.lexists(request.dst) and not single:
        check_replaceable(request.dst)
    # Rotations are carried, or undone in decoded weights.
    with open_with_factors(request.src, request.source_layout, **{ROTATED: True}) as checkpoint:
        config = without_quantization(checkpoint.config)
        writer = writer_class(config)
        writer.follow(checkpoint.source, checkpoint.layout)
        plan = make_plan(checkpoint, request, writer, size)
        work = WorkFolder(request.dst, _about(checkpoint, request), request.resume)
        stream = Stream(checkpoint, request, writer, work)
        names = shard_names(len(plan.shards), writer.suffix)
        if single:
            names = [os.path.basename(request.dst)]
        try:
            results = stream.run(dict(zip(names, plan.shards, strict=True)))
        except BaseException:
            work.abandon()
            raise
        notes = list(plan.notes)
        if single:
            described = writer.metadata(()).keys() - {"format"}  # the header shows the layout
            if writer.files() or ("quantization_config" in writer.config() and not described):
                notes.append("a single file has no config.json; pass layout= to open it")
            work.publish_file()
        else:
            notes += _finish_folder(checkpoint, request.src, writer, work, names, plan.shards)
            work.publish_folder()
    return ConversionReport(
        request.src,
        request.dst,
        checkpoint.layout,
        request.layout,
        tuple(results),
        plan.not_carried,
        tuple(notes),
        time.monotonic() - began,
        stream.resumed,
    )


def _finish_folder(
    checkpoint: Checkpoint,
    src: str,
    writer: Writer,
    work: WorkFolder,
    names: list[str],
    shards: list[PlannedShard],
) -> list[str]:
    """Write the files beside the tensors: the index, JSON files, and files of the source."""
    texts = texts_of(writer)
    if len(shards) > 1:
        index = index_of(names, [Shard([], shard.specs) for shard in shards])
        index["metadata"]["sha256"] = {name: work.files[name]["sha256"] for name in names}
        texts[f"model{INDEX_SUFFIX}"] = index
    for name, value in texts.items():
        write_json(os.path.join(work.folder, name), value)
    copied = copy_other_files(checkpoint, src, work.folder, texts)
    return [f"copied from the source: {', '.join(copied)}"] if copied else []


def _about(checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
    """Return what decides the bytes of the result."""
    files = {info.file for info in checkpoint.source.tensors.values()}
    return {
        "qtensor": __version__,
        "request": request.fingerprint(),
        "source": source_identity(sorted(files)),
        "config": dict(checkpoint.config),
    }
