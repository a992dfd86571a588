"""``python -m tests.reference``: write docs/reference.md anew."""

from tests.reference.page import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
print(f"written: {PAGE}")
