"""What users run, unchanged: each program in programs/ is started here as a user would start it.

The packages come with ``pip install -c constraints.txt -e '.[frameworks]'``; docs/frameworks.md says what was found.
"""
