"""Linear layers whose tensors are spread over ranks."""
