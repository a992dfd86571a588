"""Observes what each rank does and what it waits for: a layer between the core and the features that show the results.

``rank/`` reads the state of torch in a rank, ``node/`` collects stacks and counters on a node, ``job/`` acts on node 0,
``diagnosis/`` draws conclusions (pure), ``stacks_text`` renders them, ``samples/`` records usage over time,
``history/`` is what is stored of each run.
``feature.py`` and ``samples/feature.py`` connect these parts to the launcher, as the ``feature.py`` of a feature does.
"""
