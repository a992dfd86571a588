"""The systems that start jobs, by what they number: ranks, nodes, or hosts alone. Every file here is loaded.

A new system is a row or a function of the file that fits, or a file of its own.
"""
