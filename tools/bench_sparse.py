#!/usr/bin/env python3
"""Decode speed of many sparse requests at a real model's shapes: `tools/bench_sparse.py --help`.

The work is in sparse_bench/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.sparse_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
