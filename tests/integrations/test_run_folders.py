"""What trainers charged is on the disk before records are read: no crash and no resume makes the bill smaller."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integrations import killed
from sordino import RunFolder, accounting, verify
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.runs import TranscriptLine

TESTS = Path(__file__).parent.parent
NEEDS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate", "own_loop": "torch"}
OLDER = {
    "huggingface": "checkpoint-3",
    "lightning": "step=3.ckpt",
    "accelerate": "state-3",
    "own_loop": "at-3.safetensors",
}


def epsilon_of(steps):
    event = SelfComposed(event=PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=1.0)), count=steps)
    return accounting.epsilon(event, 1e-5).upper


def carried_out(library, folder, asked):
    """Each of `asked` is a list of trainings in one folder, one after the other."""
    pytest.importorskip(NEEDS[library], reason=f"{NEEDS[library]} is not installed")
    done = subprocess.run(
        [sys.executable, killed.__file__, library, str(folder), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


def lines_of(found):
    return [entry for entry in RunFolder.open(found["path"]).entries() if isinstance(entry, TranscriptLine)]


def check(found):
    """The transcript has a line for every batch that was read, and at most one more for each crash."""
    charged = len(lines_of(found))
    assert found["read"] <= charged <= found["read"] + found["kills"]
    assert found["epsilon"] == pytest.approx(epsilon_of(charged), rel=1e-9)
    assert found["done"] == killed.STEPS
    verified = verify(found["path"])
    assert verified.passed, [item for item in verified.items if item.status == "fail"]
    claim = RunFolder.open(found["path"]).guarantee
    assert claim is not None
    assert claim.epsilon == found["epsilon"]


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=() if name == "own_loop" else pytest.mark.slow) for name in NEEDS]
)
def test_killed_anywhere_and_resumed_all_that_was_read_is_charged(library, tmp_path):
    asked = [[{"place": place, "count": count}, {}] for place in killed.PLACES for count in (1, 5)]
    asked += [[{"place": "records read", "count": 8}, {"place": "after a line", "count": 4}, {}]]
    asked += [[{"place": "saving", "count": count}, {}] for count in (1, 2, 3)]
    found = carried_out(library, tmp_path, asked)
    for one in found:
        check(one)
    assert sum(one["kills"] for one in found) >= len(asked) - 1


@pytest.mark.parametrize("library", NEEDS)
def test_two_resumes_of_one_old_checkpoint_are_both_charged(library, tmp_path):
    again = {"resume": OLDER[library]}
    (found,) = carried_out(library, tmp_path, [[{"place": "gradient written", "count": 7}, again, again]])
    check(found)
    # Seven batches, then the five after the third, twice.
    assert found["read"] == 7 + 5 + 5
    attempts = [line.attempt for line in lines_of(found) if line.step == 5]
    assert attempts == [1, 2, 3]
