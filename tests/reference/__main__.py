"""``python -m tests.reference``: writes docs/reference.md again."""

from tests.reference.page import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
print(f"written: {PAGE}")
