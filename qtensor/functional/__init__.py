"""Define the functions with gradients; modules own parameters and state."""
