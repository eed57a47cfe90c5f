"""Matrix products of quantized operands: the backends, and the choice between them."""
