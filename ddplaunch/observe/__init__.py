"""What each rank does and waits for, now and over time: a layer between the core and the features that show it.

``rank/`` reads the state of torch in a rank, ``node/`` collects stacks and counters on a node, ``job/`` acts on node 0,
``diagnosis/`` draws conclusions (pure), ``stacks_text`` renders them, ``samples/`` records usage over time,
``history/`` is what is stored of each run.
``feature.py`` and ``samples/feature.py`` connect them to the launcher, as those of a feature do.
"""
