"""Show the state of delayed scaling to the helpers of ``torch.distributed.checkpoint.state_dict``.

``set_model_state_dict`` and its siblings know the parameters and buffers of a model. In a
broadcast, all ranks but the first drop other entries, and other entries do not get the prefix of a
wrapper such as ``DistributedDataParallel``. The state of delayed scaling is not a buffer of a
layer, because ``DistributedDataParallel`` would copy the state of rank 0 to all ranks at each
forward. torch has no hook for further entries, so importing ``qtensor.distributed`` replaces the
function that lists them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

from torch import Tensor, nn

from qtensor.modules.delayed_entries import entry_buffers
from qtensor.modules.quantized_module import QuantizedModule

_HELPERS, _NAME = "torch.distributed.checkpoint.state_dict", "_iterate_valid_model_state"


def install() -> None:
    """Replace the function of torch; importing ``qtensor.distributed`` calls this once."""
    helpers = importlib.import_module(_HELPERS)
    original = getattr(helpers, _NAME)

    @functools.wraps(original)
    def run(model: nn.Module, *args: object, **kwargs: object) -> Iterator[tuple[str, Tensor]]:
        yield from original(model, *args, **kwargs)
        for path, module in model.named_modules():
            if isinstance(module, QuantizedModule):
                for name, values in entry_buffers(module):
                    yield f"{path}.{name}" if path else name, values

    setattr(helpers, _NAME, run)
