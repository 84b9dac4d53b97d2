"""Stock nbgrader's configuration. Run nbgrader here, in grading/:

    nbgrader generate_assignment 01_memory_ledger --CourseDirectory.release_directory=build/release
    nbgrader autograde 01_memory_ledger

The first writes the lesson into the gradebook; without its last option it would write notebooks/,
which is `course build`'s. Submissions lie in grading/submitted/STUDENT/01_memory_ledger/.
"""

from pathlib import Path

from course_lib.authoring.learner import configure

HERE = Path(__file__).resolve().parent

c = get_config()  # noqa: F821, nbgrader gives it
configure(c, HERE.parent)
c.CourseDirectory.submitted_directory = "grading/submitted"
c.CourseDirectory.autograded_directory = "grading/autograded"
c.CourseDirectory.feedback_directory = "grading/feedback"
c.CourseDirectory.db_url = f"sqlite:///{HERE / 'gradebook.db'}"
c.Execute.timeout = 300  # seconds a cell
