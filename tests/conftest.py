"""What all tests share."""

import sys

# transformers looks for a package named `kernels`. It would find our folder of that name and fail, since that refuses
# to be imported under a second name. None tells the import system that there is no such module.
sys.modules["kernels"] = None  # type: ignore[assignment]
