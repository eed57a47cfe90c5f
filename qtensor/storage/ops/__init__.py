"""Handlers of ops on quantized tensors, by what they do."""
