"""``python -m tests.reference``: writes docs/reference.md again."""

from tests.reference.page import PAGE, render_page

PAGE.write_text(render_page(), encoding="utf-8")
print(f"written: {PAGE}")
