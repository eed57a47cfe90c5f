"""Forward and backward of a linear layer."""
