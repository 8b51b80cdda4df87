"""What all tests share: where modules are found."""

import sys
from pathlib import Path

import minserve

# transformers asks whether a package named `kernels` can be imported, and would be given our folder of that name, which
# refuses. minserve's own modules are found through its __path__ from here on, so the root can leave the search path.
ROOT = Path(minserve.__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
