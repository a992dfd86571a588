"""The output of ranks and the events of a job, on their way to the terminal, to files and to observers.

``streams`` reads the pipes of ranks, ``screen`` draws on the terminal and is the only one that knows of it, ``run_log``
writes files.
"""
