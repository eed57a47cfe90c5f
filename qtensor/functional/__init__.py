"""Functions with gradients: all autograd of the training stack lives here; modules own parameters and state."""
