"""Lesson 01 in JupyterLab, as a learner works through it.

Set COURSE_SCREENSHOTS to a folder to keep pictures of what the test sees.
"""

import inspect
import os
from pathlib import Path

CHECK = "01-block"
SOLUTION = """def block_parameters(config):
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    return 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h
"""
IDLE = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
BUSY = 240_000  # ms, for the slowest cell on two cores


def picture(page, name: str) -> None:
    if folder := os.environ.get("COURSE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def open_lesson(page, lab: str, name: str) -> None:
    page.goto(f"{lab}/lab/tree/{name}/{name}.ipynb", timeout=BUSY)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=BUSY)
    until(page, lambda: page.locator(IDLE).count())


def run_all(page) -> None:
    """Run All Cells, until every code cell has its number.

    JupyterLab can drop what it is asked to run while the kernel still connects: ask again when the
    kernel has been idle for a while and cells have no number.
    """
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt")
    idle = page.locator(IDLE)
    for _ in range(3):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        quiet = 0
        while quiet < 10:
            page.wait_for_timeout(1000)
            if all(any(map(str.isdigit, text)) for text in prompts.all_inner_texts()):
                return
            quiet = quiet + 1 if idle.count() else 0
    raise AssertionError(f"cells that did not run: {prompts.all_inner_texts()}")


def until(page, condition, seconds: int = BUSY // 1000) -> None:
    """Look once a second. (A condition polled inside the page starves a busy page.)"""
    for _ in range(seconds):
        if condition():
            return
        page.wait_for_timeout(1000)
    raise AssertionError(f"not so after {seconds} s: {inspect.getsource(condition).strip()}")


def cell_with(page, text: str):
    return page.locator(".jp-Notebook .jp-CodeCell").filter(has_text=text).first


def test_lesson_01_runs_its_explorer_moves_and_a_check_turns(page, lab):
    open_lesson(page, lab, "01_memory_ledger")
    run_all(page)

    # Run All: only checks fail, and both receipts at the end balance.
    errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]').all_inner_texts()
    errors += page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()
    assert len(errors) == 6 and all(text.startswith("CheckFailed: 01-") for text in errors), errors
    assert page.get_by_text("The receipt balances: difference 0.").count() == 2
    picture(page, "lesson_01_after_run_all")

    # The explorer: its figure and its table follow the slider.
    explorer = cell_with(page, "explorers.memory_ledger")
    explorer.scroll_into_view_if_needed()
    figure, table = explorer.locator("img").first, explorer.locator("table").first
    before = figure.get_attribute("src"), table.inner_text()
    slider = explorer.get_by_role("slider").first
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    until(page, lambda: figure.get_attribute("src") != before[0])
    until(page, lambda: table.inner_text() != before[1])
    picture(page, "lesson_01_explorer")

    # A check that fails says so; the exercise is solved; the check passes.
    check = cell_with(page, f'check("{CHECK}"')
    check.scroll_into_view_if_needed()
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


def test_lesson_00_is_the_start_page(page, lab):
    page.goto(f"{lab}/", timeout=BUSY)
    until(page, lambda: any("00 · Start here" in x for x in page.locator("h1").all_inner_texts()))
    picture(page, "lesson_00_start")
