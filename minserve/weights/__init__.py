"""Model files in, tensors out."""
