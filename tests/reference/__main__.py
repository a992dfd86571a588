"""``python -m tests.reference``: writes docs/reference.md and the keywords of ``launch`` again."""

from tests.reference.keywords import FILE, render_keywords
from tests.reference.page import PAGE, render_page

PAGE.write_text(render_page(), encoding="utf-8")
FILE.write_text(render_keywords(), encoding="utf-8")
print(f"written: {PAGE}, {FILE}")
