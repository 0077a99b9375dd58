"""Each task's loss, one record at a time beside the model's own; losses and loops of the user's are used or refused."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import transformers as T

from integrations.test_huggingface import LENGTH, WORDS, bert, epsilon_of, sentences, texts, trainer
from sordino.errors import InvalidArgument, PrivacyError
from sordino.integrations.huggingface import (
    PrivacyArguments,
    PrivateTrainer,
    decoder_inputs,
    is_causal,
    predicts_numbers,
    record_losses,
)

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
EXACT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def small_bert(kind, **changes):
    return kind(T.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SMALL, **EXACT, **changes))


def t5():
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T.T5ForConditionalGeneration(T.T5Config(vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, **shape))


def bart():
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape |= {
        "d_model": 16,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 16,
        "dropout": 0.0,
    }
    return T.BartForConditionalGeneration(T.BartConfig(vocab_size=WORDS, **shape))


def llama():
    return T.LlamaForCausalLM(T.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SMALL))


# Model, the labels of record k with the words `row`, and what a record's own loss is to ours.
TASKS = {
    "classes": (lambda: small_bert(T.BertForSequenceClassification, num_labels=3), lambda k, row: {"labels": k % 3}, 1),
    "a number": (
        lambda: small_bert(T.BertForSequenceClassification, num_labels=1),
        lambda k, row: {"labels": float(k % 4)},
        1,
    ),
    "numbers": (
        lambda: small_bert(T.BertForSequenceClassification, num_labels=3, problem_type="regression"),
        lambda k, row: {"labels": torch.tensor([k % 2, 0.5, -1.0])},
        1,
    ),
    "several labels": (
        lambda: small_bert(T.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        lambda k, row: {"labels": torch.tensor([1.0, k % 2, 0.0])},
        1,
    ),
    "spans": (
        lambda: small_bert(T.BertForQuestionAnswering),
        lambda k, row: {"start_positions": k % LENGTH, "end_positions": (k + 1) % LENGTH},
        1,
    ),
    "tokens": (
        lambda: small_bert(T.BertForTokenClassification, num_labels=4),
        lambda k, row: {"labels": row % 4},
        1,
    ),
    "masked words": (lambda: small_bert(T.BertForMaskedLM), lambda k, row: {"labels": row}, 1),
    "next words": (llama, lambda k, row: {"labels": row}, LENGTH / (LENGTH - 1)),
    "sequence to sequence": (t5, lambda k, row: {"labels": row.flip(0)}, 1),
    "sequence to sequence, another": (bart, lambda k, row: {"labels": row.flip(0)}, 1),
}


def made_of(task, count):
    torch.manual_seed(0)
    make, labels, scale = TASKS[task]
    return (
        make(),
        [{"input_ids": one["input_ids"], **labels(k, one["input_ids"])} for k, one in enumerate(texts(count))],
        scale,
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_records_loss_is_the_models_own_loss_on_it_alone(task):
    model, data, scale = made_of(task, 4)
    model.eval()
    batch = T.default_data_collator(data)
    names = [name for name in ("labels", "start_positions", "end_positions") if name in batch]
    labels = {name: batch[name] for name in names}
    found = labels["labels"] if names == ["labels"] else labels
    inputs = {"input_ids": batch["input_ids"]}
    if torch.is_tensor(found):
        inputs |= decoder_inputs(model, inputs, found)
    told = {"causal": is_causal(model), "numbers": predicts_numbers(model)}
    with torch.no_grad():
        losses = record_losses(model(**inputs), found, **told)
        alone = [float(model(**{name: value[k : k + 1] for name, value in batch.items()}).loss) for k in range(4)]
    assert (losses * scale).tolist() == pytest.approx(alone, rel=1e-5)
    assert len({round(loss, 5) for loss in alone}) > 1


@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains(task, tmp_path):
    model, data, _ = made_of(task, 32)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    made = trainer(tmp_path, model=model, data=data, per_device_train_batch_size=8, max_steps=2)
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(2), rel=1e-9)
    assert any(not torch.equal(value.detach(), before[name]) for name, value in model.named_parameters())


def choices(count):
    """Each record has four texts, one of which is right."""
    torch.manual_seed(0)
    return [{"input_ids": torch.randint(3, WORDS, (4, LENGTH)), "labels": k % 4} for k in range(count)]


def test_several_texts_a_record_train_one_record_at_a_time_as_the_refusal_says(tmp_path):
    def multiple_choice(folder, **privacy):
        return trainer(
            folder,
            model=small_bert(T.BertForMultipleChoice),
            data=choices(32),
            privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5, **privacy),
            per_device_train_batch_size=8,
            max_steps=2,
        )

    refused = multiple_choice(tmp_path / "refused")
    with pytest.raises(PrivacyError, match='gradients="one-by-one"'):
        refused.train()
    made = multiple_choice(tmp_path / "made", gradients="one-by-one")
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(2), rel=1e-9)


def test_a_span_that_was_cut_off_counts_for_nothing():
    outputs = {"start_logits": torch.randn(2, 6), "end_logits": torch.randn(2, 6)}
    labels = {"start_positions": torch.tensor([2, 9]), "end_positions": torch.tensor([3, 9])}
    assert record_losses(outputs, labels, causal=False)[1] == 0


def test_smoothing_is_that_of_the_stock_trainer_one_record_at_a_time():
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    smoother = LabelSmoother(epsilon=0.2)
    for logits, labels in (
        (torch.randn(3, 5), torch.tensor([0, 4, 2])),
        (torch.randn(3, 6, 5), torch.randint(0, 5, (3, 6))),
    ):
        ours = record_losses({"logits": logits}, labels, causal=False, label_smoothing=0.2)
        theirs = [float(smoother({"logits": logits[k : k + 1]}, labels[k : k + 1])) for k in range(3)]
        assert ours.tolist() == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_smoothing_is_used(tmp_path):
    seen = []
    for smoothing in (0.0, 0.5):
        model = bert(**EXACT)
        silent = PrivacyArguments(noise_multiplier=0.0, delta=1e-5)
        trainer(
            tmp_path, model=model, privacy=silent, data=sentences(16), max_steps=1, label_smoothing_factor=smoothing
        ).train()
        seen.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert not torch.equal(*seen)


# --- losses of the user's own --------------------------------------------------------------------------------------


class Doubled(PrivateTrainer):
    """Overrides the loss as scripts do."""

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 2 * F.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class OnTop(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class EachRecord(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs.pop("labels")
        return 2 * F.cross_entropy(model(**inputs).logits, labels, reduction="none")


def moved(tmp_path, **given):
    model = bert(**EXACT)
    before = [value.detach().clone() for value in model.parameters()]
    silent = PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=1e3)
    made = trainer(tmp_path, model=model, privacy=silent, data=sentences(16), max_steps=1, **given)
    made.train()
    return torch.cat([(value.detach() - old).flatten() for value, old in zip(model.parameters(), before, strict=True)])


@pytest.mark.parametrize(
    "given",
    [
        {"kind": Doubled},
        {"kind": OnTop},
        {"kind": EachRecord},
        {
            "compute_loss_func": lambda outputs, labels, num_items_in_batch=None: (
                2 * F.cross_entropy(outputs.logits, labels)
            )
        },
        {"record_loss": lambda outputs, labels: 2 * F.cross_entropy(outputs.logits, labels, reduction="none")},
    ],
    ids=["compute_loss", "compute_loss on top", "compute_loss of each", "compute_loss_func", "record_loss"],
)
def test_a_loss_of_the_users_own_is_used(given, tmp_path):
    """Twice the loss moves parameters twice as far, when nothing is clipped and there is no noise."""
    assert torch.allclose(moved(tmp_path, **given), 2 * moved(tmp_path), atol=1e-6)


class Weighted(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels, weight=torch.tensor([1.0, 3.0]))


class Contrasted(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        inputs.pop("labels")
        logits = model(**inputs).logits
        return (logits - logits.mean(0)).square().mean()


class Nothing(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        inputs.pop("labels")
        return {"loss": model(**inputs).logits.mean()}


@pytest.mark.parametrize("kind", [Weighted, Contrasted, Nothing])
def test_a_loss_that_couples_records_is_refused_and_nothing_moves(kind, tmp_path):
    model = bert()
    before = [value.detach().clone() for value in model.parameters()]
    made = trainer(tmp_path, model=model, kind=kind)
    with pytest.raises((PrivacyError, InvalidArgument)):
        made.train()
    assert all(torch.equal(value.detach(), old) for value, old in zip(model.parameters(), before, strict=True))


def test_two_losses_are_refused(tmp_path):
    def each(outputs, labels):
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    with pytest.raises(InvalidArgument, match="record_loss"):
        trainer(tmp_path, kind=Doubled, record_loss=each)
    with pytest.raises(InvalidArgument, match="record_loss"):
        trainer(tmp_path, compute_loss_func=each, record_loss=each)


@pytest.mark.parametrize(
    "name", ["training_step", "get_train_dataloader", "_get_train_sampler", "get_batch_samples", "floating_point_ops"]
)
def test_methods_that_would_not_be_called_are_refused_by_name(name, tmp_path):
    kind = type("Own", (PrivateTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(InvalidArgument, match=name):
        trainer(tmp_path, kind=kind)


def test_the_evaluation_keeps_the_stock_loss(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=1.0, delta=1e-5, eval_data_are_public=True)
    model, data = bert(**EXACT), sentences(8)
    made = trainer(tmp_path, model=model, privacy=privacy, eval_dataset=data, max_steps=1)
    batch = T.default_data_collator(data)
    expected = float(model.eval()(**batch).loss.detach())
    assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


# --- stock use -----------------------------------------------------------------------------------------------------


def test_a_model_is_made_by_model_init(tmp_path):
    made = trainer(tmp_path, model_init=lambda: bert(), max_steps=2)
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(2), rel=1e-9)
    assert not any(part._forward_pre_hooks for part in made.model.modules())


def test_labels_under_another_name_are_told(tmp_path):
    data = [{"input_ids": one["input_ids"], "target": one["labels"]} for one in sentences()]
    with pytest.raises(InvalidArgument, match="label_names"):
        trainer(tmp_path, data=data, max_steps=1, remove_unused_columns=False).train()
    named = trainer(tmp_path, data=data, max_steps=1, remove_unused_columns=False, label_names=["target"])
    named.train()
    assert named.guarantee().epsilon == pytest.approx(epsilon_of(1), rel=1e-9)


def tokenizer():
    """A tokenizer of whole words, without any file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", *(f"w{k}" for k in range(3, WORDS))]
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return T.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=LENGTH
    )


def plain(records):
    """As a tokenizer gives them: lists."""
    return [{name: value.tolist() for name, value in record.items()} for record in records]


def test_a_tokenizer_without_a_collator(tmp_path):
    made = trainer(tmp_path, data=plain(sentences()), processing_class=tokenizer(), max_steps=2)
    assert type(made.data_collator).__name__ == "DataCollatorWithPadding"
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(2), rel=1e-9)


def test_the_collator_of_language_models_on_records_of_one_length(tmp_path):
    data = [{"input_ids": one["input_ids"]} for one in plain(texts())]
    collator = T.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    made = trainer(tmp_path, model=llama(), data=data, data_collator=collator, max_steps=2)
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(2, rate=1 / 3), rel=1e-9)


@pytest.mark.slow
def test_the_collator_of_sequence_to_sequence_on_records_of_one_length(tmp_path):
    model = t5()
    collator = T.DataCollatorForSeq2Seq(tokenizer(), model=model)
    made = trainer(tmp_path, model=model, data=plain(texts()), data_collator=collator, max_steps=1)
    made.train()
    assert made.guarantee().epsilon == pytest.approx(epsilon_of(1, rate=1 / 3), rel=1e-9)


def test_workers_and_their_options_are_those_of_the_arguments(tmp_path):
    made = trainer(tmp_path, dataloader_num_workers=1, dataloader_prefetch_factor=3, dataloader_persistent_workers=True)
    inner = made.get_train_dataloader()._loader._loader
    made.engine.detach()
    assert (inner.num_workers, inner.prefetch_factor, inner.persistent_workers) == (1, 3, True)


@pytest.fixture(autouse=True)
def _quiet():
    T.logging.set_verbosity_error()
