"""Hugging Face models go through the engine as they are: every record's own gradient, clipped, as by plain autograd."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradients.tiny_models import CASES, RECORDS, TOKENS, text
from oracles import clipped_sum, per_record_gradients, relative_error, squared_norms, weighted_sums
from sordino import PrivacyEngine
from sordino.gradients import GradientCapture

C = 0.05
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def in_double(batch):
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)


def engine_sum(model, loss, batch, **options):
    """The clipped sum of all records as the engine makes it, by a loop of the user's."""
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(*batch), batch_size=RECORDS),
        noise_multiplier=0.0,
        max_grad_norm=C,
        **options,
    )
    assert private is model
    for records in loader:
        loss(model, records).backward()
        optimizer.step()
    engine.detach()
    return [RECORDS * parameter.grad for parameter in trained(model)]


def error(got, expected):
    """Relative ℓ2 distance of two lists of tensors."""
    pairs = list(zip(got, expected, strict=True))
    distance = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
    return distance / sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5


def assert_exact(model, loss, batch, *, oracle=None, tolerance=1e-5, **options):
    expected = clipped_sum(per_record_gradients(model if oracle is None else oracle, loss, batch), C)
    assert error(engine_sum(model, loss, batch, **options), expected) <= tolerance


def assert_captured_exactly(model, losses, batch, *, oracle=None):
    """Norms and weighted sums of one forward and one backward pass, without the engine and its proofs."""
    expected = per_record_gradients(
        model if oracle is None else oracle,
        lambda *given: losses(*given).mean(),
        batch,
        trained(model) if oracle is None else None,
    )
    capture = GradientCapture(model, trained(model))
    with capture.capturing(RECORDS):
        losses(model, batch).sum().backward()
    assert relative_error(capture.squared_norms().sqrt(), squared_norms(expected).sqrt()) <= 1e-5
    weights = torch.linspace(0, 1, RECORDS).double()
    sums = {}
    capture.add_weighted_sums(weights, sums)
    got = [sums.get(parameter, torch.zeros_like(parameter)) for parameter in trained(model)]
    assert error(got, weighted_sums(expected, weights)) <= 1e-5
    capture.detach()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_of_every_record_are_those_of_autograd(name, attention):
    case = CASES[name]
    assert_captured_exactly(case.model(attn_implementation=attention), case.losses, case.batch())


QUICK = {"GPT-2", "ViT"}
# The engine proves each model's loop before it trains, in a hundred forward passes or so.
THROUGH_THE_ENGINE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", THROUGH_THE_ENGINE)
def test_full_fine_tuning_through_the_engine_is_exact(name):
    case = CASES[name]
    # In double precision rounding is no excuse: what is left is the engine's own margin below the bound.
    assert_exact(case.model().double(), case.loss, in_double(case.batch()), tolerance=3e-6)


ADAPTERS = {
    "GPT-2": {"target_modules": ["c_attn"]},
    "GPT-2, its token table": {"target_modules": ["wte"]},
    "BERT with its head": {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]},
    "Llama": {"target_modules": ["q_proj", "v_proj"]},
    "Llama, all layers, rank-stabilized": {"target_modules": "all-linear", "use_rslora": True},
    "ViT with its head": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
}


def with_adapters(name, **options):
    case = CASES[name.partition(",")[0].partition(" with")[0]]
    model = peft.get_peft_model(case.model(), peft.LoraConfig(r=3, **ADAPTERS[name], **options))
    with torch.no_grad():
        # At zero, where they begin, the first matrix of a pair has no gradient.
        for parameter in trained(model):
            parameter.normal_(std=0.3)
    return model, case


@pytest.mark.parametrize("name", ADAPTERS)
def test_low_rank_adapters_and_saved_modules_are_exact_and_the_rest_stays(name):
    model, case = with_adapters(name)
    frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
    heads = [key for key, value in model.named_parameters() if value.requires_grad and "classifier" in key]
    assert bool(heads) == ("head" in name)
    assert_captured_exactly(model, case.losses, case.batch())
    assert all(torch.equal(dict(model.named_parameters())[key], value) for key, value in frozen.items())


@pytest.mark.parametrize("name", ["BERT with its head", pytest.param("Llama", marks=pytest.mark.slow)])
def test_adapters_train_through_the_engine(name):
    model, case = with_adapters(name)
    assert_exact(model, case.loss, case.batch())


def test_adapters_that_normalise_whole_matrices_are_exact():
    model, case = with_adapters("Llama", use_dora=True)
    assert_exact(model, case.loss, case.batch())


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("GPT-2", False), ("GPT-2", True), ("Llama", False), ("Llama", True), ("T5", False), ("T5", True), ("ViT", False)],
)
def test_gradient_checkpointing_is_exact_in_both_variants(name, reentrant):
    case = CASES[name]
    model = case.model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_captured_exactly(model, case.losses, case.batch(), oracle=case.model())


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradient_checkpointing_through_the_engine_is_exact(reentrant):
    case = CASES["Llama"]
    model = case.model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_exact(model, case.loss, case.batch(), oracle=case.model())


def test_adapters_with_gradient_checkpointing_are_exact():
    model, case = with_adapters("Llama")
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert_captured_exactly(model, case.losses, case.batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["GPT-2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("BERT", "Llama", "ViT"))]
)
def test_under_autocast_the_sum_is_right_to_half_precision_and_no_record_alone_exceeds_the_bound(name):
    case = CASES[name]

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(model, batch)

    batch = case.batch()
    expected = clipped_sum(per_record_gradients(case.model(), case.loss, batch), C)
    everything = engine_sum(case.model(), loss, batch)
    assert error(everything, expected) <= 2e-2
    # Not the difference of two batches: in half precision the shape of a batch changes how the others are rounded.
    for record in range(RECORDS):
        alone = engine_sum(
            case.model(), loss, tuple(tensor[record : record + 1] for tensor in batch), expected_batch_size=RECORDS
        )
        assert sum(float(part.double().square().sum()) for part in alone) ** 0.5 <= C * (1 + 1e-5)


def test_channels_last_images_are_exact():
    case = CASES["ViT"]
    x, y = case.batch()
    model = case.model().to(memory_format=torch.channels_last)
    assert_captured_exactly(model, case.losses, (x.to(memory_format=torch.channels_last), y))


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "ViT"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_dropout_norms_and_sums_are_those_of_the_very_masks_that_were_drawn(name, attention):
    case = CASES[name]
    model, batch = case.model(attn_implementation=attention, dropout=0.3), case.batch()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    losses = case.losses(twin, batch)
    rows = [
        torch.autograd.grad(loss, list(twin.parameters()), retain_graph=True, materialize_grads=True) for loss in losses
    ]
    expected = [torch.stack(parts).double() for parts in zip(*rows, strict=True)]
    capture = GradientCapture(model)
    torch.manual_seed(7)
    with capture.capturing(RECORDS):
        case.losses(model, batch).sum().backward()
    assert relative_error(capture.squared_norms(), squared_norms(expected)) <= 1e-5
    sums = {}
    capture.add_weighted_sums(torch.ones(RECORDS).double(), sums)
    wanted = weighted_sums(expected, torch.ones(RECORDS))
    assert error([sums.get(p, torch.zeros_like(p)) for p in model.parameters()], wanted) <= 1e-5


@pytest.mark.slow
def test_dropout_trains_through_the_engine_and_moves_the_sum_by_at_most_the_bound():
    case = CASES["BERT"]
    sums = engine_sum(case.model(dropout=0.3), case.loss, case.batch())
    length = sum(float(part.double().square().sum()) for part in sums) ** 0.5
    assert 0 < length <= RECORDS * C * (1 + 1e-5)


@pytest.mark.slow
def test_one_row_of_position_ids_for_all_records_is_exact():
    case = CASES["GPT-2"]
    row = torch.arange(TOKENS)[None]

    def loss(model, batch):
        ids, mask, labels = batch
        logits = model(input_ids=ids, attention_mask=mask, position_ids=row).logits
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return losses.mean(1).mean()

    assert_exact(case.model(), loss, case.batch())


@pytest.mark.parametrize("reduction", ["sum", pytest.param("mean", marks=pytest.mark.slow)])
def test_the_models_own_loss_is_exact_with_a_public_number_of_tokens(reduction):
    def loss(model, batch):
        ids, mask, labels = batch
        tokens = TOKENS if reduction == "sum" else TOKENS * ids.size(0)
        return model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=tokens).loss

    assert_exact(CASES["GPT-2"].model(), loss, text(), loss_reduction=reduction)


def test_the_models_own_loss_divides_by_all_positions():
    """Its labels of −100 add nothing, and no record's padding scales another's gradient."""

    def own(model, batch):
        ids, mask, labels = batch
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def by_record(model, batch):
        ids, mask, labels = batch
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / ids.shape[1]).mean()

    assert bool((text()[2] == -100).any())
    expected = clipped_sum(per_record_gradients(CASES["GPT-2"].model(), by_record, text()), C)
    assert error(engine_sum(CASES["GPT-2"].model(), own, text()), expected) <= 1e-5


def compiled(how):
    """A loop that trains a compiled BERT: the module that is made private, and the one that is called."""
    case = CASES["BERT"]
    model = case.model()
    if how == "in place":
        model.compile(backend="eager")
    called = torch.compile(model, backend="eager") if how == "afterwards" else model
    return case, model, called


# Without its own kernels torch.compile is quick here, and traces and breaks graphs just the same.
# The compiler looks at arguments of checked functions, which warns; outside the tests nothing is checked there.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["in place", pytest.param("afterwards", marks=pytest.mark.slow)])
def test_a_compiled_model_is_exact(how):
    torch.compiler.reset()
    case, model, called = compiled(how)
    assert_exact(
        model,
        lambda given, batch: case.loss(called if given is model else given, batch),
        case.batch(),
        oracle=case.model(),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_compiled_wrapper_made_private_is_exact():
    torch.compiler.reset()
    case = CASES["BERT"]
    wrapper = torch.compile(case.model(), backend="eager")
    assert_exact(wrapper, case.loss, case.batch(), oracle=case.model())


def test_names_generation_and_saved_weights_are_the_models_own(tmp_path):
    case = CASES["GPT-2"]
    model = case.model()
    names = list(model.state_dict())
    engine_sum(model, case.loss, case.batch())
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = text()[0][:1, :3]
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    one, other = (m.eval().generate(ids, attention_mask=torch.ones_like(ids), **settings) for m in (model, again))
    assert torch.equal(one, other)
