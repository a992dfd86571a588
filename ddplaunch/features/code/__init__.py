"""Copies the code to where it runs: ``--code DIR`` over SSH and on Slurm.

``code_files`` chooses the files, ``archive`` packs them, ``copies`` unpacks them and keeps the copies. ``config_maps``
puts an archive into objects of Kubernetes.
"""
