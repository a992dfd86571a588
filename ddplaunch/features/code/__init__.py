"""Copies of the code, where it runs: ``--code DIR`` over SSH and on Slurm.

``code_files`` decides which files, ``archive`` packs them, ``copies`` keeps them on the other side. ``config_maps``
puts an archive into objects of Kubernetes.
"""
