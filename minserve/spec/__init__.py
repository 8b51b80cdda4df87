"""Speculation: drafts that are proposed by a head and verified by the model."""
