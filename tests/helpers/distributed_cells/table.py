"""The rows of the document, and how a rank runs a cell.

A cell is one feature with one format or recipe, in eager mode or under aot_eager. It raises if a
result differs from that of one process, in any byte.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard, parallel

import qtensor.distributed
from distributed_cells import collectives, dtensors, policies, styles, training
from distributed_cells.base import FORMATS, MODES, RECIPES, SIZE, Cell, same
from qtensor import QTensorError

__all__ = [
    "FORMATS",
    "MODES",
    "RECIPES",
    "SECTIONS",
    "SIZE",
    "Cell",
    "Feature",
    "cells",
    "same",
]


@dataclass(frozen=True)
class Feature:
    """A row of the document: ``run(cell)`` on each rank."""

    name: str
    run: Callable[[Cell], None]
    columns: tuple[str, ...] = FORMATS
    modes: tuple[str, ...] = MODES


def _by_recipe(name: str, run: Callable[[Cell], None], modes: tuple[str, ...] = MODES) -> Feature:
    return Feature(name, run, tuple(RECIPES), modes)


OURS = qtensor.distributed
S0, S1, WHOLE = Shard(0), Shard(1), Replicate()
EAGER = MODES[:1]

SECTIONS: dict[str, list[Feature]] = {
    "Collectives": [
        Feature("`broadcast`", collectives.broadcast, modes=EAGER),
        Feature("`scatter`", collectives.scatter, modes=EAGER),
        Feature("`gather`", collectives.gather, modes=EAGER),
        Feature("`all_gather`", collectives.all_gather),
        Feature("`all_gather_into_tensor`", collectives.all_gather_into_tensor),
        Feature("`all_to_all_single`", collectives.all_to_all_single),
        Feature("`send`, `recv`", collectives.send_recv, modes=EAGER),
        Feature("`batch_isend_irecv`", collectives.batch_isend_irecv, modes=EAGER),
        Feature("`all_reduce`", collectives.all_reduce),
        Feature("`reduce_scatter_tensor`", collectives.reduce_scatter),
        Feature("functional `all_gather_tensor`", collectives.functional_gather),
        Feature("functional `broadcast`", collectives.functional_broadcast),
        Feature("functional `all_to_all_single`", collectives.functional_all_to_all),
        Feature("functional `all_reduce`", collectives.functional_reduce),
        Feature("functional gather of several tensors", collectives.gathered_together),
        Feature("`all_to_all`", collectives.all_to_all, modes=EAGER),
        *(
            Feature(name, collectives.reduction(call), modes=EAGER)
            for name, call in collectives.REDUCTIONS.items()
        ),
    ],
    "DTensor": [
        *(
            Feature(f"`distribute_tensor`, `from_local`: {p}", dtensors.distribute(p))
            for p in (S0, S1, WHOLE)
        ),
        *(Feature(f"`full_tensor`: {p}", dtensors.full_tensor(p)) for p in (S0, S1)),
        *(
            Feature(f"`redistribute`: {a} to {b}", dtensors.redistribute(a, b))
            for a, b in ((S0, S1), (S1, S0), (S0, WHOLE), (WHOLE, S1))
        ),
        *(Feature(f"`quantize`: {p}", dtensors.quantize(p)) for p in (S0, S1, WHOLE)),
        *(Feature(f"`dequantize`: {p}", dtensors.dequantize(p)) for p in (S0, S1)),
        *(
            Feature(
                f"`distribute_tensor`, `full_tensor`: {p}, {n} in 2 parts", dtensors.uneven(p, n)
            )
            for p in (S0, S1)
            for n in (255, 200)
        ),
        Feature("`linear`: weight Shard(0)", dtensors.linear),
        Feature("`matmul`: both Shard(1)", dtensors.matmul),
        *(
            Feature(
                f"`linear`, gradient of the input: weight {p}",
                dtensors.input_gradient(p),
                modes=EAGER,
            )
            for p in (S0, S1)
        ),
        Feature("`embedding`: weight Shard(0)", dtensors.embedding(S0), modes=EAGER),
        Feature("`embedding`: weight Shard(1)", dtensors.embedding(S1)),
        *(Feature(f"views: {p}", dtensors.views(p), modes=EAGER) for p in (S0, S1)),
        *(
            Feature(f"3 dims, `full_tensor`: {p}", dtensors.three_dims(p), modes=EAGER)
            for p in (S0, S1, Shard(2))
        ),
        Feature("mesh with 2 dims: S(0), S(1)", dtensors.two_meshes, modes=EAGER),
    ],
    "Weights that are stored quantized, in layers of torch": [
        Feature("DDP, frozen weight", training.ddp_frozen),
        Feature("`fully_shard`, frozen weight", training.fsdp_frozen),
        Feature("`ColwiseParallel`, `RowwiseParallel`", styles.styles_of_weights),
        Feature("quantized all-gather", training.fsdp_gather_format),
        Feature("adapters of low rank on frozen weights", policies.adapters, modes=EAGER),
        Feature("`parametrize` of a frozen weight", policies.parametrized, modes=EAGER),
        Feature(
            "`dcp.save`, `dcp.load`: Shard(0) to Shard(0)", training.checkpoint(S0, S0), modes=EAGER
        ),
        Feature(
            "`dcp.save`, `dcp.load`: Shard(0) to Shard(1)", training.checkpoint(S0, S1), modes=EAGER
        ),
        Feature(
            "`dcp.save`, `dcp.load`: Shard(1) to Replicate",
            training.checkpoint(S1, WHOLE),
            modes=EAGER,
        ),
    ],
    "Training": [
        _by_recipe("DDP", training.ddp(False)),
        _by_recipe("DDP, `quantized_params`", training.ddp(True)),
        _by_recipe("`fully_shard`", training.fsdp(False)),
        _by_recipe("`fully_shard`, `quantized_params`", training.fsdp(True)),
        _by_recipe("`fully_shard`, quantized all-gather", training.fsdp_gather),
        *(
            _by_recipe(f"step after `dcp.load`, {what}{where}", training.resume(stored, reduced))
            for stored, what in ((False, "`fully_shard`"), (True, "`quantized_params`"))
            for reduced, where in ((False, ""), (True, ", maxima of all ranks"))
        ),
    ],
    "Options of `fully_shard`": [
        _by_recipe(name + what, policies.trains(kind, way))
        for name, way in policies.WAYS.items()
        for kind, what in policies.KINDS.items()
    ],
    "Optimizers and states": [
        *(
            _by_recipe(name + what, make(kind), EAGER)
            for name, make in policies.AROUND.items()
            for kind, what in policies.KINDS.items()
        ),
        *(
            _by_recipe(f"step after {how}{what}", training.resume(stored, False, way), EAGER)
            for way, how in training.KEPT.items()
            for stored, what in ((False, ""), (True, ", `quantized_params`"))
            if way != "dcp"
        ),
    ],
    "Tensor parallelism": [
        _by_recipe("torch's `ColwiseParallel`, `RowwiseParallel`", styles.styles_of(parallel)),
        _by_recipe("qtensor's `ColwiseParallel`, `RowwiseParallel`", styles.styles_of(OURS)),
        _by_recipe("`parallel_mode` of the layers", styles.tp_of_modules),
        _by_recipe("torch's styles, rows split", styles.styles_of(parallel, True)),
        _by_recipe("qtensor's styles, rows split: codes gathered", styles.styles_of(OURS, True)),
        _by_recipe("`PrepareModuleInput`", styles.prepared(False)),
        _by_recipe("`PrepareModuleInputOutput`", styles.prepared(True)),
        _by_recipe("qtensor's `PrepareModuleInput`, three layers", styles.shared_input, EAGER),
        _by_recipe("`SequenceParallel`", styles.sequence),
        _by_recipe("`loss_parallel`", styles.loss),
        _by_recipe("qtensor's `ColwiseParallel` on `LayerNormLinear`", styles.norm_and_layer),
        _by_recipe("qtensor's `ColwiseParallel` on `LayerNormMLP`", styles.two_layers_in_one),
        *(
            _by_recipe(f"qtensor's `{style}` on `GroupedLinear`", styles.grouped(mode))
            for style, mode in (("ColwiseParallel", "column"), ("RowwiseParallel", "row"))
        ),
        *(
            _by_recipe(
                f"`fully_shard` x styles, mesh {a} x {b}{how}", styles.sharded_styles((a, b), codes)
            )
            for codes, how in ((False, ""), (True, ", quantized all-gather"))
            for a, b in ((1, 2), (2, 1))
        ),
    ],
}


@functools.cache
def features() -> dict[str, Feature]:
    """Return each feature of the document by its name."""
    return {feature.name: feature for rows in SECTIONS.values() for feature in rows}


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield (feature, mode, column) of every cell."""
    for mode in MODES:
        for feature in features().values():
            for column in feature.columns if mode in feature.modes else ():
                yield feature.name, mode, column


def run_cell(feature: str, mode: str, column: str) -> tuple[str, str]:
    """Run a cell on this rank.

    Returns:
        ("pass", ""), ("error", the first clause of a QTensorError), or ("fail", what differs).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Dynamo about graph breaks, and of checkpoints
            features()[feature].run(Cell(column, mode))
    except Exception as error:  # noqa: BLE001 - an outcome of the cell
        return verdict(error)
    finally:
        torch._dynamo.reset()
    return "pass", ""


def verdict(error: BaseException) -> tuple[str, str]:
    """Return the outcome of a cell that raised.

    An error that torch raised from a QTensorError, as Dynamo does, counts as that.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, QTensorError):
        cause = cause.__cause__
    if cause is not None:
        return "error", str(cause).partition("; got ")[0]
    text = " ".join(str(error).split())
    return "fail", f"{type(error).__name__}: {text}"[:300]
