"""transformers' architectures in `fit` as they are: every record's own gradient, or a refusal with its reason."""

from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from gradients.architectures import ARCHITECTURES, ONE_BY_ONE, REASONS, RECORDS, REFUSED, Architecture
from oracles import clipped_sum
from sordino import PerformanceOptions, Plan, fit
from sordino.errors import PrivacyError

C = 0.05
PLAN = Plan(
    noise_multiplier=0.0,
    max_grad_norm=C,
    sample_rate=1.0,
    steps=1,
    expected_batch_size=float(RECORDS),
    delta=1e-5,
)
pytestmark = [pytest.mark.filterwarnings("ignore")]

# One of each way to fail a capture or to pass it, for the default suite.
FEW = ("GPT-2", "OPT", "OLMoE", "Mamba", "DeBERTa", "BART", "Swin", "PatchTST")


class Keeping(torch.optim.SGD):
    """Keeps the gradients that it is stepped with, and moves nothing."""

    def step(self, closure=None):
        self.kept = [parameter.grad for group in self.param_groups for parameter in group["params"]]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def alone(model: nn.Module, entry: Architecture) -> list[torch.Tensor]:
    """The clipped sum by plain autograd, record by record."""
    parameters, rows = trained(model), []
    for place in range(RECORDS):
        loss = entry.losses(model, *(tensor[place : place + 1] for tensor in entry.batch)).sum()
        rows.append(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    return clipped_sum([torch.stack(row).double() for row in zip(*rows, strict=True)], C)


def by_fit(model: nn.Module, entry: Architecture, performance: PerformanceOptions | None = None):
    """The clipped sum as `fit` makes it, and the way it took."""
    made: list[Keeping] = []

    def optimizer(_parameters):
        made.append(Keeping(trained(model), lr=1.0))
        return made[0]

    result = fit(model, entry.losses, entry.batch, PLAN, optimizer=optimizer, progress=False, performance=performance)
    return [RECORDS * gradient for gradient in made[0].kept], result.gradients


def error(got, wanted) -> float:
    """Relative distance of two lists of tensors."""
    pairs = list(zip(got, wanted, strict=True))
    distance = sum(float((one.double() - other).square().sum()) for one, other in pairs) ** 0.5
    return distance / sum(float(other.square().sum()) for _, other in pairs) ** 0.5


def assert_outcome(name: str) -> None:
    entry = ARCHITECTURES[name]
    if name in REFUSED:
        for performance in (None, PerformanceOptions(gradients="one-by-one")):
            with pytest.raises(PrivacyError, match=REASONS[REFUSED[name]]):
                by_fit(entry.build(), entry, performance)
        return
    got, way = by_fit(entry.build(), entry)
    assert error(got, alone(entry.build(), entry)) <= 1e-4
    assert way == "captured" or name in ONE_BY_ONE


@pytest.mark.parametrize("name", FEW)
def test_an_architecture_is_exact(name: str) -> None:
    assert_outcome(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FEW])
def test_an_architecture_is_exact_or_refused_with_its_reason(name: str) -> None:
    assert_outcome(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "BERT", "T5", "ViT", "ResNet"])
def test_one_record_at_a_time_is_exact_for_whatever_runs_on_one(name: str) -> None:
    entry, plain = ARCHITECTURES[name], PerformanceOptions(gradients="one-by-one")
    if name in REFUSED:
        with pytest.raises(PrivacyError):
            by_fit(entry.build(), entry, plain)
        return
    got, way = by_fit(entry.build(), entry, plain)
    assert way == "one-by-one"
    assert error(got, alone(entry.build(), entry)) <= 1e-4


def test_the_list_is_long_enough_and_nearly_all_of_it_is_exact() -> None:
    assert len(ARCHITECTURES) >= 100
    assert set(REFUSED) | ONE_BY_ONE <= set(ARCHITECTURES)
    assert len(REFUSED) / len(ARCHITECTURES) <= 0.08


def test_the_guide_tells_the_list() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()
    rows = {
        "exact with layer rules": [name for name in ARCHITECTURES if name not in ONE_BY_ONE and name not in REFUSED],
        "exact, one record at a time, selected by `fit`": [name for name in ARCHITECTURES if name in ONE_BY_ONE],
        "refused": [f"{name}: {reason}" for name, reason in REFUSED.items()],
    }
    assert f"builds {len(ARCHITECTURES)} architectures" in text
    for outcome, names in rows.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {outcome} ({len(names)})")]
        told = row.split("|")[2].strip()
        assert sorted(told.split("; " if outcome == "refused" else ", ")) == sorted(
            names if outcome == "refused" else ", ".join(names).split(", ")
        )


# --- parts of a model ---------------------------------------------------------------------------------------------

_TASKS = {"causal": "CAUSAL_LM", "causal, no mask": "CAUSAL_LM", "class": "SEQ_CLS", "translation": "SEQ_2_SEQ_LM"}
_METHODS = {
    "LoRA": lambda task: peft.LoraConfig(task_type=task, r=2, target_modules="all-linear"),
    "DoRA": lambda task: peft.LoraConfig(task_type=task, r=2, target_modules="all-linear", use_dora=True),
    "IA3": lambda task: peft.IA3Config(task_type=task, target_modules="all-linear", feedforward_modules=[]),
    "prompt": lambda task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "prefix": lambda task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    "p-tuning": lambda task: peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=4),
}
# What peft itself has no way to build.
_NOT_OFFERED = {("Mixtral", "DoRA"), ("BERT", "prefix"), ("DeBERTa", "prefix")}
_PEFTED = ("GPT-2", "Llama", "OPT", "Mixtral", "BERT", "DeBERTa", "T5", "BART")


def adapted(name: str, method: str) -> nn.Module:
    """The architecture with a small trained part, away from where it begins: some gradients vanish there."""
    entry = ARCHITECTURES[name]
    torch.manual_seed(1)
    try:
        model = peft.get_peft_model(entry.build(), _METHODS[method](_TASKS[entry.kind])).train()
        entry.losses(model, *entry.batch)
    except (ValueError, TypeError, AttributeError):
        pytest.skip("peft has no such adapter for this architecture, or one that doesn't run without privacy either")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def assert_adapted(name: str, method: str) -> None:
    entry = ARCHITECTURES[name]
    got, _ = by_fit(adapted(name, method), entry)
    assert error(got, alone(adapted(name, method), entry)) <= 1e-4


@pytest.mark.parametrize(("name", "method"), [("OPT", "LoRA"), ("GPT-2", "prompt")])
def test_an_adapter_is_exact(name: str, method: str) -> None:
    assert_adapted(name, method)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [(n, m) for n in _PEFTED for m in _METHODS if (n, m) not in _NOT_OFFERED])
def test_every_adapter_is_exact(name: str, method: str) -> None:
    assert_adapted(name, method)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, entry in ARCHITECTURES.items() if entry.kind in _TASKS and name not in REFUSED]
)
def test_low_rank_adapters_are_exact(name: str) -> None:
    assert_adapted(name, "LoRA")
