"""Convert checkpoints from one layout to another, or to plain tensors, in bounded memory."""
