"""One record at a time inside other libraries' trainers: what they release is what a capture releases."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import MixtralConfig, MixtralForCausalLM

from integrations.test_huggingface import WORDS, bert, sentences, texts, trainer
from sordino.errors import InvalidArgument, PrivacyError
from sordino.integrations.huggingface import PrivacyArguments

DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def privacy(**options):
    return PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=0.1, **options)


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=16,
            num_local_experts=3,
        )
    )


def trained(folder, model, **options):
    whole = {"per_device_train_batch_size": 16, "max_steps": 2}
    made = trainer(folder, model, sentences(16), privacy(**options), **whole)
    made.train()
    return [parameter.detach() for parameter in made.model.parameters()]


def test_the_trainer_ends_where_a_capture_ends(tmp_path):
    captured = trained(tmp_path / "a", bert(**DROPLESS))
    alone = trained(tmp_path / "b", bert(**DROPLESS), gradients="one-by-one")
    for one, other in zip(captured, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_mixture_of_experts_trains_and_the_refusal_without_says_how(tmp_path):
    with pytest.raises(PrivacyError, match='gradients="one-by-one"'):
        trainer(tmp_path / "a", mixtral(), texts(16), privacy(), max_steps=1).train()
    model = mixtral()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer(tmp_path / "b", model, texts(16), privacy(gradients="one-by-one"), max_steps=1).train()
    moved = {
        name for old, (name, new) in zip(before, model.named_parameters(), strict=True) if not torch.equal(old, new)
    }
    assert any("experts" in name for name in moved)


def test_another_word_is_refused():
    with pytest.raises(InvalidArgument, match="gradients"):
        privacy(gradients="single")
