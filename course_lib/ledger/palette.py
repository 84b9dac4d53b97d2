"""The course's colours: one for each category of memory, in every figure, table and explorer.

The hues are those of Okabe and Ito's colour-blind safe set, with their lightness spread out so that
the eight also stay apart in grey: no two are nearer than 8 in CIE L*. The order is that in which
they are stacked.
"""

COLOURS = {
    "parameters": "#0072B2",  # blue
    "gradients": "#E59400",  # orange
    "optimizer_states": "#004D38",  # dark green
    "activations": "#8ACDF5",  # sky
    "gather_buffers": "#CC6FA3",  # pink
    "reduce_buffers": "#9C3300",  # rust
    "logits": "#F5EC6A",  # yellow
    "other": "#161616",  # black
}
CATEGORIES = tuple(COLOURS)
LABELS = {category: category.replace("_", " ") for category in CATEGORIES}
