"""Data sets, embedding stores, transfers, and the edge of every program (program.py)."""

import sys

from data import program

if sys.argv[:1] == ["-m"]:  # python -m data.embeddings: what it imports comes before its __main__
    program.begin()
