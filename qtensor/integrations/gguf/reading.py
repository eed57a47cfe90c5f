"""Read a GGUF file as a model of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import Tensor

from qtensor import checkpoints
from qtensor.checkpoints import Checkpoint
from qtensor.integrations.gguf.families import family_in
from qtensor.integrations.gguf.metadata import config_of, text_config
from qtensor.integrations.gguf.naming import (
    FREQUENCIES,
    Renamed,
    check_complete,
    check_known,
    to_transformers,
)


class GGUFModel(Mapping[str, Tensor]):
    """Map the names that transformers gives the weights of a GGUF file to tensors.

    A tensor is read at each access: MXFP4 and NVFP4 weights as quantized tensors, with the factor
    of the tensor, integer types as float32 values. ``qtensor.checkpoints.save(model, folder,
    config=model.config)`` writes a folder that ``from_pretrained`` loads.

    Attributes:
        config: config.json of the model, as the metadata of the file have it.
        checkpoint: the open file.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> None:
        """Name the tensors of an open file.

        Raises:
            UnsupportedError: the architecture is not known, or a tensor has no place in it.
        """
        self.checkpoint = checkpoint
        pairs = {k: v.decode() for k, v in checkpoint.source.extra["key_values"].items()}
        name = pairs.get("general.architecture")
        family = family_in(name, f"{name}.expert_count" in pairs)
        shapes = {row.name: row.shape for row in checkpoint.table().rows}
        factors = checkpoint[FREQUENCIES] if shapes.pop(FREQUENCIES, None) else None
        if config is None:
            config = config_of(family, pairs, "output.weight" not in shapes, factors)
        self.config = dict(config)
        plan = to_transformers(family, text_config(self.config), shapes)
        check_known(plan.unknown, family, "Read the file with qtensor.checkpoints.open")
        check_complete(family, text_config(self.config)["num_hidden_layers"], shapes)
        self._tensors = Renamed(plan, checkpoint.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Release the file; tensors that were read stay valid."""
        self.checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"GGUFModel({self.checkpoint.path!r}, {self.config['model_type']}, {len(self)} tensors)"
        )


def open_gguf(path: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> GGUFModel:
    """Return the model of a GGUF file, with the names and the order of rows of transformers.

    Args:
        path: a file, the first of several parts, or a folder with one.
        config: config.json of the model; by default it is made from the metadata of the file.

    Raises:
        CheckpointError: the file is not sound.
        UnsupportedError: the architecture is not known, or a tensor has no place in it.
    """
    checkpoint = checkpoints.open(path, layout="gguf", fold_scale=True)
    try:
        return GGUFModel(checkpoint, config)
    except BaseException:
        checkpoint.close()
        raise
