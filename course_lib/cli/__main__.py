"""`python -m course_lib.cli` is `course`."""

from course_lib.cli import main

main()
