"""Command lines of other launchers, pasted after ``ddplaunch run``: an error shows the line to type instead.

Imported only if the words begin with the name of another launcher, or an option that only it has.
"""
