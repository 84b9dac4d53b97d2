"""Sharded data-parallel training: price the trade of communication for memory.

The package is a house with floors; a module imports only from floors below it.

1  specs                 what a job is: model, recipe, strategy, cluster (pure)
2  ledger                its memory, in bytes per rank (pure)
2  models, ranks         a real model from a spec; real ranks from a notebook (torch)
3  sharded, measure      teaching implementations; live bytes of real tensors (torch)
4  checks                what a check cell calls
5  figures, explorers    drawing; sliders over pure functions
6  authoring, cli        lessons built from their sources; the `course` command

Importing this package imports nothing heavy: not torch, not matplotlib.
"""
