"""Which lines of a stack are the learner's, and how to name them.

A learner's frame is one that lies outside the standard library, installed packages and this
course's own library. A line of a notebook is named by its cell, "cell In[3], line 9". The source
is looked up in the parent, whose line cache knows the notebook's cells.
"""

import linecache
import os
import re
import sys
import sysconfig

from course_lib.ranks.protocol import Frame

COURSE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
    | {os.path.join(os.path.dirname(os.__file__), "")}
    | {os.path.join(COURSE, ""), os.path.join(os.path.dirname(COURSE), "grading", "")}
)
PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
RANK = os.path.join(os.path.dirname(__file__), "rank.py")
COLLECTIVES = "distributed_c10d.py"
PLUMBING = re.compile(  # says nothing about what is done
    r"_|<|wrapper|inner|decorate_context|logged|kernel"
)
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def learners(frame: Frame) -> bool:
    """True where the learner, not a library, wrote the line."""
    file = frame.file
    if file.startswith(("<frozen", "<eval_with_key")):
        return False
    return not (file.startswith(LIBRARIES) or PACKAGES.search(file))


def place(frame: Frame) -> str:
    """Where a line is: "cell In[3], line 9", "train.py, line 9"."""
    return f"{_file(frame.file)}, line {frame.line}"


def source(frame: Frame) -> str:
    """The line itself, without its indentation; empty where it is not to be had."""
    return linecache.getline(frame.file, frame.line).strip()


def whereabouts(frames: tuple[Frame, ...]) -> str:
    """What a rank at work was doing: "in barrier, cell In[3], line 9: dist.barrier()"."""
    own = [index for index, frame in enumerate(frames) if learners(frame)]
    call = _call(frames[own[-1] + 1 :] if own else frames)
    if not own:
        return f"in {call}" if call else "at work"
    last = frames[own[-1]]
    code = source(last)
    return (f"in {call}, " if call else "at ") + place(last) + (f": {code}" if code else "")


def dumped(text: str) -> tuple[tuple[Frame, ...], bool]:
    """The main thread's stack from what `rank._listen` and faulthandler wrote, and if it is whole.

    What lies outside the call of the learner's function is left out.
    """
    ident, _, dump = text.partition("\n")
    for thread in re.split(r"\n(?=(?:Current t|T)hread 0x)", "\n" + dump):
        header, _, stack = thread.partition("\n")
        if re.search(rf"0x0*{ident}\b", header):
            found = [Frame(file, int(line), name) for file, line, name in FRAME.findall(stack)]
            within = next((i for i, f in enumerate(found) if f.file == RANK), len(found))
            return tuple(reversed(found[:within])), within < len(found)
    return (), False


def _call(inner: tuple[Frame, ...]) -> str:
    """The collective if there is one below the learner's line, else the library's function."""
    telling = [frame for frame in inner if not PLUMBING.match(frame.function)]
    collectives = [frame for frame in telling if frame.file.endswith(COLLECTIVES)]
    return (collectives or telling or [Frame("", 0, "")])[0].function


def _file(file: str) -> str:
    if file.startswith("<"):
        return file
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    label = shell.compile.format_code_name(file) if shell else None
    if label:
        return "cell " + label[1]
    if inside := PACKAGES.search(file):
        return file[inside.end() :]
    near = os.path.relpath(file)
    return file if near.startswith("..") else near
