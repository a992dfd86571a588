"""Getting onto many machines: what is asked of a scheduler, and how its jobs are followed.

Over SSH: ``hostfile`` says which machines, ``ssh`` reaches one, ``fleet`` is all of them, ``remote`` runs on each.
"""
