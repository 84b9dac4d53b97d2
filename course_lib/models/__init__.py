"""Real models, built from a spec."""

from course_lib.models.llama import Llama, build

__all__ = ["Llama", "build"]
