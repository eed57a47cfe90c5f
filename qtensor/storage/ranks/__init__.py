"""Quantized tensors that are spread over ranks: collectives, shards, checkpoints."""
