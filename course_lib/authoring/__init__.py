"""From a lesson's one source to its two notebooks.

    solutions/NN_name.py               the source: percent format, edited by people
    solutions/NN_name/NN_name.ipynb    the solution: executed, with outputs
    notebooks/NN_name/NN_name.ipynb    the learner's: stubs where the solutions were

`source` reads the percent format and adds what nbgrader wants to know; `rules` and `leaks` refuse
what must not ship; `execute` runs the solution; `learner` makes the learner's notebook of it, with
nbgrader; `stamp` knows what a lesson is made of; `build` puts it all together, in a temporary
folder, and swaps the results in.
"""
