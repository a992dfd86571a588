"""``ddplaunch profile``: samples where the ranks of a running job spend their time.

``rank/`` samples, ``node.py`` collects, ``hot_spots`` concludes (pure), ``profile_files`` writes files for viewers.
"""
