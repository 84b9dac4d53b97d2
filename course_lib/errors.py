"""The one error for bad input, whoever gave it: a learner, a config file, a command line."""


class CourseError(ValueError):
    """Bad input. Its message is one sentence: what was given, what was expected, what to do next.

    The command line prints the sentence and exits with code 2; a notebook shows it as it is.
    """
