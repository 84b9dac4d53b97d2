"""What is seen of a run while it goes on: the ranks' prints, and a line of progress."""

from course_lib.ranks import progress
from course_lib.ranks.lookout import Lookout
from course_lib.ranks.output import Output
from course_lib.ranks.protocol import Job

STREAMING = 1.0  # seconds from when on prints are shown as they come
PROGRESS = 2.0  # seconds from when on there is a line of progress
EVERY = 1.0  # seconds between its updates


class Screen:
    """Whoever makes one closes it."""

    def __init__(self, job: Job, lookout: Lookout) -> None:
        self._job, self._lookout = job, lookout
        self._output, self._progress = Output(job), progress.place()
        self._next = PROGRESS

    def refresh(self, seconds: float) -> None:
        """Called a few times a second; `seconds` after the ranks were started."""
        if seconds >= STREAMING and self._output.waits():
            self._progress.hide()
            self._output.show()
        if seconds >= self._next:
            self._next = seconds + EVERY
            job, latest = self._job, self._lookout.latest()
            self._progress.show(progress.line(job.world_size, seconds, job.timeout, latest))

    def close(self) -> None:
        """Show the rest of the prints."""
        self._progress.close()
        self._output.show(end=True)
