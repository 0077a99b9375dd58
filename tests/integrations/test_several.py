"""Several processes under other libraries' trainers are one run: what one process gives, one noise, one bill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from integrations import several
from sordino import accounting
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.integrations.trainer_support import check_count
from sordino.ledger import Ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TESTS = Path(__file__).parent.parent


def launched(folder, *asked):
    """What both processes saw of each training."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, several.__file__, json.dumps(asked), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    return list(zip(one, other, strict=True)), done.stderr


def flat(outcome):
    return np.concatenate([np.array(part) for part in outcome["weights"]])


def epsilon_of(steps, noise=0.5, rate=several.LOGICAL / several.RECORDS):
    event = SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise)), count=steps)
    return accounting.epsilon(event, 1e-5).upper


def accounts(folder):
    """For two processes, for one alone, and one that nothing fits."""
    ledger = Ledger(folder / "ledger.db")
    ledger.create()
    return [ledger.declare(name, epsilon=e, delta=1e-5) for name, e in (("two", 90.0), ("one", 90.0), ("small", 0.1))]


def charged_once(folder, pair, alone, refused):
    """What the first process charged is what one process alone would have."""
    two, one, small = (Ledger(folder / "ledger.db").account(name) for name in ("two", "one", "small"))
    agree(pair)
    assert pair[0]["epsilon"] == alone["epsilon"] <= two.spent().epsilon == one.spent().epsilon
    assert [one["error"] for one in refused] == ["BudgetExceeded"] * 2
    assert small.spent().epsilon == 0


def agree(pair):
    """To the last bit, for noise is the same and so are sums."""
    assert flat(pair[0]).tolist() == flat(pair[1]).tolist()
    assert pair[0]["epsilon"] == pair[1]["epsilon"]


def same_as_alone(pair, alone):
    """The same key draws the same batches and the same noise: only the order of additions differs."""
    agree(pair)
    assert np.abs(flat(pair[0]) - flat(alone)).max() < 1e-6
    assert pair[0]["epsilon"] == alone["epsilon"]
    shares = [one["shares"] for one in pair]
    assert len(shares[0]) == len(shares[1])
    # Records in one process while the other has none, and in both.
    assert any(a and not b for a, b in zip(*shares, strict=True))
    assert any(b for b in shares[1])


def absurd_noise_destroys(little, absurd):
    assert little["accuracy"] > 0.9
    assert absurd["accuracy"] < 0.8


def test_hugging_face(tmp_path):
    """One training as one process has it; gone on with by two and by one; charged once; refused in both."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    (tmp_path / "alone").mkdir()
    accounts(tmp_path)
    found, shown = launched(
        tmp_path,
        ["hugging_face", {}],
        ["hugging_face", {"resume": "checkpoint-4", "epochs": 3, "again": "checkpoint-8"}],
        ["hugging_face_bypass", {"noise": 1e-3}],
        ["hugging_face_bypass", {"noise": 1e4}],
        ["hugging_face", {"target": 3.0, "save_strategy": "no"}],
        ["hugging_face", {"ledger": "two", "save_strategy": "no"}],
        ["hugging_face", {"ledger": "small", "save_strategy": "no"}],
        ["hugging_face", {"resume": "checkpoint-9"}],
    )
    first, resumed, little, absurd, aimed, charged, refused, lost = found
    alone = several.hugging_face(tmp_path / "alone")
    same_as_alone(first, alone)
    assert first[0]["steps"] == alone["steps"] == 8
    assert not first[0]["is_wrapped"]
    assert first[0]["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
    assert not {"loss", "grad_norm", "train_loss"} & set(first[0]["logged"])
    # By the first process alone, and so are the logs of the stock Trainer.
    assert shown.count("private diagnostics: step 1, ") == 3
    files = {path.name for path in (tmp_path / "hugging" / "checkpoint-8").glob("rng_state*")}
    assert files == {"rng_state_0.pth", "rng_state_1.pth"}
    # Four newer steps beside the checkpoint, and eight of its own; then four more, from the checkpoint it wrote again.
    agree(resumed)
    assert resumed[0]["epsilon"] == pytest.approx(epsilon_of(20), rel=1e-9)
    for one in (0, 1):
        absurd_noise_destroys(little[one], absurd[one])
    agree(aimed)
    assert 2.95 < aimed[0]["epsilon"] <= 3.0
    charged_once(tmp_path, charged, several.hugging_face(tmp_path, ledger="one", save_strategy="no"), refused)
    assert [one["error"] for one in lost] == ["InvalidArgument"] * 2
    assert "what was spent is not known" in lost[1]["message"]
    # One process goes on where two stopped.
    on = several.hugging_face(tmp_path, resume="checkpoint-8", epochs=3)
    assert on["steps"] == 12
    assert on["epsilon"] == pytest.approx(epsilon_of(24), rel=1e-9)


def test_accelerate(tmp_path):
    """One loop as one process has it; states of the first process; charged once."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    (tmp_path / "alone").mkdir()
    accounts(tmp_path)
    found, _ = launched(
        tmp_path,
        ["accelerated", {}],
        ["accelerated", {"resume": "state-0", "epochs": 1, "split": True}],
        ["accelerated_bypass", {"noise": 1e-3}],
        ["accelerated_bypass", {"noise": 1e4}],
        ["accelerated", {"ledger": "two"}],
        ["accelerated", {"ledger": "small"}],
    )
    first, resumed, little, absurd, charged, refused = found
    same_as_alone(first, several.accelerated(tmp_path / "alone"))
    assert not first[0]["is_wrapped"]
    # States that these processes wrote themselves cost nothing again.
    assert [one["gone_back"] for one in first] == [first[0]["epsilon"]] * 2
    agree(resumed)
    assert resumed[0]["epsilon"] == pytest.approx(epsilon_of(12), rel=1e-9)
    for one in (0, 1):
        absurd_noise_destroys(little[one], absurd[one])
    charged_once(tmp_path, charged, several.accelerated(tmp_path, ledger="one"), refused)
    # One process goes on where two stopped, and pays for the four steps that the resumed ones took in the same folder.
    on = several.accelerated(tmp_path, resume="state-1", epochs=1)
    assert on["epsilon"] == pytest.approx(epsilon_of(16), rel=1e-9)


def test_lightning(tmp_path):
    """One fit as one process has it; gone on with by two and by one; charged once; the strategy is given back."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    (tmp_path / "alone").mkdir()
    accounts(tmp_path)
    found, shown = launched(
        tmp_path,
        ["lightning", {}],
        ["lightning", {"resume": "epoch=0.ckpt", "epochs": 3, "again": "epoch=1.ckpt"}],
        ["lightning_bypass", {"noise": 1e-3}],
        ["lightning_bypass", {"noise": 1e4}],
        ["lightning", {"ledger": "two"}],
        ["lightning", {"ledger": "small"}],
    )
    first, resumed, little, absurd, charged, refused = found
    alone = several.lightning(tmp_path / "alone")
    same_as_alone(first, alone)
    assert first[0]["steps"] == alone["steps"] == 8
    assert first[0]["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
    assert first[0]["logged"] == ["epsilon", "val_loss"]
    assert not first[0]["is_wrapped"]
    assert not first[0]["given_back"]
    assert shown.count("private diagnostics: step 1, ") == 2
    # Eight steps, eight more from the older checkpoint on, and four from the one that was then written again.
    agree(resumed)
    assert resumed[0]["epsilon"] == pytest.approx(epsilon_of(20), rel=1e-9)
    for one in (0, 1):
        absurd_noise_destroys(little[one], absurd[one])
    charged_once(tmp_path, charged, several.lightning(tmp_path, ledger="one"), refused)
    # One process goes on where two stopped.
    on = several.lightning(tmp_path, resume="epoch=1.ckpt", epochs=3)
    assert on["epsilon"] == pytest.approx(epsilon_of(24), rel=1e-9)


def accelerator(kind="MULTI_CPU", processes=2, **sizes):
    total, replicas = sizes.get("total", processes), sizes.get("replicas", processes)
    shape = SimpleNamespace(total_size=total, dp_replicate_size=replicas)
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind), num_processes=processes, parallelism_config=shape
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"kind": "DEEPSPEED"}, "distributed_type"),
        ({"kind": "FSDP"}, "distributed_type"),
        ({"kind": "TP"}, "distributed_type"),
        ({"total": 4}, "parallelism_config"),
        ({"total": 2, "replicas": 1}, "parallelism_config"),
        ({"kind": "NO", "processes": 1}, "num_processes"),
    ],
)
def test_launches_that_cannot_be_private_are_refused_by_name(monkeypatch, given, name):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from sordino.integrations.accelerate import check_launch

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launch(accelerator())
    with pytest.raises(InvalidArgument, match=name):
        check_launch(accelerator(**given))


def test_a_trainer_that_believes_it_is_alone_is_refused(monkeypatch):
    check_count("devices", 1, "Start one.")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match=r"devices must be the 3 that were started, got 1\. Start one\."):
        check_count("devices", 1, "Start one.")


def test_threads_that_share_a_batch_and_shards_of_a_model_are_refused_by_name(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import TrainingArguments

    from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

    privacy = PrivacyArguments(noise_multiplier=1.0, delta=1e-5)
    given = {"report_to": [], "use_cpu": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(tmp_path), **given)
    arguments._n_gpu = 2
    with pytest.raises(InvalidArgument, match="n_gpu"):
        PrivateTrainer(several.Net(), arguments, privacy=privacy)
    model = several.Net()
    model.layers[0].weight.device_mesh = "two"
    with pytest.raises(InvalidArgument, match="model must be whole"):
        PrivateTrainer(model, TrainingArguments(str(tmp_path), **given), privacy=privacy)
