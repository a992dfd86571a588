"""``--torch-debug``: torch's own debug server (torch.distributed.debug, from torch 2.11 on), on loopback.

Each rank serves what torch knows of it (``rank/worker_server.py``). ``frontend.py`` is the process with the web pages,
which asks all ranks; the launcher starts and ends it (``node.py``).
"""
