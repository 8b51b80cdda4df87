"""A step plan in, tokens out: the only room that runs the model."""
