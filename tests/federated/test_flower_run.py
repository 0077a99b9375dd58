"""The example app under Flower's own simulation, offline: slow, and only where Flower and Ray are installed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: the extra `federated` has it")

APP = Path(__file__).parents[2] / "examples" / "flower"


def stop_those_with(home):
    """Flower leaves servers running; end those that were started with this home, by process number."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            if f"FLWR_HOME={home}".encode() in environment.split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)


@pytest.mark.slow
def test_flwr_run_ends_offline_and_prints_a_client_level_guarantee(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: flwr[simulation] has it")
    home, app = tmp_path / "home", tmp_path / "app"
    shutil.copytree(APP, app)
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["flwr", "run", str(app), "--stream", "--federation-config", "num-supernodes=8"]
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        stop_those_with(home)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    assert re.search(r"\(ε = 8\.00, δ = 0\.01\)-differentially private: unit one client", said), said[-2000:]
