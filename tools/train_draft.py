#!/usr/bin/env python3
"""Train an EAGLE-3 draft head for a model that minserve serves: `tools/train_draft.py --help`.

The work is in draft_training/.
"""

from draft_training.command import main

if __name__ == "__main__":
    main()
