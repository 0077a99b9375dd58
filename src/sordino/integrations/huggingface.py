"""The Hugging Face Trainer with private steps (floor 4, integrations; needs transformers and accelerate).

Arguments, callbacks, schedules and checkpoints are the stock Trainer's. Four things change: batches are drawn and
charged by the engine; a logical batch comes as chunks of ``per_device_train_batch_size``; the loss is one number a
record; and nothing that depends on private records is logged. Several processes are one run: the model is not
wrapped, and the engine adds clipped sums up.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, SordinoError
from sordino.integrations.arguments import PrivacyArguments, noise_for
from sordino.integrations.logical_batches import LogicalBatch, LogicalBatches
from sordino.integrations.processes import charges_of, take_over
from sordino.integrations.record_losses import is_causal, record_losses
from sordino.ledger import Account, Reservation
from sordino.training.drop_in.engine_checkpoint import bill_of
from sordino.training.engine import PrivacyEngine
from sordino.training.fitting.display import DIAGNOSED
from sordino.training.processes.ranks import ranks_here
from sordino.training.records.loader import PrivateLoader

try:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import PredictionOutput, TrainOutput

    from sordino.integrations.accelerated import check_launch, check_whole, unwrapped
except ImportError as error:
    raise SordinoError(
        f"sordino.integrations.huggingface must find transformers and accelerate, got {type(error).__name__}. Install "
        "transformers[torch]."
    ) from None

__all__ = ["PrivacyArguments", "PrivateTrainer"]

RecordLoss = Callable[[object, Tensor], Tensor]

_CHARGES = "sordino.json"
_SCHEMA = 1
# What may be told; all else may depend on private records.
_TOLD = ("epoch", "epsilon", "learning_rate", "step", "train_runtime", "train_steps_per_second")


class PrivateTrainer(Trainer):
    """``transformers.Trainer`` whose training steps are differentially private.

    Guarantee: the parameters after every step, and everything that is logged or saved, are (ε, δ)-differentially
    private as `guarantee` states. A logical batch is a Poisson sample of ``per_device_train_batch_size ×
    gradient_accumulation_steps × processes`` records on average, run in chunks of at most
    ``per_device_train_batch_size``; gradient accumulation changes memory, not the batch. All processes take part in
    every step, with or without records of their own. Losses, norms and batch sizes are not logged.

    Args:
        model: any `PreTrainedModel` or adapter; sequences must be padded to a fixed length.
        args: the stock arguments; those that can't be private are refused by name.
        privacy: ε and δ, clipping.
        record_loss: (outputs, labels) to one loss a record; by default from the logits, see `record_losses`.
        ledger: the data set's account.
        **trainer: the stock Trainer's other arguments.

    Raises:
        InvalidArgument: an argument would let something through that no noise covers, or couples records.

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        privacy: PrivacyArguments,
        record_loss: RecordLoss | None = None,
        ledger: Account | Reservation | None = None,
        **trainer: object,
    ) -> None:
        _check(args, privacy, trainer)
        self.privacy = privacy
        self._chunk_size = args.per_device_train_batch_size
        self._expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        # One item of our loader is a whole logical batch: the stock loop has nothing to accumulate or to clip.
        args.gradient_accumulation_steps, args.max_grad_norm, args.ignore_data_skip = 1, 0.0, True
        self._record_loss, self._begins_at = record_loss, 0
        self.engine = PrivacyEngine(ledger=ledger, gradients=privacy.gradients)
        super().__init__(model=model, args=args, **trainer)  # pyright: ignore[reportArgumentType]

    def guarantee(self) -> Guarantee:
        """What holds for all training steps so far."""
        found = self.engine.guarantee(self.privacy.delta)
        if self.privacy.diagnostics is None:
            return found
        return replace(found, caveats=(*found.caveats, DIAGNOSED))

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train, and give the model back without hooks. The output holds no loss."""
        self._begins_at = 0
        resumed = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        if isinstance(resumed, str | Path):
            self._take_over(Path(resumed))
        elif resumed:
            raise InvalidArgument("resume_from_checkpoint must be a folder's path, got True. Name the checkpoint.")
        try:
            found = cast("TrainOutput", super().train(*args, **kwargs))  # pyright: ignore[reportArgumentType]
        finally:
            self.engine.detach()
        metrics = {name: value for name, value in found.metrics.items() if _is_told(name)}
        return TrainOutput(found.global_step, math.nan, metrics)

    def create_accelerator_and_postprocess(self) -> None:
        """The stock accelerator; it may place the model and give its precision, but not wrap it."""
        super().create_accelerator_and_postprocess()
        check_launch(self.accelerator)
        check_whole(cast("nn.Module", self.model))
        unwrapped(self.accelerator)

    # --- batches -------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> "DataLoader[object]":
        """Logical batches, each a run of chunks; model and optimizer are private from here on."""
        dataset = cast("Dataset[object]", self.train_dataset)
        if dataset is None or not isinstance(dataset, Sized):
            raise InvalidArgument("train_dataset must be a data set with a length, got none. Give one.")
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        if hasattr(dataset, "column_names"):
            dataset, collator = self._remove_unused_columns(dataset, "training"), self.data_collator
        loader = DataLoader(
            dataset,
            batch_size=min(self._expected, len(dataset)),
            shuffle=True,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=False,
        )
        private = self._attached(loader)
        return cast("DataLoader[object]", LogicalBatches(private))

    def _attached(self, loader: "DataLoader[object]") -> PrivateLoader:
        optimizer = self.create_optimizer()
        inner = cast("Optimizer", getattr(optimizer, "optimizer", optimizer))
        private = self.privacy
        _, _, made = self.engine.make_private(
            module=cast("nn.Module", self.model),
            optimizer=inner,
            data_loader=loader,
            noise_multiplier=self._noise(loader),
            max_grad_norm=private.max_grad_norm,
            clipping=private.clipping,
            neighboring_relation=private.neighboring_relation,
            microbatch_size=self._chunk_size,
            public_records=private.public_records,
        )
        return made

    def _noise(self, loader: "DataLoader[object]") -> float:
        an_epoch = len(loader)
        steps = self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * an_epoch)
        coming = max(1, steps - self._begins_at)
        records = len(cast("Sized", loader.dataset))
        return noise_for(self.privacy, self.engine, steps=coming, sample_rate=1 / an_epoch, records=records)

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list[object], None]:
        """One logical batch; its tokens are not counted, for the count is private."""
        del num_batches, device
        found = next(epoch_iterator, None)
        return ([] if found is None else [found]), None

    # --- one step ------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: object, num_items_in_batch: object = None) -> Tensor:
        """Forward and backward of all chunks; the optimizer's own step, which follows, completes the logical batch."""
        del num_items_in_batch
        model.train()
        batch, total, chunks = cast("LogicalBatch", inputs), torch.zeros((), device=self.args.device), 0
        for chunk in batch:
            prepared = dict(self._prepare_inputs(cast("dict[str, Tensor]", chunk)))
            labels = cast("Tensor", prepared.pop("labels"))
            with self.compute_loss_context_manager():
                losses = self._losses(model(**prepared), labels)
            losses.mean().backward()
            chunks += 1
            if not batch.is_complete:
                # Adds this chunk to the sum; parameters change at the last one only, which the stock loop steps.
                self._inner_optimizer().step()
            if self.privacy.diagnostics is not None:
                total += losses.detach().mean()
        return total / max(chunks, 1)

    def _inner_optimizer(self) -> Optimizer:
        return cast("Optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def _losses(self, outputs: object, labels: Tensor) -> Tensor:
        if self._record_loss is not None:
            return self._record_loss(outputs, labels)
        return record_losses(outputs, labels, causal=is_causal(cast("nn.Module", self.model)))

    def floating_point_ops(self, inputs: object) -> int:
        """Zero: the number follows the size of the batch, which is private."""
        del inputs
        return 0

    # --- what is told and kept -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The stock log without losses and norms, and with the ε spent so far."""
        if self.privacy.diagnostics is not None and "loss" in logs and self.is_world_process_zero():
            # On this terminal only: what is logged goes to files, callbacks and services.
            sys.stderr.write(f"private diagnostics: step {self.state.global_step}, loss {logs['loss']:.4g}\n")
        told = {name: value for name, value in logs.items() if _is_told(name)}
        super().log({**told, "epsilon": self.engine.get_epsilon(self.privacy.delta)}, start_time)

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """The stock evaluation, on data that were declared public.

        Raises:
            InvalidArgument: they were not.
        """
        self._require_public()
        return super().evaluate(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    def predict(self, *args: object, **kwargs: object) -> PredictionOutput:
        """The stock predictions and their metrics, on data that were declared public.

        Raises:
            InvalidArgument: they were not.
        """
        self._require_public()
        return super().predict(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    def _require_public(self) -> None:
        if not self.privacy.eval_data_are_public:
            raise InvalidArgument(
                "eval_data_are_public must be True for an evaluation, got False: no noise covers what is measured on "
                "private records. Declare it, or buy an evaluation from the budget (docs/report.md)."
            )

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save and folder.is_dir():
            (folder / _CHARGES).write_text(json.dumps({"schema": _SCHEMA, "bill": bill_of(self.engine)}))

    def _take_over(self, folder: Path) -> None:
        """What was charged before this checkpoint was written, and by others of its family beside it since."""
        ranks = ranks_here()
        take_over(self.engine, lambda: _bill_in(folder), lambda: sorted(folder.parent.glob(f"checkpoint-*/{_CHARGES}")))
        # The stock loop reads model and optimizer in each process, and goes on without what it does not find.
        ranks.require_same(resume_from_checkpoint=sorted(path.name for path in folder.glob("*") if _is_shared(path)))
        state = ranks.agreed(lambda: json.loads((folder / "trainer_state.json").read_text()))
        self._begins_at = int(state["global_step"])


def _bill_in(folder: Path) -> Mapping[str, Mapping[str, int]]:
    if not (folder / _CHARGES).is_file():
        raise InvalidArgument(
            f"resume_from_checkpoint must hold {_CHARGES}, got a folder without it: what was spent is not known."
        )
    return charges_of(folder / _CHARGES)


def _is_shared(path: Path) -> bool:
    """Whether a file of a checkpoint is everybody's: states of generators are each process's own."""
    return not path.name.startswith("rng_state")


def _check(args: TrainingArguments, privacy: PrivacyArguments, trainer: dict[str, object]) -> None:
    """Refuse what couples records, needs a gradient that isn't there, or shows what is private."""
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    optim = str(getattr(args.optim, "value", args.optim))
    refused = {
        "fp16": args.fp16,
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "auto_find_batch_size": args.auto_find_batch_size,
        "debug": bool(args.debug),
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen not in (False, "no"),
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "n_gpu": args.n_gpu > 1,
        "optim": "layerwise" in optim or "lomo" in optim,
        "eval_strategy": evaluates and not privacy.eval_data_are_public,
        "compute_loss_func": trainer.get("compute_loss_func") is not None,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise InvalidArgument(f"{name} must be left at its default for a private run, got {_WHY[name]}")


def _is_told(name: str) -> bool:
    """Evaluations are of public data, or refused."""
    return name in _TOLD or name.startswith("eval_")


_WHY = {
    "fp16": "True: a loss scaler looks at raw gradients. Use bf16=True.",
    "label_smoothing_factor": "a value: it takes means over the batch. Smooth the labels in record_loss.",
    "auto_find_batch_size": "True: the batch size is part of the guarantee. Lower per_device_train_batch_size instead.",
    "debug": "an option: it prints activations, and stops where a record's are not numbers. Leave it out.",
    "include_num_input_tokens_seen": "True: the number of tokens of a batch is private. Leave it out.",
    "deepspeed": "a configuration. Run without it.",
    "fsdp": "a configuration. Run without it.",
    "n_gpu": "several for one process, which nn.DataParallel would share among threads. Start one process for each "
    "(torchrun --nproc-per-node), or show one in CUDA_VISIBLE_DEVICES.",
    "optim": "one that steps inside the backward pass. Use adamw_torch or sgd.",
    "eval_strategy": "an evaluation of data that were not declared public. Pass eval_data_are_public=True if they are.",
    "compute_loss_func": "a function of the batch. Give record_loss=…: one loss a record.",
}
