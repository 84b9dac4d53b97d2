"""An explorer: a few controls over a pure function, its picture and its table.

    compute(**values) -> result      pure; the library's own arithmetic
    draw(axes) -> update(result)     makes the artists once; `update` moves them
    words(result) -> (alt, html)     the same in words: alternative text, and a table

`Explorer` ties them to widgets and does nothing else. Where there is no kernel (on the web, in a
notebook just opened), the last state stays readable: picture and table are kept in the output.
"""

from collections.abc import Callable, Mapping
from html import escape

import ipywidgets as widgets

from course_lib.errors import CourseError
from course_lib.figures.image import image_html, new_figure


class Shown(widgets.VBox):
    """Controls, by name, and the HTML of what they show now, with or without a kernel."""

    controls: Mapping[str, widgets.ValueWidget]

    @property
    def html(self) -> str:
        """Picture and table of the present state, or the sentence that says what is wrong."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **options):
        """The widget, and beside it what it shows now, for a reader without a kernel."""
        # A slider that stands on its first option has no label yet.
        values = {name: getattr(c, "label", "") or c.value for name, c in self.controls.items()}
        settings = " · ".join(f"{name} {escape(str(value))}" for name, value in values.items())
        data = super()._repr_mimebundle_(**options)
        return data | {"text/html": f"<p>{settings}</p>{self.html}"}


class Explorer(Shown):
    """Redraws its figure and its table whenever a control changes.

    `controls` maps each argument of `compute` to its widget.
    """

    def __init__(
        self,
        controls: Mapping[str, widgets.ValueWidget],
        compute: Callable,
        draw: Callable,
        words: Callable,
    ):
        self.controls, self._compute, self._words = controls, compute, words
        self._figure = new_figure()
        self._draw = draw(self._figure.add_subplot())
        self._view = widgets.HTML()
        for control in controls.values():
            control.observe(self._update, names="value")
        self._update()
        rows = widgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap"})
        super().__init__([rows, self._view])

    @property
    def html(self) -> str:
        return self._view.value

    def _update(self, _change=None) -> None:
        try:
            self._view.value = self._render()
        except CourseError as error:  # a job that cannot be: the learner should read why
            self._view.value = f"<p><strong>{escape(str(error))}</strong></p>"

    def _render(self) -> str:
        result = self._compute(**{name: control.value for name, control in self.controls.items()})
        self._draw(result)
        alt, table = self._words(result)
        return f'<figure style="margin:0">{image_html(self._figure, alt)}</figure>{table}'
