"""Quantized tensors and layers on several ranks, with torch's own engine.

``import qtensor`` changes nothing in torch. Importing this package teaches torch about quantized
tensors:

- DTensor gets rules for our ops.
- Optimizers give the parts of a quantized DTensor the factors of the whole.
- ``broadcast_from_rank0`` of ``torch.distributed.checkpoint`` sends codes and scales, and the state
  of delayed scaling.
- ``BroadcastingTorchSaveReader`` compares quantized entries with their templates.

The import of ``torch.distributed.tensor`` takes about as long as importing torch.
"""

from qtensor.core.dtensors import install_rules
from qtensor.distributed import state_dict_entries, torch_file_reader
from qtensor.distributed.data_parallel import broadcast_parameters
from qtensor.distributed.quantized_gather import quantized_all_gather, reduce_amaxes
from qtensor.distributed.staging import Stager
from qtensor.distributed.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from qtensor.distributed.traffic import Traffic
from qtensor.storage.ranks import splits, state_dict_broadcast

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "Stager",
    "Traffic",
    "broadcast_parameters",
    "quantized_all_gather",
    "reduce_amaxes",
]

install_rules()
splits.install()
state_dict_broadcast.install()
state_dict_entries.install()
torch_file_reader.install()
