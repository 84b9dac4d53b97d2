import re
import xml.etree.ElementTree as xml

from course_lib import specs
from course_lib.ledger import COLOURS, model_states
from course_lib.specs import Recipe, Strategy


def lab(*strategy, **more):
    return model_states(specs.model("lab-25m"), Recipe("zero-fp16"), Strategy(*strategy, **more))


ZERO2 = """\
lab-25m, 24,771,150 parameters; zero-fp16, adamw; zero2 on 4 ranks
per rank            elements × bytes        bytes    GiB   share
parameters                             49,542,300  0.046   36.4%
  fp16 parameters   24,771,150 × 2 B   49,542,300  0.046   36.4%
gradients                              12,385,576  0.012    9.1%
  fp16 gradients     6,192,788 × 2 B   12,385,576  0.012    9.1%
optimizer states                       74,313,460  0.069   54.5%
  fp32 master copy   6,192,788 × 4 B   24,771,152  0.023   18.2%
  fp32 exp_avg       6,192,788 × 4 B   24,771,152  0.023   18.2%
  fp32 exp_avg_sq    6,192,788 × 4 B   24,771,152  0.023   18.2%
  step counters              1 × 4 B            4  0.000  < 0.1%
total on the GPU                      136,241,336  0.127
gradients, optimizer states: (24,771,150 + 2 of padding) / 4"""


def test_text():
    assert repr(lab("zero2", 4)) == ZERO2


def test_html_is_well_formed_and_says_the_same():
    html = lab("zero3", 4)._repr_html_()
    root = xml.fromstring(f"<div>{html}</div>")
    rows = [[("".join(cell.itertext())).strip() for cell in row] for row in root.iter("tr")]
    assert rows[0] == ["per rank", "elements × bytes", "bytes", "GiB", "share"]
    assert rows[1] == ["■ parameters", "", "12,385,594", "0.012", "12.5%"]
    assert rows[-1][:3] == ["total on the GPU", "", "99,085,052"]
    assert rows[-2] == ["step counters", "75 × 4 B", "300", "0.000", "< 0.1%"]
    assert "ceil(elements / 4) elements of each of 75 tensors" in "".join(root.itertext())


def test_html_shows_each_categorys_colour_once():
    html = lab("ddp")._repr_html_()
    drawn = {category: html.count(colour) for category, colour in COLOURS.items()}
    shown = ("parameters", "gradients", "optimizer_states")
    assert drawn == {category: int(category in shown) for category in COLOURS}


def test_names_from_a_config_are_escaped():
    spec = specs.read_config({"model_type": "bare", "parameters": 9}, name="<b>&")
    html = model_states(spec, Recipe(), Strategy())._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>" not in html


def test_offloaded_bytes_are_shown_as_the_hosts():
    text = repr(lab("zero3", 16, offload="all"))
    assert re.search(r"^total on the GPU +0 +0.000$", text, re.MULTILINE)
    assert "host's memory: 23.62 MiB per rank, 189.00 MiB for the 8 on a node" in text
    assert text.count("host\n") == 6


def test_no_row_is_wider_than_a_terminal():
    ledger = model_states(specs.model("llama3-70b"), Recipe("megatron-fp16"), Strategy())
    assert max(map(len, repr(ledger).splitlines())) <= 80
