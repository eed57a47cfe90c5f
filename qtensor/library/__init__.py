"""torch.library ops with plain schemas: tensors, strings and numbers.

Each has one allocation function.
"""
