"""``python -m tests.pictures [NAME …]``: draws these pictures of docs/ again, or all."""

import sys
import tempfile
from pathlib import Path

from tests.pictures import failure, house, stacks

TRIES = 9

for name in sys.argv[1:] or ("failure", "stacks", "house"):
    if name == "house":
        path, drawn = house.PICTURE, house.house()
    else:
        of = {"failure": failure, "stacks": stacks}[name]
        path = of.PICTURE
        for _ in range(TRIES):
            with tempfile.TemporaryDirectory() as folder:
                drawn = of.picture(Path(folder))
            if of.is_clear(drawn):
                break
        else:
            sys.exit(f"{name}: not clear in {TRIES} runs, the last of which showed\n{drawn}")
    path.write_text(drawn, encoding="utf-8")
    print(f"written: {path}")
