"""The exercises, described once each: one module a lesson, each with a tuple EXERCISES."""
