"""The systems that start jobs, by what they number: ranks, nodes, or hosts alone. Every file here is loaded."""
