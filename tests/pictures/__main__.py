"""``python -m tests.pictures``: take docs/failure.svg anew."""

import tempfile
from pathlib import Path

from tests.pictures.failure import PICTURE, lines, picture

# Ranks that lose their peer before they are stopped print more than a picture holds: then once more.
drawn = ""
while not drawn or "3 other ranks were stopped" not in lines(drawn)[-1]:
    with tempfile.TemporaryDirectory() as folder:
        drawn = picture(Path(folder))
PICTURE.write_text(drawn, encoding="utf-8")
print(f"written: {PICTURE}")
