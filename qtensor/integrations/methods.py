"""Let qtensor open the checkpoints of quantization methods that transformers knows itself."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qtensor.checkpoints.layout_base import layouts
from qtensor.core.errors import fail
from qtensor.integrations.quantization_config import METHOD, QTensorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def known_methods() -> tuple[str, ...]:
    """Return every ``quant_method`` that ``qtensor.checkpoints`` reads, without our own."""
    found = {method for layout in layouts().values() for method in layout.methods}
    return tuple(sorted(found - {METHOD}))


class take_methods:
    """Let ``from_pretrained`` open checkpoints of other methods with qtensor, from now on.

    transformers has a class of its own for most quantization methods, which needs a GPU or the
    producer's package, or decodes the weights. After this call, the weights of their checkpoints
    are quantized tensors, on any device, and ``quantization_config=QTensorConfig(...)`` is taken
    for them too. It holds for the whole process, or for a ``with`` block.
    """

    def __init__(self, methods: str | Iterable[str] | None = None) -> None:
        """Take the methods.

        Args:
            methods: a value of ``quant_method`` in config.json, or several, such as
                ``["fp8", "mxfp4"]``; None for every one that ``qtensor.checkpoints`` reads.

        Raises:
            QTensorError: a method is not read.
        """
        known = known_methods()
        chosen = [methods] if isinstance(methods, str) else methods
        wanted = known if chosen is None else tuple(chosen)
        for method in wanted:
            if method not in known:
                fix = f"Choose among {', '.join(known)}"
                fail("take_methods", "the method is read by qtensor", repr(method), fix)
        self._before = {name: AUTO_QUANTIZATION_CONFIG_MAPPING.get(name) for name in wanted}
        AUTO_QUANTIZATION_CONFIG_MAPPING.update(dict.fromkeys(wanted, OtherConfig))

    def give_back(self) -> None:
        """Let transformers open the checkpoints of these methods again."""
        for method, config in self._before.items():
            if config is None:
                AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method, None)
            else:
                AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.give_back()


class OtherConfig(QTensorConfig):
    """Read the entry of another method in config.json: the files say all that qtensor needs."""

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return a ``QTensorConfig`` that loads what the checkpoint stores."""
        config = QTensorConfig()
        return (config, kwargs) if return_unused_kwargs else config


def pretrained_config(
    path: str | os.PathLike[str], quantization_config: QTensorConfig | None = None, **kwargs: Any
) -> Any:
    """Return the config of a checkpoint, with its quantization entry replaced by ours.

    transformers has its own class for most quantization methods, and refuses to mix it with
    ``QTensorConfig``. Passing this config selects ours:
    ``AutoModelForCausalLM.from_pretrained(path, config=pretrained_config(path))``.

    Args:
        path: a folder, or the name of a repository.
        quantization_config: ``QTensorConfig()`` if None.
        **kwargs: arguments of ``AutoConfig.from_pretrained``.

    Returns:
        A ``PreTrainedConfig``.

    Raises:
        QTensorError: the path names a file.
    """
    if os.path.isfile(path):
        fix = (
            "Pass the folder. A GGUF file has no config.json, and its weights have the names of "
            "llama.cpp: qtensor.integrations.gguf.open_gguf translates them"
        )
        rule = "path is a folder with a config.json, or the name of a repository"
        fail("pretrained_config", rule, f"the file {os.fspath(path)!r}", fix)
    config = AutoConfig.from_pretrained(path, **kwargs)
    config.quantization_config = quantization_config or QTensorConfig()
    forget_text_entry(config)
    return config


def forget_text_entry(config: PreTrainedConfig) -> None:
    """Remove the quantization entry of the part of a config that describes the language model."""
    text = config.get_text_config(decoder=True)
    if text is not config and getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
