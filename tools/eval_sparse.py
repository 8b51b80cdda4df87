#!/usr/bin/env python3
"""What sparse requests cost and give on real text: `tools/eval_sparse.py --help`.

The work is in sparse_eval/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.sparse_eval.command import main

if __name__ == "__main__":
    main()
