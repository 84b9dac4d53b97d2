"""Properties are tried on the same examples every time, and however slow the machine is."""

from hypothesis import settings

settings.register_profile("comm", deadline=None, derandomize=True)
settings.load_profile("comm")
