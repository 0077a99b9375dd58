"""Ledgers to test on: a file, and a PostgreSQL server of the tests' own."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from sordino.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "privacy.db")


@pytest.fixture
def account(ledger):
    return ledger.declare("adult", epsilon=3.0, delta=1e-5)


@pytest.fixture(scope="session")
def postgres():
    """URL of a database: SORDINO_TEST_POSTGRES, or a server that is started here and stopped at the end."""
    if given := os.environ.get("SORDINO_TEST_POSTGRES"):
        yield given
        return
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    try:
        who = pwd.getpwnam("postgres") if os.getuid() == 0 else None
    except KeyError:
        initdb = None
    if initdb is None:
        reason = (
            "PostgreSQL's server programs are not installed (Debian: postgresql), and SORDINO_TEST_POSTGRES is unset"
        )
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="sordino-pg-"))
    drop = {}
    if who is not None:
        os.chown(folder, who.pw_uid, who.pw_gid)
        drop = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "env": {"LC_ALL": "C"}, **drop}
    subprocess.run(
        [initdb, "-D", folder / "data", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"], check=True, **quiet
    )
    server = subprocess.Popen(
        [Path(initdb).with_name("postgres"), "-D", folder / "data", "-k", folder, "-c", "listen_addresses=",
         "-c", "fsync=off", "-c", "max_connections=150"],
        **quiet,
    )  # fmt: skip
    try:
        for _ in range(600):
            if (folder / ".s.PGSQL.5432").exists() or server.poll() is not None:
                break
            time.sleep(0.05)
        assert server.poll() is None, "the server of the tests did not start"
        time.sleep(0.5)
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        server.terminate()
        server.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
