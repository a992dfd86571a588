"""The part of this feature that runs in the user's processes: standard library only.

``core/rank/rank_runner.py`` has the rules; the launcher, which uses what comes from here, need not be read.
"""
