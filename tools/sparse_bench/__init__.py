"""Speed of many sparse requests, in parts; the command is tools/bench_sparse.py."""
