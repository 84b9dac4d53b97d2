"""Models by name.

data/presets.json holds, for each, the keys of its published config.json that decide its
parameters, and the name under which the Hugging Face Hub has it; `model` knows both names. The
ZeRO paper's models (arXiv 1910.02054, table 1) are bare counts. `lab-25m` is the course's own:
small enough to train on a laptop, of sizes that 4 and 8 do not divide, so that padding shows.
"""

import json
from functools import cache
from pathlib import Path

from course_lib.specs.checking import known
from course_lib.specs.config import read_config
from course_lib.specs.model_spec import ModelSpec

PRESETS = Path(__file__).parent / "data" / "presets.json"


def models() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(_presets())


def model(name: str) -> ModelSpec:
    """The preset called `name`: 'llama2-7b' or, as on the Hub, 'meta-llama/Llama-2-7b-hf'.

    Raises CourseError, with the names that are near, where there is none.
    """
    presets = _presets()
    on_the_hub = {preset.get("hub", short).lower(): short for short, preset in presets.items()}
    short = str(name).strip().lower()
    short = on_the_hub.get(short, short)
    known("model preset called", short, presets)
    return read_config(presets[short]["config"], short)


@cache
def _presets() -> dict[str, dict]:
    return json.loads(PRESETS.read_text())
