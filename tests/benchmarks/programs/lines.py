"""A rank that prints as fast as it can: BENCH_LINES lines, each with its rank and number, once all are let go."""

import os
import sys

import marks

FILLER = "x" * 60

marks.hold()
marks.mark("first")
rank = os.environ["RANK"]
for number in range(int(os.environ["BENCH_LINES"])):
    print(f"rank {rank} line {number} {FILLER} end")
sys.stdout.flush()
