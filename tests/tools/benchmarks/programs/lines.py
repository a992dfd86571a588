"""A rank that prints BENCH_LINES lines as fast as it can, each with its rank and number, once it is released."""

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
