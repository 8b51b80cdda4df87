"""How much of a text's end may be the beginning of something that must not be sent.

Owns: that one question, for stop strings and for the markers of parsers. Does not know: what either is for.
"""


def partial_match(text: str, marker: str) -> int:
    """The length of the longest end of text that begins marker and is shorter than it."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) - start if start >= 0 else 0
