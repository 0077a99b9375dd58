"""Two trainers of other libraries as libraries of the conformance cases: they train as their users would."""

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.audit import ConformanceLoss, NotSupported
from sordino.errors import SordinoError


class _Trainer:
    refusals: tuple[type[Exception], ...] = (SordinoError,)

    def make_private(self, model: nn.Module, data: Any, **options: object) -> Any:
        raise NotSupported

    def resumed(self, interrupted: Any, model: nn.Module, data: Any, **options: object) -> Any:
        raise NotSupported

    def clipped_sum(
        self, model: nn.Module, batch: Sequence[Tensor], loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
        """One step on all records; what the optimizer saw times their number."""
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        seen: list[Tensor] = []

        def look(*_: object) -> None:
            seen.extend(torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trained)

        # After the step its gradient is still there.
        optimizer.register_step_post_hook(look)
        self.train(model, batch, loss, optimizer, max_grad_norm)
        return [len(batch[0]) * gradient for gradient in seen[: len(trained)]]

    def train(self, model: nn.Module, batch: Any, loss: ConformanceLoss, optimizer: Any, max_grad_norm: float) -> None:
        raise NotImplementedError


class ByLightning(_Trainer):
    """A LightningModule whose training step is the case's loss."""

    name = "Lightning"

    def train(self, model: nn.Module, batch: Any, loss: ConformanceLoss, optimizer: Any, max_grad_norm: float) -> None:
        import lightning as L

        from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback

        class Net(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, records: Any, batch_idx: int) -> Tensor:
                return loss.mean(self.model, records)

            def configure_optimizers(self) -> Any:
                return optimizer

        privacy = PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=max_grad_norm)
        with TemporaryDirectory() as folder:
            L.Trainer(
                max_steps=1,
                callbacks=[PrivacyCallback(privacy)],
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            ).fit(Net(), DataLoader(TensorDataset(*batch), batch_size=len(batch[0])))


class ByHuggingFace(_Trainer):
    """A model that returns one loss a record, handed on by record_loss; a scalar by a compute_loss of one's own."""

    name = "Hugging Face Trainer"

    def train(self, model: nn.Module, batch: Any, loss: ConformanceLoss, optimizer: Any, max_grad_norm: float) -> None:
        from transformers import TrainingArguments

        from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

        each = loss.each

        def columns_of(inputs: dict[str, Tensor]) -> list[Tensor]:
            return [inputs[f"column_{k}"] for k in range(len(batch))]

        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *inputs: Tensor, **columns: Tensor) -> Any:
                if each is None:
                    return self.model(*inputs)
                return {"losses": each(self.model, columns_of(columns))}

        class ByMean(PrivateTrainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
                return loss.mean(model, columns_of(inputs))

        records = [
            {"labels": torch.tensor(0)} | {f"column_{k}": column[place] for k, column in enumerate(batch)}
            for place in range(len(batch[0]))
        ]
        with TemporaryDirectory() as folder:
            (PrivateTrainer if each is not None else ByMean)(
                Named(),
                TrainingArguments(
                    folder,
                    per_device_train_batch_size=len(records),
                    max_steps=1,
                    report_to=[],
                    use_cpu=True,
                    save_strategy="no",
                    disable_tqdm=True,
                    remove_unused_columns=False,
                    dataloader_pin_memory=False,
                ),
                privacy=PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=max_grad_norm),
                record_loss=None if each is None else lambda outputs, labels: outputs["losses"],
                train_dataset=records,
                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
            ).train()
