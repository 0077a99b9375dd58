"""Run folders to report on, and pages taken apart."""

import json
from html.parser import HTMLParser

from sordino import accounting
from sordino.definitions import Guarantee
from sordino.events import Gaussian, PoissonSampled, SelfComposed, describe_sampling
from sordino.runs import Metric, RunFolder

STEP = Gaussian(noise_multiplier=25.0)
SAMPLED = PoissonSampled(sample_rate=0.02, event=Gaussian(noise_multiplier=3.0))
STEPS = 40
TRUE_EPSILON = accounting.epsilon(SelfComposed(event=STEP, count=STEPS), 1e-5).upper
PLAN = {
    "schema": 1,
    "noise_multiplier": 25.0,
    "max_grad_norm": 1.0,
    "sample_rate": 1.0,
    "steps": STEPS,
    "expected_batch_size": 30000.0,
    "delta": 1e-5,
    "neighboring_relation": "add_or_remove_one",
    "privacy_unit": "record",
    "dataset_size_is_public": True,
}
PUBLIC = {
    "test_accuracy": Metric(value=0.836, public=True),
    "baseline_test_accuracy": Metric(value=0.848, public=True),
    "majority_accuracy": Metric(value=0.754, public=True),
}
FACTS = {
    "data": {"name": "adult", "license": "CC BY 4.0", "records": 30000},
    "target_epsilon": 1.0,
    "training": {"model": "logistic"},
}
EVERYTHING = {
    "reproducible": False,
    "noise_arithmetic": "floating point",
    "released": "the trained parameters",
    "composition": "No other use.",
    "data_accesses": {
        "preprocessing": "Scaled by declared bounds.",
        "normalization": "None.",
        "schema": "Declared.",
        "tuning": "None.",
        "early_stopping": "None.",
        "evaluation": "On public records.",
        "logging": "Steps and ε.",
    },
}
SAMPLED_PLAN = {"noise_multiplier": 3.0, "sample_rate": 0.02, "expected_batch_size": 600.0}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Text, attributes and nesting of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def make(
    path,
    *,
    epsilon=TRUE_EPSILON,
    metrics=None,
    meta=None,
    plan=None,
    event=STEP,
    told=True,
    key="k",
    steps=STEPS,
    seeded=False,
):
    with RunFolder.create(path, plan=json.dumps(PLAN | (plan or {})), meta=FACTS | (meta or {})) as run:
        if key is not None:
            run.begin(key=key, first_step=0, most=event, seeded=seeded)
        for step in range(steps):
            run.append(step=step, event=event, epsilon=0.01 * (step + 1) if told else None)
    if epsilon is not None:
        run.write_guarantee(
            Guarantee(epsilon=epsilon, delta=1e-5, accountant="closed_form", sampler=describe_sampling(event))
        )
    run.write_metrics(PUBLIC if metrics is None else metrics)
    return run
