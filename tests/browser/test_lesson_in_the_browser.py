"""Lessons in JupyterLab, as a learner works through them.

Set COURSE_SCREENSHOTS to a folder to keep pictures of what the test sees.
"""

import contextlib
import inspect
import os
from pathlib import Path

import pytest
from playwright.sync_api import Error

CHECK = "01-block"
SOLUTION = """def block_parameters(config):
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    return 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h
"""
OPEN = """async path => {
    await jupyterapp.restored;
    await jupyterapp.serviceManager.kernelspecs.ready;
    await jupyterapp.commands.execute("docmanager:open", { path });
}"""
KERNEL = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
BUSY = 240_000  # ms, for the slowest cell on two cores


def picture(page, name: str) -> None:
    if folder := os.environ.get("COURSE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def open_lesson(page, lab: str, name: str) -> None:
    """In a workspace of its own: JupyterLab would open again what the test before had open.

    The notebook is opened when the kernels are listed, as JupyterLab may ask for one before.
    """
    page.set_default_timeout(BUSY)
    page.goto(f"{lab}/lab/workspaces/{name}")
    until(page, lambda: page.evaluate("'jupyterapp' in window"))
    page.evaluate(OPEN, f"{name}/{name}.ipynb")
    until(page, lambda: page.evaluate(KERNEL) == "idle")


def run_all(page) -> None:
    """Run All Cells, until every code cell has its number.

    JupyterLab can drop what it is asked to run while the kernel still connects: ask again when the
    kernel has been idle for a while and cells have no number.
    """
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt")
    for _ in range(3):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        quiet = 0
        while quiet < 10:
            page.wait_for_timeout(1000)
            if all(any(map(str.isdigit, text)) for text in prompts.all_inner_texts()):
                return
            quiet = quiet + 1 if page.evaluate(KERNEL) == "idle" else 0
    raise AssertionError(f"cells that did not run: {prompts.all_inner_texts()}")


def until(page, condition, seconds: int = BUSY // 1000) -> None:
    """Look once a second. (A condition polled inside the page starves a busy page.)"""
    for _ in range(seconds):
        if condition():
            return
        choose_a_kernel(page)
        page.wait_for_timeout(1000)
    raise AssertionError(f"not so after {seconds} s: {inspect.getsource(condition).strip()}")


def choose_a_kernel(page) -> None:
    """A JupyterLab whose kernel was slow to start asks which one to take: the notebook's."""
    asked = page.locator(".jp-Dialog").filter(has_text="Select Kernel")
    for button in asked.get_by_role("button", name="Select").all():
        with contextlib.suppress(Error):  # the dialog went away meanwhile
            button.click(timeout=5000, no_wait_after=True)


def scroll_to(page, locator) -> None:
    """Bring it into view, again where JupyterLab draws it anew meanwhile."""

    def in_view() -> bool:
        with contextlib.suppress(Error):
            locator.scroll_into_view_if_needed(timeout=5000)
            return True
        return False

    until(page, in_view)


def cell_with(page, text: str):
    return page.locator(".jp-Notebook .jp-CodeCell").filter(has_text=text).first


def errors(page) -> list[str]:
    """What cells raised or wrote to stderr."""
    kinds = ("error", "stderr")
    found = [page.locator(f'[data-mime-type="application/vnd.jupyter.{kind}"]') for kind in kinds]
    return [text for each in found for text in each.all_inner_texts()]


def move_the_explorer(page, call: str) -> None:
    """Its figure and its table follow the slider."""
    explorer = cell_with(page, call)
    scroll_to(page, explorer)
    figure, table = explorer.locator("img").first, explorer.locator("table").first
    before = figure.get_attribute("src"), table.inner_text()
    slider = explorer.get_by_role("slider").first
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    until(page, lambda: figure.get_attribute("src") != before[0])
    until(page, lambda: table.inner_text() != before[1])


def test_lesson_01_runs_its_explorer_moves_and_a_check_turns(page, lab):
    open_lesson(page, lab, "01_memory_ledger")
    run_all(page)

    # Run All: only checks fail, and both receipts at the end balance.
    found = errors(page)
    assert len(found) == 6 and all(text.startswith("CheckFailed: 01-") for text in found), found
    assert page.get_by_text("The receipt balances: difference 0.").count() == 2
    picture(page, "lesson_01_after_run_all")

    move_the_explorer(page, "explorers.memory_ledger")
    picture(page, "lesson_01_explorer")

    # A check that fails says so; the exercise is solved; the check passes.
    check = cell_with(page, f'check("{CHECK}"')
    scroll_to(page, check)
    assert "Not solved yet" in check.inner_text()
    exercise = cell_with(page, "def block_parameters(config)")
    exercise.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(SOLUTION)
    page.keyboard.press("Shift+Enter")
    check.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    until(page, lambda: "passed, 3 points" in check.inner_text())
    picture(page, "lesson_01_solved")


@pytest.mark.parametrize(
    ("name", "explorer", "receipts", "others"),
    [
        ("03_communication_ledger", "explorers.network_price", 3, ()),
        ("04_ddp_redundancy", "explorers.bucket_overlap", 2, ("RankDesync: ",)),
    ],
)
def test_unsolved_lesson_runs_and_only_its_checks_fail(page, lab, name, explorer, receipts, others):
    open_lesson(page, lab, name)
    run_all(page)
    allowed = (f"CheckFailed: {name[:2]}-", *others)
    assert all(text.startswith(allowed) for text in errors(page)), errors(page)
    assert page.get_by_text("The receipt balances: difference 0.").count() == receipts
    move_the_explorer(page, explorer)
    picture(page, f"{name}_explorer")
    if os.environ.get("COURSE_SCREENSHOTS"):
        for number, image in enumerate(page.locator(".jp-OutputArea img").all()):
            scroll_to(page, image)
            picture(page, f"{name}_figure_{number}")


def test_lesson_00_is_the_start_page(page, lab):
    page.goto(f"{lab}/", timeout=BUSY)
    until(page, lambda: any("00 · Start here" in x for x in page.locator("h1").all_inner_texts()))
    picture(page, "lesson_00_start")
