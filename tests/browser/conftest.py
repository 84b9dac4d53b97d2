"""JupyterLab as a learner sees it: `course lab` on a fresh work folder, in Chromium."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have Chromium: .ci/run installs it")
        pytest.skip("no Chromium or Chrome on this machine: the browser test needs one")
    return found


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> str:
    """The address of a JupyterLab that `course lab` started on a fresh work folder."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("notebooks", "course_lib"):
        (root / name).symlink_to(ROOT / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "course_lib.cli", "lab", "--no-browser", "--port", str(port)]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ip=127.0.0.1"]
    command += ["--LabApp.expose_app_in_browser=True"]
    log = (root / "lab.log").open("wb")
    settings = root / "settings"
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
    }
    _render_all_cells(settings)
    server = subprocess.Popen(
        command, cwd=root, stdout=log, stderr=subprocess.STDOUT, env=environment
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api", server, root / "lab.log")
        yield address
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def _render_all_cells(settings: Path) -> None:
    """JupyterLab keeps cells out of the page until they are scrolled to; a test looks at all."""
    folder = settings / "@jupyterlab" / "notebook-extension"
    folder.mkdir(parents=True)
    (folder / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not come up:\n{log.read_text()[-3000:]}")


@pytest.fixture
def page(chromium, lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        yield page
        if folder := os.environ.get("COURSE_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / "at_the_end.png")
        browser.close()
