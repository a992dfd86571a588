"""The target of a job, found and checked without running any of its code.

``target`` finds the script, module, function or program, ``versions`` the Python and torch that run it; the other files
read its signature and arguments, which are turned into values in the ranks: nothing but ``base`` is imported.
"""
