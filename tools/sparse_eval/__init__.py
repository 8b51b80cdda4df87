"""What sparse requests cost and give on real text, question by question: see command.py.

    texts      documents out of Debian's packages, needles, questions
    policies   how a lane chooses its blocks: the server's policies, and some that only serve to compare
    follow     a lane that decodes under one of them, step by step
    bench      the lane, and what it has read, to begin from several times
    loss  looking_ahead  traffic  recall_tests   the questions
    report  plots                                tables, JSON lines, PNGs

All of it stands on tools/sparse_lab.py: the runner and the working sets of the engine, without a scheduler.
"""
