"""Model architectures as plain torch modules. Attention is a callable that they are given.

Reached as `minserve.models` (a committed symlink); importing this folder under another name would make a second copy.
"""

if not __name__.startswith("minserve."):
    raise ImportError(f"import minserve.models, not {__name__}")
