"""Models of text: transformers from their configuration, low-rank adapters, a bag of words, an LSTM."""

import importlib.util
import warnings
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["BagOfWords", "Recurrent", "bert_mini", "checkpointed", "gpt2", "with_adapters"]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = self.first(x_BTD)
        q, k, v = (f(hidden).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(mixed)
        return x_BTD + self.down(F.gelu(self.up(self.second(x_BTD))))


class Transformer(nn.Module):
    """Token and position tables, blocks, and a head: on every position of a causal model, otherwise on the first."""

    def __init__(
        self, *, tokens: int, width: int, layers: int, heads: int, length: int, outputs: int, causal: bool
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=causal) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, ids_BT: Tensor) -> Tensor:
        # For each record, as for `Logits`.
        places = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(len(ids_BT), 1)
        hidden = self.norm(self.blocks(self.embed(ids_BT) + self.place(places)))
        return self.head(hidden if self.causal else hidden[:, 0])


class Logits(nn.Module):
    """A model of the transformers library that returns its logits alone.

    Positions and kinds of tokens are given for each record: libraries that keep gradients per record need it so.
    """

    def __init__(self, model: nn.Module, *, kinds: bool) -> None:
        super().__init__()
        self.model, self.kinds = model, kinds

    def forward(self, ids_BT: Tensor) -> Tensor:
        places_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(len(ids_BT), 1)
        kinds_BT = torch.zeros_like(ids_BT) if self.kinds else None
        return self.model(ids_BT, position_ids=places_BT, token_type_ids=kinds_BT).logits


def bert_mini() -> nn.Module:
    """A classifier of the shape of BERT-mini: 4 layers, width 256, 4 heads, 30522 tokens."""
    if importlib.util.find_spec("transformers") is None:
        return Transformer(tokens=30522, width=256, layers=4, heads=4, length=128, outputs=2, causal=False)
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Logits(BertForSequenceClassification(config), kinds=True)


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with every block run again in the backward pass."""
    if isinstance(model, Transformer):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    """A language model of the shape of two layers of GPT-2: width 768, 12 heads, 8192 tokens, tied tables."""
    if importlib.util.find_spec("transformers") is None:
        model = Transformer(tokens=8192, width=768, layers=2, heads=12, length=256, outputs=8192, causal=True)
        model.head.weight = model.embed.weight
        return model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192, n_positions=256, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return Logits(GPT2LMHeadModel(config), kinds=False)


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank term beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_adapters(model: nn.Module, *, rank: int = 8) -> nn.Module:
    """`model` frozen, with adapters on its query and value layers."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ("query", "value") and isinstance(child, nn.Linear):
                setattr(parent, name, Adapter(child, rank))
    return model


class BagOfWords(nn.Module):
    """A large table, the mean over positions, a head."""

    def __init__(self, *, tokens: int = 50_000, width: int = 256, classes: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, classes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.embed(ids_BT).mean(1))


class Recurrent(nn.Module):
    """A table, an LSTM, a head on its last output."""

    def __init__(self, *, tokens: int = 10_000, width: int = 128, classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids_BT))[0][:, -1])
