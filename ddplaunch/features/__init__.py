"""The features of ddplaunch: a folder each, above the core.

A folder holds all sides of its feature: options, the command line's command (``command.py``), the part in the launcher
(``node.py``), the part on node 0 (``job.py``), the request on the control socket (``request.py``), the request to all
nodes (``rpc.py``) and the code inside the user's processes (``rank/``, standard library only). ``core`` need not be
read to change a feature.
"""
