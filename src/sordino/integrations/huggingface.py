"""The Hugging Face Trainer with private steps (needs transformers and accelerate).

Arguments, callbacks, schedules and checkpoints are the stock Trainer's. Four things change: batches are drawn and
charged by the engine; a logical batch comes as chunks of ``per_device_train_batch_size``; the loss is one number a
record; and nothing that depends on private records is logged. Several processes are one run: the model is not
wrapped, and the engine adds clipped sums up.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, SordinoError
from sordino.integrations.trainer_support import (
    LogicalBatch,
    LogicalBatches,
    PrivacyArguments,
    TrainerRun,
    check_settings,
    write_note,
)
from sordino.ledger import Account, Reservation
from sordino.training.distributed import get_distributed_context
from sordino.training.engine import PrivacyEngine

try:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import PredictionOutput, TrainOutput

    from sordino.integrations.accelerate import check_launch, check_whole, unwrapped
except ImportError as error:
    raise SordinoError(
        f"sordino.integrations.huggingface must find transformers and accelerate, got {type(error).__name__}. "
        "Install sordino[huggingface]."
    ) from None

__all__ = [
    "Labels",
    "PrivacyArguments",
    "PrivateTrainer",
    "decoder_inputs",
    "is_causal",
    "predicts_numbers",
    "record_losses",
]


# ----------------------------------------------------------------------------------------------------------------------
# One loss a record from what Hugging Face models return.
#
# A model's own ``.loss`` is a mean over the tokens of the *batch*: how much a record counts in it depends on how many
# tokens the others have. Here every record's loss is its own, divided by public numbers only.
# ----------------------------------------------------------------------------------------------------------------------


Labels = Tensor | Mapping[str, Tensor]

_IGNORED = -100
# Language models whose labels stand where they are, although their names say LMHead.
_UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


def is_causal(model: nn.Module) -> bool:
    """Whether logits at a position predict the next token: by the name of the model's class, inside an adapter too."""
    inner = _inside(model)
    name = type(inner).__name__
    if "ConditionalGeneration" in name:
        return not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return ("CausalLM" in name or "LMHead" in name) and name not in _UNSHIFTED


def predicts_numbers(model: nn.Module) -> bool:
    """Whether the model's configuration says that its outputs are numbers."""
    return getattr(getattr(_inside(model), "config", None), "problem_type", None) == "regression"


def decoder_inputs(model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """What the decoder of a sequence-to-sequence model reads: the labels, one position later, as the model shifts them.

    Args:
        model: any; nothing is added for one without such a decoder, or when `inputs` hold what it reads.
        inputs: what the model will be called with.
        labels: shape (B, T), −100 where nothing is predicted.
    """
    inner = _inside(model)
    shifts = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    is_seq2seq = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    tokens = labels.dim() == 2 and not labels.is_floating_point()
    if not is_seq2seq or not callable(shifts) or not tokens or any(name in inputs for name in _DECODER):
        return {}
    return {"decoder_input_ids": cast("Tensor", shifts(labels=labels))}


def record_losses(
    outputs: object, labels: Labels, *, causal: bool, label_smoothing: float = 0.0, numbers: bool = False
) -> Tensor:
    """The loss of each record, shape (B,).

    Classification: cross-entropy. Several labels at once (floating-point labels in the logits' shape): binary
    cross-entropy, their mean. Numbers: squared error, the mean over several. Tokens: the sum of the cross-entropies
    over positions whose label is not −100, divided by the length of the padded sequence, which is public; `causal`
    shifts labels by one. Question answering: the mean of the cross-entropies of first and last position; one outside
    the sequence counts for nothing.

    Args:
        outputs: what the model returned, with ``logits`` of shape (B, classes), (B, T, vocabulary) or (B, 1); or with
            ``start_logits`` and ``end_logits``, (B, T).
        labels: shape (B,), (B, T) or (B, classes); or ``start_positions`` and ``end_positions``, (B,) each.
        causal: whether position t predicts the token at t + 1.
        label_smoothing: share in [0, 1) of every cross-entropy over classes or tokens that is spread over all of them.
        numbers: whether floating-point labels in the logits' shape are numbers, and not several labels.

    Raises:
        InvalidArgument: logits and labels have other shapes or names.
    """
    if isinstance(labels, Mapping):
        return _span_losses(outputs, labels, label_smoothing)
    logits = _part(outputs, "logits")
    if logits is None:
        raise InvalidArgument("outputs must have logits, got none. Give record_loss=… to the trainer.")
    if labels.is_floating_point():
        return _number_losses(logits, labels, numbers=numbers)
    if logits.dim() == 2 and labels.dim() == 1:
        return _cross_entropy(logits, labels, label_smoothing=label_smoothing)
    if logits.dim() == 3 and labels.dim() == 2:
        length = logits.shape[1]
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return _cross_entropy(logits.transpose(1, 2), labels, label_smoothing=label_smoothing).sum(1) / length
    raise _shapes()


def _number_losses(logits: Tensor, labels: Tensor, *, numbers: bool) -> Tensor:
    """Floating-point labels: several yes-or-no labels, or numbers."""
    if labels.dim() == 1 and logits.dim() == 2 and logits.shape[1] == 1:
        return (logits[:, 0].float() - labels.float()).square()
    if labels.shape != logits.shape:
        raise _shapes()
    if logits.shape[-1] > 1 and not numbers:
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    else:
        losses = (logits.float() - labels.float()).square()
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def _span_losses(outputs: object, labels: Mapping[str, Tensor], label_smoothing: float) -> Tensor:
    names = ("start", "end")
    logits = [_part(outputs, f"{name}_logits") for name in names]
    if set(labels) != {f"{name}_positions" for name in names} or any(part is None for part in logits):
        raise InvalidArgument(
            f"labels must be of one kind, or start_positions and end_positions, got {', '.join(sorted(labels))}. Give "
            "record_loss=… to the trainer: (outputs, labels by name) to one loss a record."
        )
    losses = []
    for name, part in zip(names, logits, strict=True):
        assert part is not None
        length, positions = part.shape[1], labels[f"{name}_positions"].reshape(-1)
        # As the models do: an answer that was cut off is at the position after the last.
        target = positions.clamp(0, length)
        losses.append(_cross_entropy(part, target, ignored=length, label_smoothing=label_smoothing))
    return torch.stack(losses).mean(0)


def _cross_entropy(logits: Tensor, labels: Tensor, *, ignored: int = _IGNORED, label_smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.float(), labels, ignore_index=ignored, reduction="none", label_smoothing=label_smoothing
    )


def _part(outputs: object, name: str) -> Tensor | None:
    found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return found if isinstance(found, Tensor) else None


def _inside(model: nn.Module) -> nn.Module:
    """The model that an adapter is around, or itself."""
    inner = getattr(model, "get_base_model", None)
    return cast("nn.Module", inner()) if callable(inner) else model


def _shapes() -> InvalidArgument:
    return InvalidArgument(
        "labels must fit the model's logits, (B,) to (B, classes) or (B, T) to (B, T, vocabulary), got other shapes. "
        "Give record_loss=… to the trainer: (outputs, labels) to one loss a record."
    )


# ----------------------------------------------------------------------------------------------------------------------
# The Hugging Face Trainer with private steps (needs transformers and accelerate).
# ----------------------------------------------------------------------------------------------------------------------


RecordLoss = Callable[[object, Labels], Tensor]

_NOTE = "sordino.json"
_STATE = "trainer_state.json"
# What may be shown; everything else may depend on private records.
_TOLD = ("epoch", "epsilon", "learning_rate", "step", "train_runtime", "train_steps_per_second")


class PrivateTrainer(Trainer):
    """``transformers.Trainer`` whose training steps are differentially private.

    Guarantee: the parameters after every step, and everything that is logged or saved, are (ε, δ)-differentially
    private as `guarantee` states. A logical batch is a Poisson sample of ``per_device_train_batch_size ×
    gradient_accumulation_steps × processes`` records on average, run in chunks of at most
    ``per_device_train_batch_size``; gradient accumulation changes memory, not the batch. All processes take part in
    every step, with or without records of their own. Losses, norms and batch sizes are not logged. Every step is in the
    transcript of a run folder before its records are read, and a training that is resumed, from whichever checkpoint,
    is charged all that stands there.

    Args:
        model: any `PreTrainedModel` or adapter; or None with ``model_init``.
        args: the stock arguments; those that can't be private, and those that would be ignored, are refused by name.
        privacy: ε and δ, clipping.
        record_loss: (outputs, labels) to one loss a record; by default from the logits, see `record_losses`. Of several
            kinds of labels it gets a dict. Without it an overridden ``compute_loss``, or ``compute_loss_func``, is
            called on one chunk after another, and is refused unless its loss is a mean over records or one a record.
        ledger: the dataset's account.
        run_folder: a new folder for the run's transcript and guarantee, or that of the run to go on with; by default
            the next number in ``sordino-runs`` under ``output_dir``.
        **trainer: the stock Trainer's other arguments.

    Raises:
        InvalidArgument: an argument would let something through that no noise covers, or couples records, or would have
            no effect.

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        privacy: PrivacyArguments,
        record_loss: RecordLoss | None = None,
        ledger: Account | Reservation | None = None,
        run_folder: str | Path | None = None,
        **trainer: object,
    ) -> None:
        args = TrainingArguments() if args is None else args
        _check(args, privacy)
        self._check_overrides(record_loss, trainer)
        self.privacy = privacy
        self._private = TrainerRun(privacy, ledger=ledger, run_folder=run_folder)
        self._chunk_size = args.per_device_train_batch_size
        self._expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        # One item of our loader is a whole logical batch: the stock loop has nothing to accumulate or to clip.
        args.gradient_accumulation_steps, args.max_grad_norm, args.ignore_data_skip = 1, 0.0, True
        self._record_loss, self._first_step, self._is_private_step = record_loss, 0, False
        super().__init__(model=model, args=args, **trainer)  # pyright: ignore[reportArgumentType]

    def _check_overrides(self, record_loss: RecordLoss | None, trainer: dict[str, object]) -> None:
        """Refuse what a subclass changes and this loop would not call, or would hand private counts to."""
        for name, why in _NOT_CALLED.items():
            if getattr(type(self), name) is not getattr(PrivateTrainer, name):
                raise InvalidArgument(
                    f"{name} must be left as it is for a private run, got one of {type(self).__name__}: {why}"
                )
        own = [name for name in ("compute_loss_func",) if trainer.get(name) is not None]
        own += ["compute_loss"] if type(self).compute_loss is not PrivateTrainer.compute_loss else []
        if record_loss is not None and own:
            raise InvalidArgument(f"record_loss must be None together with {own[0]}, got both. Give one of them.")

    @property
    def engine(self) -> PrivacyEngine:
        """Makes the steps private and keeps the charges."""
        return self._private.engine

    def guarantee(self) -> Guarantee:
        """What holds for all training steps so far."""
        return self.engine.guarantee(self.privacy.delta)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train, and give the model back without hooks. The output holds no loss.

        ``resume_from_checkpoint`` is a folder, or True for the last whole checkpoint in ``output_dir``.
        """
        bound = inspect.signature(super().train).bind(*args, **kwargs)
        resumed = bound.arguments.get("resume_from_checkpoint")
        self._first_step = 0
        if resumed is True:
            resumed = bound.arguments["resume_from_checkpoint"] = self._last_checkpoint()
        folder = Path(str(resumed)) if resumed else None
        self._private.begin(
            under=str(self.args.output_dir),
            training={
                "trainer": "transformers.Trainer",
                "model": type(self.model).__name__,
                "optimizer": self.args.optim,
            },
            continues=True,
            note=None if folder is None else partial(_note_in, folder),
            near=() if folder is None else (folder,),
            what="resume_from_checkpoint",
        )
        if folder is not None:
            ranks = get_distributed_context()
            # The stock loop reads model and optimizer in each process, and goes on without what it does not find.
            shared = sorted(path.name for path in folder.glob("*") if _is_shared(path))
            ranks.require_same(resume_from_checkpoint=shared)
            self._first_step = ranks.broadcast_from_rank_zero(partial(_checkpoint_step, folder))
        try:
            found = cast("TrainOutput", super().train(*bound.args, **bound.kwargs))
        finally:
            self.engine.detach()
        metrics = {name: value for name, value in found.metrics.items() if _is_public_log(name)}
        return TrainOutput(found.global_step, math.nan, metrics)

    def create_accelerator_and_postprocess(self) -> None:
        """The stock accelerator; it may place the model and give its precision, but not wrap it."""
        super().create_accelerator_and_postprocess()
        check_launch(self.accelerator)
        if isinstance(model := getattr(self, "model", None), nn.Module):
            check_whole(model)
        unwrapped(self.accelerator)

    # --- batches -------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> "DataLoader[object]":
        """Logical batches, each a run of chunks; model and optimizer are private from here on."""
        dataset = cast("Dataset[object]", self.train_dataset)
        if dataset is None or not isinstance(dataset, Sized):
            raise InvalidArgument("train_dataset must be a dataset with a length, got none. Give one.")
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        if hasattr(dataset, "column_names"):
            dataset, collator = self._remove_unused_columns(dataset, "training"), self.data_collator
        loader = DataLoader(
            dataset,
            batch_size=min(self._expected, len(dataset)),
            shuffle=True,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            pin_memory=False,
        )
        steps_per_epoch = len(loader)
        steps = (
            self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * steps_per_epoch)
        )
        private = self._private.attach(
            cast("nn.Module", self.model),
            self._inner(self.create_optimizer()),
            loader,
            steps=steps - self._first_step,
            steps_per_epoch=steps_per_epoch,
            first_step=self._first_step,
            microbatch_size=self._chunk_size,
        )
        return cast("DataLoader[object]", LogicalBatches(private))

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
        self._private.count_step(" (a callback that goes on). Raise max_steps or num_train_epochs instead.")
        model.train()
        batch, total, chunks = cast("LogicalBatch", inputs), torch.zeros((), device=self.args.device), 0
        for chunk in batch:
            prepared = dict(self._prepare_inputs(cast("dict[str, Tensor]", chunk)))
            with self.compute_loss_context_manager():
                losses = self._private_loss(model, prepared)
            losses.backward()
            chunks += 1
            if not batch.is_complete:
                # Adds this chunk to the sum; parameters change at the last one only, which the stock loop steps.
                self._inner(self.optimizer).step()
            if self._private.shows_losses:
                total += losses.detach()
        return total / max(chunks, 1)

    def _private_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        self._is_private_step = True
        try:
            found = self.compute_loss(model, inputs)
        finally:
            self._is_private_step = False
        if not isinstance(found, Tensor):
            raise InvalidArgument(
                f"compute_loss must return a tensor, a mean over records or one loss a record, got "
                f"{type(found).__name__}. Return the loss alone unless return_outputs is True."
            )
        return found if found.dim() == 0 else found.mean()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: object = None,
    ) -> Tensor | tuple[Tensor, object]:
        """In training the mean over the records of one loss each; in an evaluation the stock loss.

        A subclass may override it as it does elsewhere, and call this one.
        """
        if not self._is_private_step:
            more = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **more)
        labels, given = self._labels_of(inputs)
        whole = cast("nn.Module", self.model)
        if not isinstance(labels, Mapping):
            given |= decoder_inputs(whole, given, labels)
        outputs = model(**given)
        if self.compute_loss_func is not None:
            losses = cast("Tensor", self.compute_loss_func(outputs, labels, num_items_in_batch=None))
        elif self._record_loss is not None:
            losses = self._record_loss(outputs, labels)
        else:
            smoothing = self.args.label_smoothing_factor
            kind = {"causal": is_causal(whole), "numbers": predicts_numbers(whole)}
            losses = record_losses(outputs, labels, label_smoothing=smoothing, **kind)
        loss = losses if losses.dim() == 0 else losses.mean()
        return (loss, outputs) if return_outputs else loss

    def _labels_of(self, inputs: Mapping[str, Tensor]) -> tuple[Labels, dict[str, Tensor]]:
        """The labels, of several kinds by name, and what the model is called with."""
        given = dict(inputs)
        # A model that takes no labels has no names for them.
        wanted = self.label_names or ["labels"]
        names = [name for name in wanted if name in given] or [name for name in ("labels",) if name in given]
        if not names:
            raise InvalidArgument(
                f"train_dataset must give records with {' and '.join(wanted)}, got records without. Name them in "
                "label_names of TrainingArguments if they are called otherwise; pass remove_unused_columns=False if "
                "the model's forward takes no labels."
            )
        found = {name: given.pop(name) for name in names}
        return (found[names[0]] if len(names) == 1 else found), given

    @staticmethod
    def _inner(optimizer: object) -> Optimizer:
        """The optimizer that accelerate put something around, or itself."""
        return cast("Optimizer", getattr(optimizer, "optimizer", optimizer))

    def floating_point_ops(self, inputs: object) -> int:
        """Zero: the number follows the size of the batch, which is private."""
        del inputs
        return 0

    # --- what is shown and kept -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The stock log without losses and norms, and with the ε spent so far."""
        if self._private.shows_losses and "loss" in logs and self.is_world_process_zero():
            self._private.show_loss(self.state.global_step, logs["loss"])
        public = {name: value for name, value in logs.items() if _is_public_log(name)}
        super().log({**public, "epsilon": self._private.epsilon()}, start_time)

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """The stock evaluation, on data that were declared public.

        Raises:
            InvalidArgument: they were not.
        """
        self._private.require_public("an evaluation")
        self.engine.journal.sync()
        return super().evaluate(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    def predict(self, *args: object, **kwargs: object) -> PredictionOutput:
        """The stock predictions and their metrics, on data that were declared public.

        Raises:
            InvalidArgument: they were not.
        """
        self._private.require_public("an evaluation")
        return super().predict(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, object] | None = None) -> None:
        # First, so that no weights lie anywhere without the guarantee that they carry.
        if get_distributed_context().is_rank_zero and self.args.should_save:
            write_note(self.engine, Path(output_dir or str(self.args.output_dir)))
        super()._save(output_dir, state_dict)

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """The stock model card, with the guarantee."""
        super().create_model_card(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        card = Path(str(self.args.output_dir)) / "README.md"
        if self.is_world_process_zero() and card.is_file():
            text = f"\n## Differential privacy\n\n{self.guarantee().describe()}\n"
            card.write_text(card.read_text(encoding="utf-8") + text, encoding="utf-8")

    def _last_checkpoint(self) -> str:
        """The last checkpoint of `output_dir` that was written to its end: a crash may have cut one off."""

        def last() -> str:
            root = Path(str(self.args.output_dir))
            found = [path for path in root.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
            found.sort(key=lambda path: int(path.name.removeprefix("checkpoint-")))
            for path in reversed(found):
                if _steps_of(path) is not None:
                    return str(path)
            raise InvalidArgument(
                f"resume_from_checkpoint must find a whole checkpoint in {str(root)!r}, got none. Leave it out to "
                "begin a new run."
            )

        return get_distributed_context().broadcast_from_rank_zero(last)


def _note_in(folder: Path) -> Mapping[str, object]:
    if not (folder / _NOTE).is_file():
        raise InvalidArgument(
            f"resume_from_checkpoint must hold {_NOTE}, got a folder without it: what was spent is not known. Begin a "
            "new run from its weights."
        )
    return cast("Mapping[str, object]", json.loads((folder / _NOTE).read_text()))


def _steps_of(folder: Path) -> int | None:
    """How many steps a checkpoint is after; None when it was cut off."""
    try:
        return int(json.loads((folder / _STATE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checkpoint_step(folder: Path) -> int:
    steps = _steps_of(folder)
    if steps is None:
        raise InvalidArgument(
            f"resume_from_checkpoint must be a whole checkpoint, got one without {_STATE}, cut off by a crash. Name an "
            "older one, or pass True for the last whole one."
        )
    return steps


def _is_shared(path: Path) -> bool:
    """Whether a file of a checkpoint is everybody's: states of generators are each process's own."""
    return not path.name.startswith("rng_state") and path.name not in (_NOTE, "guarantee.json")


def _check(args: TrainingArguments, privacy: PrivacyArguments) -> None:
    """Refuse what couples records, needs a gradient that isn't there, shows what is private, or would be ignored."""
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    optim = str(getattr(args.optim, "value", args.optim))
    sampling = str(getattr(args, "train_sampling_strategy", "random"))
    refused = {
        "fp16": args.fp16,
        "auto_find_batch_size": args.auto_find_batch_size,
        "debug": bool(args.debug),
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen not in (False, "no"),
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "n_gpu": args.n_gpu > 1,
        "optim": "layerwise" in optim or "lomo" in optim,
        "eval_strategy": (evaluates or args.eval_on_start) and not privacy.eval_data_are_public,
        # The stock value is 1, so that one can't be distinguished from a wish.
        "max_grad_norm": args.max_grad_norm not in (None, 0, 0.0, 1.0),
        "train_sampling_strategy": sampling != "random" or getattr(args, "group_by_length", False),
        "dataloader_drop_last": args.dataloader_drop_last,
        "dataloader_in_order": not getattr(args, "dataloader_in_order", True),
        "accelerator_config": _changes_batches(args.accelerator_config),
        "skip_memory_metrics": not args.skip_memory_metrics,
    }
    check_settings(refused, _WHY)


def _changes_batches(config: object) -> bool:
    """Whether accelerate was asked to share batches out in its own way; the engine's loader is not accelerate's."""
    changes = {"split_batches": False, "dispatch_batches": None, "gradient_accumulation_kwargs": None}
    return any(getattr(config, name, value) not in (value, None) for name, value in changes.items())


def _is_public_log(name: str) -> bool:
    """Evaluations are of public data, or refused."""
    return name in _TOLD or name.startswith("eval_")


_NOT_CALLED = {
    "training_step": "forward and backward run on one chunk of a logical batch after another. Override compute_loss, "
    "or give record_loss=.",
    "get_train_dataloader": "batches are drawn by the engine. Give train_dataset and data_collator.",
    "_get_train_sampler": "batches are drawn by the engine. Leave it out.",
    "get_batch_samples": "batches are drawn by the engine. Leave it out.",
    "floating_point_ops": "the number follows the size of the batch, which is private. Leave it out.",
}
_WHY = {
    "fp16": "True: a loss scaler looks at raw gradients. Use bf16=True.",
    "auto_find_batch_size": "True: the batch size is part of the guarantee. Lower per_device_train_batch_size instead.",
    "debug": "an option: it prints activations, and stops where a record's are not numbers. Leave it out.",
    "include_num_input_tokens_seen": "True: the number of tokens of a batch is private. Leave it out.",
    "deepspeed": "a configuration. Run without it.",
    "fsdp": "a configuration. Run without it.",
    "n_gpu": "several for one process, which nn.DataParallel would share among threads. Start one process for each "
    "(torchrun --nproc-per-node), or show one in CUDA_VISIBLE_DEVICES.",
    "optim": "one that steps inside the backward pass. Use adamw_torch or sgd.",
    "eval_strategy": "an evaluation of data that were not declared public. Pass eval_data_are_public=True if they are.",
    "max_grad_norm": "a value: each record's gradient is clipped here. Set max_grad_norm in PrivacyArguments.",
    "train_sampling_strategy": "another one (group_by_length and its like): every record joins every batch by chance. "
    "Leave it out, and pad records to a public length.",
    "dataloader_drop_last": "True: batches have no last one that could be short. Leave it out.",
    "dataloader_in_order": "False: a step's records are those that were charged for it. Leave it out.",
    "accelerator_config": "one that shares batches out in its own way. Leave split_batches, dispatch_batches and "
    "gradient_accumulation_kwargs out.",
    "skip_memory_metrics": "False: how much memory a step takes follows its number of records. Leave it out.",
}
