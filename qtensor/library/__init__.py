"""torch.library ops with plain schemas: tensors, strings and numbers. Each has one allocation function."""

from qtensor.library import activation, norm  # noqa: F401 - they register ops that nothing below the modules calls
