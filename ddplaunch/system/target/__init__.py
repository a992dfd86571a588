"""What to run: found and checked without running any of it.

``target`` finds the script, module, function or program, ``versions`` the Python and torch that run it; the other files
read its signature and arguments, which are turned into values in the ranks: nothing but ``base`` is imported.
"""
