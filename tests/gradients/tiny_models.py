"""Hugging Face models of a few hundred parameters, made from configurations alone, each with a loss per record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

RECORDS, TOKENS, VOCABULARY, CLASSES = 5, 6, 23, 3
Batch = tuple[Tensor, ...]
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": TOKENS + 2,
}


def text() -> Batch:
    """Token ids, attention mask with padding at the end of some records, labels of which some are ignored."""
    ids = torch.randint(3, VOCABULARY, (RECORDS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[3, 5:] = 0, 0
    labels = ids.clone()
    labels[0, 3:], labels[2, :2] = -100, -100
    return ids, mask, labels


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (RECORDS,), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(RECORDS, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """One loss per record over a divisor that is the same for all: ignored tokens add nothing."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / TOKENS


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, labels = batch
    return _token_losses(model(input_ids=ids, attention_mask=mask).logits[:, :-1], labels[:, 1:])


def masked_token(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, labels = batch
    return _token_losses(model(input_ids=ids, attention_mask=mask).logits, labels)


def translation(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, labels = batch
    return _token_losses(model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits, labels)


def text_class(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, y = batch
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y, reduction="none")


def image_class(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")


def gpt2(*, dropout: float = 0.0, **options: Any) -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_positions": TOKENS + 2, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **drops, **options))


def _bert(*, dropout: float = 0.0, **options: Any) -> BertConfig:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return BertConfig(**_BERT, **drops, num_labels=CLASSES, **options)


def bert(**options: Any) -> nn.Module:
    return BertForSequenceClassification(_bert(**options))


def masked_bert(**options: Any) -> nn.Module:
    return BertForMaskedLM(_bert(**options))


def distilbert(**options: Any) -> nn.Module:
    sizes = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": TOKENS + 2}
    drops = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **sizes, **drops, **options)
    return DistilBertForSequenceClassification(config)


def llama(**options: Any) -> nn.Module:
    sizes = {name: value for name, value in _BERT.items() if name != "num_hidden_layers"}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=1, **options))


def tied_llama(**options: Any) -> nn.Module:
    return llama(tie_word_embeddings=True, **options)


def t5(**options: Any) -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, **options))


def vit(*, dropout: float = 0.0, **options: Any) -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **sizes, **drops, **options)
    return ViTForImageClassification(config)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to build, its loss per record, and a batch of records."""

    build: Callable[..., nn.Module]
    losses: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[], Batch]

    def model(self, **options: Any) -> nn.Module:
        """A new model with the same weights every time, in training mode."""
        torch.manual_seed(0)
        return self.build(**options).train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over records."""
        return self.losses(model, batch).mean()


def _classified() -> Batch:
    return (*text()[:2], classes())


CASES = {
    "GPT-2": Case(build=gpt2, losses=next_token, batch=text),
    "BERT": Case(build=bert, losses=text_class, batch=_classified),
    "BERT, masked tokens, tied": Case(build=masked_bert, losses=masked_token, batch=text),
    "DistilBERT": Case(build=distilbert, losses=text_class, batch=_classified),
    "Llama": Case(build=llama, losses=next_token, batch=text),
    "Llama, tied": Case(build=tied_llama, losses=next_token, batch=text),
    "T5": Case(build=t5, losses=translation, batch=text),
    "ViT": Case(build=vit, losses=image_class, batch=lambda: (images(), classes())),
}
