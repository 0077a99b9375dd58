"""Lightning's Trainer with private steps: what is drawn, clipped, logged, saved and refused."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning as L
from lightning.pytorch import callbacks, loggers
from lightning.pytorch.strategies import DDPStrategy

from sordino import PrivacyEngine, RunFolder, accounting, verify
from sordino.errors import BudgetExceeded, InvalidArgument, LossShapeError, NonPrivateStep, PrivacyError
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback
from sordino.ledger import Ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def data(count=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Net(L.LightningModule):
    """Calls its layers in the training step, as Lightning's own first example does."""

    def __init__(self, **optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.options = {"lr": 0.1} | optimizer

    def losses(self, batch):
        return F.cross_entropy(self.head(torch.tanh(self.encoder(batch[0]))), batch[1], reduction="none")

    def training_step(self, batch, batch_idx):
        loss = self.losses(batch).mean()
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **self.options)


def privacy(**changes):
    return PrivacyArguments(**({"noise_multiplier": 1.0, "delta": 1e-5} | changes))


def trainer(callback, folder=None, **changes):
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    more = changes.pop("callbacks", [])
    return L.Trainer(callbacks=[callback, *more], **(quiet | changes))


def fitted(module=None, private=None, batch_size=16, records=64, **changes):
    callback = PrivacyCallback(privacy() if private is None else private)
    module = Net() if module is None else module
    made = trainer(callback, **changes)
    made.fit(module, DataLoader(data(records), batch_size=batch_size, shuffle=True))
    return module, callback, made


def epsilon_of(steps, noise=1.0, rate=0.25):
    event = SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise)), count=steps)
    return accounting.epsilon(event, 1e-5).upper


def oracle_step(records, *, clip, lr=0.1):
    """Plain autograd, a record at a time: minus the learning rate times the mean of clipped gradients."""
    net, moved = Net(), None
    for k in range(records):
        net.zero_grad()
        net.losses([column[k : k + 1] for column in data(records).tensors]).sum().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients)).item()
        scaled = [-lr / records * g * min(1.0, clip / norm) for g in gradients]
        moved = scaled if moved is None else [a + b for a, b in zip(moved, scaled, strict=True)]
    return moved


class EachRecord(Net):
    def training_step(self, batch, batch_idx):
        return self.losses(batch)


class ByForward(Net):
    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))

    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "seen": batch[0]}


@pytest.mark.parametrize("kind", [Net, EachRecord, ByForward])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_step_is_that_of_autograd_one_record_at_a_time(kind, accumulate):
    module = kind()
    before = [p.detach().clone() for p in module.parameters()]
    private = privacy(noise_multiplier=0.0, max_grad_norm=0.3)
    _, _, made = fitted(
        module,
        private,
        batch_size=16 // accumulate,
        records=16,
        accumulate_grad_batches=accumulate,
    )
    assert made.global_step == 1
    assert made.accumulate_grad_batches == accumulate
    for now, old, moved in zip(module.parameters(), before, oracle_step(16, clip=0.3), strict=True):
        assert torch.allclose(now.detach() - old, moved, atol=2e-7)


def test_steps_and_epsilon_are_those_of_the_plan():
    _, callback, made = fitted(max_epochs=3)
    assert made.global_step == 12
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(12), rel=1e-9)


def test_the_engine_is_not_replaced():
    callback = PrivacyCallback(privacy())
    with pytest.raises(AttributeError):
        callback.engine = PrivacyEngine()


def test_accumulated_batches_are_one_logical_batch():
    _, callback, made = fitted(batch_size=8, accumulate_grad_batches=4, max_epochs=2)
    assert made.global_step == 4
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(4, rate=0.5), rel=1e-9)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": 2}, 8),
        pytest.param({"max_epochs": -1, "max_steps": 5}, 5, marks=pytest.mark.slow),
        pytest.param({"max_epochs": 4, "limit_train_batches": 2}, 8, marks=pytest.mark.slow),
        pytest.param({"max_epochs": 4, "limit_train_batches": 0.5, "max_steps": 6}, 6, marks=pytest.mark.slow),
    ],
)
def test_a_target_is_met_and_never_exceeded(limits, steps):
    _, callback, made = fitted(private=privacy(noise_multiplier=None, target_epsilon=2.0), **limits)
    assert made.global_step == steps
    assert 1.98 < callback.guarantee().epsilon <= 2.0


def test_a_training_that_grows_on_the_way_is_stopped_at_its_target():
    class Longer(callbacks.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.fit_loop.max_epochs = 9

    callback = PrivacyCallback(privacy(noise_multiplier=None, target_epsilon=2.0))
    made = trainer(callback, callbacks=[Longer()], max_epochs=2)
    with pytest.raises(NonPrivateStep, match="planned"):
        made.fit(Net(), DataLoader(data(), batch_size=16))
    assert callback.guarantee().epsilon <= 2.0


def test_an_absurd_noise_leaves_no_trace_of_the_data():
    moved = []
    for noise in (1e4, 0.0):
        module, _, _ = fitted(private=privacy(noise_multiplier=noise), records=16)
        moved.append(
            torch.cat([(a - b).flatten() for a, b in zip(module.parameters(), Net().parameters(), strict=True)])
        )
    spread = 0.1 * 1e4 / 16
    assert moved[0].std().item() == pytest.approx(spread, rel=0.5)
    assert moved[1].abs().max() < 0.1


def test_empty_batches_are_steps():
    """Each of three records joins a batch with probability a third: none do in three batches of ten."""
    _, callback, made = fitted(batch_size=1, records=3, max_epochs=4)
    assert made.global_step == 12
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(12, rate=1 / 3), rel=1e-9)


def test_schedules_step_once_a_logical_batch():
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    _, _, made = fitted(Scheduled(), batch_size=4, accumulate_grad_batches=4, max_epochs=1)
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


@pytest.mark.slow
def test_a_schedule_may_ask_for_the_number_of_steps():
    class Planned(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            total = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(total) + 1)]

    _, _, made = fitted(Planned(), max_epochs=2)
    assert made.global_step == 8


@pytest.mark.slow
def test_bfloat16_autocast_trains():
    _, callback, made = fitted(precision="bf16-mixed")
    assert made.global_step == 4
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(4), rel=1e-9)


# --- what is shown -------------------------------------------------------------------------------------------------


class Watch(callbacks.Callback):
    def __init__(self):
        self.outputs, self.batches = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.batches.append(batch)


class Telling(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"train_accuracy": loss, "norm": loss})
        self.logger.log_metrics({"direct": float(loss.detach())}, step=0)
        return loss


def test_nothing_private_is_logged_or_handed_on(tmp_path):
    watch, log = Watch(), loggers.CSVLogger(tmp_path)
    _, _, made = fitted(Telling(), callbacks=[watch], logger=log, max_epochs=2)
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "epsilon" in text
    assert not any(name in text for name in ("train_loss", "accuracy", "norm", "direct"))
    assert set(made.callback_metrics) <= {"epsilon"}
    assert all(output == {"loss": 0.0} for output in watch.outputs)
    assert not any(isinstance(batch, torch.Tensor | tuple | list) for batch in watch.batches)


def test_diagnostics_show_losses_on_the_terminal_only_and_the_guarantee_says_so(capsys):
    _, callback, made = fitted(private=privacy(diagnostics="private"), max_steps=2)
    assert "private diagnostics: step 1, loss 0." in capsys.readouterr().err
    assert "train_loss" not in made.callback_metrics
    assert "not covered" in callback.guarantee().describe()


class Evaluated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.losses(batch).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.losses(batch).mean())


def test_evaluation_needs_public_data():
    train, held_out = DataLoader(data(), batch_size=16), DataLoader(data(8, seed=1), batch_size=8)
    with pytest.raises(InvalidArgument, match="public"):
        trainer(PrivacyCallback(privacy())).fit(Evaluated(), train, held_out)
    with pytest.raises(InvalidArgument, match="public"):
        trainer(PrivacyCallback(privacy())).test(Evaluated(), held_out)
    callback = PrivacyCallback(privacy(eval_data_are_public=True))
    made, module = trainer(callback, max_epochs=2), Evaluated()
    made.fit(module, train, held_out)
    assert "val_loss" in made.callback_metrics
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(8), rel=1e-9)
    assert "test_loss" in made.test(module, held_out, verbose=False)[0]


def test_module_and_trainer_are_given_back_as_they_were():
    module, callback, made = fitted()
    assert not {"log", "_call_batch_hook"} & set(vars(module))
    assert not {"configure_ddp", "training_step", "save_checkpoint"} & set(vars(made.strategy))
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert all(name.split(".")[0] in {"encoder", "head"} for name in module.state_dict())
    plain = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    plain.fit(module, DataLoader(data(), batch_size=16))
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(4), rel=1e-9)


# --- transfers -----------------------------------------------------------------------------------------------------


def test_batches_go_through_the_modules_own_transfer():
    seen = []

    class Own(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            seen.append(type(batch))
            return [batch[0] * 2.0, batch[1]]

    fitted(Own())
    assert seen
    assert all(kind in {list, tuple} for kind in seen)


# --- what was spent ------------------------------------------------------------------------------------------------


def saved_at(folder, steps, *, save_every=None, private=None):
    callback = PrivacyCallback(privacy() if private is None else private)
    keep = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_every or steps, save_top_k=-1)
    made = trainer(callback, callbacks=[keep], max_steps=steps, max_epochs=-1, enable_checkpointing=True)
    made.fit(Net(momentum=0.9), DataLoader(data(), batch_size=16))
    return callback


def resumed(path, steps, private=None):
    callback = PrivacyCallback(privacy() if private is None else private)
    made = trainer(callback, max_steps=steps, max_epochs=-1)
    made.fit(Net(momentum=0.9), DataLoader(data(), batch_size=16), ckpt_path=str(path))
    return callback, made


def test_a_run_goes_on_from_a_checkpoint_with_its_bill(tmp_path):
    saved_at(tmp_path, 3)
    callback, made = resumed(tmp_path / "step=3.ckpt", 8)
    assert made.global_step == 8
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(8), rel=1e-9)


def test_going_back_to_an_older_checkpoint_pays_for_what_newer_ones_showed(tmp_path):
    saved_at(tmp_path, 6, save_every=2)
    (tmp_path / "step=6.ckpt").unlink()
    callback, _ = resumed(tmp_path / "step=2.ckpt", 6)
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(10), rel=1e-9)


@pytest.mark.slow
def test_a_target_holds_over_resumed_trainings(tmp_path):
    private = privacy(noise_multiplier=None, target_epsilon=2.0)
    saved_at(tmp_path, 4, private=private)
    with pytest.raises(InvalidArgument, match="which is spent"):
        resumed(tmp_path / "step=4.ckpt", 8, private)
    callback, _ = resumed(tmp_path / "step=4.ckpt", 8, privacy(noise_multiplier=None, target_epsilon=3.0))
    assert 2.95 < callback.guarantee().epsilon <= 3.0


def test_a_checkpoint_without_a_bill_is_refused(tmp_path):
    made = L.Trainer(max_steps=2, logger=False, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu")
    made.fit(Net(), DataLoader(data(), batch_size=16))
    made.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(InvalidArgument, match="what was spent"):
        resumed(tmp_path / "plain.ckpt", 4)


def test_an_evaluation_of_a_checkpoint_is_no_license_for_another(tmp_path):
    saved_at(tmp_path, 3)
    plain = L.Trainer(
        max_steps=2, logger=False, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu"
    )
    plain.fit(Net(momentum=0.9), DataLoader(data(), batch_size=16))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    callback, loader = PrivacyCallback(privacy(eval_data_are_public=True)), DataLoader(data(), batch_size=16)
    made = trainer(callback, max_steps=5, max_epochs=-1)
    made.validate(Evaluated(momentum=0.9), loader, ckpt_path=str(tmp_path / "step=3.ckpt"))
    with pytest.raises(InvalidArgument, match="what was spent"):
        made.fit(Net(momentum=0.9), loader, ckpt_path=str(tmp_path / "plain.ckpt"))


def test_an_evaluation_of_a_checkpoint_leaves_all_planned_steps(tmp_path):
    saved_at(tmp_path, 3)
    private = privacy(noise_multiplier=None, target_epsilon=9.0, eval_data_are_public=True)
    callback, loader = PrivacyCallback(private), DataLoader(data(), batch_size=16)
    made = trainer(callback, max_steps=5, max_epochs=-1)
    made.validate(Evaluated(momentum=0.9), loader, ckpt_path=str(tmp_path / "step=3.ckpt"))
    made.fit(Net(momentum=0.9), loader)
    assert made.global_step == 5
    assert callback.guarantee().epsilon <= 9.0


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_hold_no_loss_name_their_run_and_carry_their_guarantee(tmp_path, weights_only):
    callback = PrivacyCallback(privacy())
    keep = callbacks.ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_weights_only=weights_only
    )
    made = trainer(callback, tmp_path, callbacks=[keep], max_steps=4, max_epochs=-1, enable_checkpointing=True)
    made.fit(Net(momentum=0.9), DataLoader(data(), batch_size=16))
    kept = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    if not weights_only:
        assert kept["callbacks"][callback.state_key] == kept["sordino"]
    run = RunFolder.open(tmp_path / "sordino-runs" / "1")
    assert json.loads(kept["sordino"]["run"])["id"] == run.meta["id"]
    assert json.loads(kept["sordino"]["guarantee"])["epsilon"] == pytest.approx(epsilon_of(2), rel=1e-9)
    assert "loss" not in repr(kept["loops"])
    assert verify(run).passed
    assert run.guarantee == callback.guarantee()


def test_a_checkpoint_without_its_run_folder_is_refused_and_found_where_it_is_named(tmp_path, monkeypatch):
    saved_at(tmp_path, 3)
    shutil.move("sordino-runs", tmp_path / "elsewhere")
    loader = DataLoader(data(), batch_size=16)
    with pytest.raises(InvalidArgument, match="what was spent since is not known"):
        resumed(tmp_path / "step=3.ckpt", 5)
    callback = PrivacyCallback(privacy(), run_folder=tmp_path / "elsewhere" / "1")
    made = trainer(callback, max_steps=5, max_epochs=-1)
    made.fit(Net(momentum=0.9), loader, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(5), rel=1e-9)


def test_an_evaluation_of_a_checkpoint_states_what_it_cost(tmp_path):
    saved_at(tmp_path, 3)
    callback = PrivacyCallback(privacy(eval_data_are_public=True))
    made = trainer(callback, max_steps=5, max_epochs=-1)
    loader = DataLoader(data(), batch_size=16)
    made.validate(Evaluated(momentum=0.9), loader, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(3), rel=1e-9)


@pytest.mark.slow
def test_fitting_again_goes_on_the_same_bill():
    module, callback, made = fitted()
    made.fit_loop.max_epochs = 2
    made.fit(module, DataLoader(data(), batch_size=16))
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(8), rel=1e-9)


def test_the_account_pays_and_stops_the_run(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare("records", epsilon=3.0, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        trainer(PrivacyCallback(privacy(), ledger=account), max_epochs=500).fit(
            Net(), DataLoader(data(), batch_size=16)
        )
    assert account.spent().epsilon <= 3.0


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"detect_anomaly": True}, "detect_anomaly"),
        ({"precision": "16-true"}, "precision"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"strategy": "ddp", "devices": 2}, "devices"),
        ({"strategy": "ddp_spawn", "devices": 2}, "strategy"),
        ({"strategy": DDPStrategy(ddp_comm_hook=print), "devices": 2}, "strategy"),
        ({"strategy": DDPStrategy(model_averaging_period=2), "devices": 2}, "strategy"),
        ({"strategy": "ddp", "devices": 2, "sync_batchnorm": True}, "sync_batchnorm"),
        ({"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder"),
        ({"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]}, "GradientAccumulationScheduler"),
        ({"callbacks": [callbacks.DeviceStatsMonitor()], "logger": True}, "DeviceStatsMonitor"),
    ],
)
def test_settings_that_would_leak_are_refused_by_name(tmp_path, changes, name):
    from sordino.integrations.lightning import check_trainer

    made = trainer(PrivacyCallback(privacy()), tmp_path, **changes)
    with pytest.raises(InvalidArgument, match=name):
        check_trainer(made, Net(), privacy())
    if changes.get("strategy") is None:
        with pytest.raises(InvalidArgument, match=name):
            made.fit(Net(), DataLoader(data(), batch_size=16))


@pytest.mark.parametrize(
    "name",
    [
        "BatchSizeFinder",
        "DeviceStatsMonitor",
        "GradientAccumulationScheduler",
        "LearningRateFinder",
        "ThroughputMonitor",
    ],
)
def test_subclasses_of_callbacks_that_are_refused_are_refused(name):
    from sordino.integrations.lightning import check_trainer

    kind = type("Own", (getattr(callbacks, name),), {"__init__": lambda self: None})
    made = trainer(PrivacyCallback(privacy()))
    made.callbacks.append(kind())
    with pytest.raises(InvalidArgument, match=name):
        check_trainer(made, Net(), privacy())


class Unseen(callbacks.Callback):
    """Trains on the loader by itself, as a finder of learning rates does."""

    def __init__(self, hook):
        setattr(self, hook, self.train)

    def train(self, trainer, pl_module, *rest):
        for index, batch in enumerate(DataLoader(data(), batch_size=16)):
            pl_module.training_step(batch, index).backward()


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_start"])
@pytest.mark.parametrize("first", [True, False])
def test_a_training_step_that_no_charged_batch_asked_for_raises(hook, first):
    callback, module = PrivacyCallback(privacy()), Net()
    before = [p.detach().clone() for p in module.parameters()]
    made = trainer(callback, callbacks=[Unseen(hook)])
    if first:
        made.callbacks.reverse()
    with pytest.raises(NonPrivateStep, match="training_step"):
        made.fit(module, DataLoader(data(), batch_size=16))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    assert "training_step" not in vars(module)


def test_the_other_name_of_the_package_works():
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Other(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = PrivacyCallback(privacy())
    made = pl.Trainer(max_epochs=1, callbacks=[callback], enable_model_summary=False, **quiet)
    made.fit(Other(), DataLoader(data(), batch_size=16))
    assert callback.guarantee().epsilon == pytest.approx(epsilon_of(4), rel=1e-9)
    found = pl.callbacks.LearningRateFinder()
    with pytest.raises(InvalidArgument, match="LearningRateFinder"):
        pl.Trainer(callbacks=[PrivacyCallback(privacy()), found], **quiet).fit(Other(), DataLoader(data()))


def test_a_loss_scaler_is_refused_by_name(monkeypatch):
    made = trainer(PrivacyCallback(privacy()))
    monkeypatch.setattr(type(made.strategy.precision_plugin), "precision", "16-mixed")
    with pytest.raises(InvalidArgument, match="loss scaler"):
        made.fit(Net(), DataLoader(data(), batch_size=16))


def test_a_target_needs_an_end():
    with pytest.raises(InvalidArgument, match="max_epochs or max_steps"):
        fitted(private=privacy(noise_multiplier=None, target_epsilon=1.0), max_epochs=-1)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Second(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Closing(Net):
    """Runs the closure once more before the step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class Skipping(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()


class NoLoss(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx < 1 else None


class Summed(Net):
    def training_step(self, batch, batch_idx):
        return self.losses(batch).sum()


class Centered(Net):
    def training_step(self, batch, batch_idx):
        return self.losses([batch[0] - batch[0].mean(0), batch[1]]).mean()


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(self.encoder, nn.BatchNorm1d(5))


class Guarded(Net):
    def training_step(self, batch, batch_idx):
        loss = self.losses(batch).mean()
        return loss if loss.item() < 20.0 else 0.0 * loss


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Manual, InvalidArgument, "automatic_optimization"),
        (Second, InvalidArgument, "LBFGS"),
        (Closing, NonPrivateStep, "twice"),
        (Skipping, NonPrivateStep, "left out"),
        (NoLoss, LossShapeError, "training_step must return a loss"),
        (Summed, PrivacyError, ""),
        (Centered, PrivacyError, ""),
        (Normed, PrivacyError, ""),
        (Guarded, PrivacyError, ""),
    ],
)
def test_modules_that_cannot_be_private_are_refused_and_keep_their_parameters(kind, error, words):
    module = kind()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(error, match=words):
        fitted(module)
    if kind is not NoLoss:
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_several_optimizers_are_refused():
    class Two(Net):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.head)]

    with pytest.raises(Exception, match="optimizer"):
        fitted(Two())


def test_several_loaders_are_refused():
    with pytest.raises(InvalidArgument, match="one DataLoader"):
        trainer(PrivacyCallback(privacy())).fit(Net(), [DataLoader(data(), batch_size=16)] * 2)
