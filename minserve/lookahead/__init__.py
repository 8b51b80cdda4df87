"""The background half of a step: which blocks the next one will read, and their way onto the device."""
