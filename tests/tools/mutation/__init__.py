"""Small faults in the package, and whether its tests find them.

``python -m tests.tools.mutation --seed 7 --count 60`` draws that many places at random, and changes one at a time in a
copy of the repository. What no test of its folder finds is printed with its line.
"""
