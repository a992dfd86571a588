"""The part of this feature that runs in the user's processes: standard library only.

``core/rank/rank_runner.py`` has the rules.
"""
