"""A training run. Start with ``loop.py``, which goes from start to end.

``step.py`` makes one optimizer step, ``data.py`` opens the loader, and ``build.py`` builds the model. The folders hold
settings, checkpoints, the optimizer, what concerns all processes of a run, and what a run reports.
"""
