"""One graphics card, in five minutes and with nothing to download: is it right there, and what does a step cost?

Four parts, each kept in the same JSON file as soon as it is there: captured gradients against autograd, one record at a
time in double precision, in single precision, TF32, half precision; the noise kernel against torch's operations and
against the normal distribution; the conformance cases of clipped sums, by `fit` on the card; and the table of models:
time and peak memory of a private step, of the plain step and of Opacus' best mode, where that is installed.

    sh benchmarks/gpu.sh [FOLDER]

`--dry-run` needs no card: the models are built on the meta device, where tensors have no values, and what a step
would run is counted. It shows that no step waits in between or mixes devices, and nothing about speed.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from steps.cases import Case
from steps.clock import machine
from steps.images import WideResNet
from steps.text import Block, Transformer
from steps.ways import Step, peers, plain_step, private_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.audit.conformance import CASES
from sordino.audit.conformance.framework import Batch, CaseResult, ConformanceLoss, FitLibrary
from sordino.clipping import FlatClipping
from sordino.gradients import GradientCapture, capture, captured_gradients
from sordino.mechanisms import device_noise
from sordino.training import PerformanceOptions

RESULTS = Path(__file__).parent / "results"

# A step cannot cost less: forward, gradients by inputs and by weights are a third each, norms of all weights come on
# top where there are many positions, and half precision takes the weighted product in two parts.
FLOORS = {"short sequences, adapters": 1.1, "all weights at 512 positions and more": 1.33}


# ----------------------------------------------------------------------------------------------------------------------
# The models.
# ----------------------------------------------------------------------------------------------------------------------


class VisionTransformer(nn.Module):
    """ViT-B/16: patches of 16 pixels, a class token, 12 blocks of width 768."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, stride=16)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 768)), nn.Parameter(torch.zeros(1, 197, 768))
        self.blocks = nn.Sequential(*(Block(768, 12, causal=False) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        seen = self.patches(x_BCHW).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(seen), -1, -1), seen], dim=1) + self.places
        return self.head(self.norm(self.blocks(hidden))[:, 0])


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank one on top."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def billion_with_adapters() -> nn.Module:
    """20 causal blocks of width 2048: 1.1 billion frozen parameters, adapters of rank 8 on queries and values."""
    model = Transformer(tokens=32000, width=2048, layers=20, heads=16, length=1024, outputs=32000, causal=True)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for block in model.blocks:
        block.query, block.value = Adapted(block.query, 8), Adapted(block.value, 8)
    return model


class InHalf(nn.Module):
    """A model under autocast in bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.inner(x).float()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the table.

    Args:
        name: the row's name.
        build: makes it.
        records: in a batch.
        shape: of one record's input; ids, where `tokens` is their number.
        classes: of the target; one at each position for causal models.
        tokens: how many different ids there are, or None for numbers.
        causal: whether there is a target at each position.
    """

    name: str
    build: Callable[[], nn.Module]
    records: int
    shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    causal: bool = False

    def case(self, device: str) -> Case:
        """The model in bfloat16 with one batch, on `device`."""
        generator = torch.Generator().manual_seed(0)
        size = (self.records, *self.shape)
        x = torch.rand(size, generator=generator) if self.tokens is None else torch.randint(self.tokens, size)
        y = torch.randint(self.classes, size if self.causal else size[:1])

        def build() -> nn.Module:
            with torch.device(device):
                # Autocast knows no meta device: there everything is made in bfloat16.
                return InHalf(self.build()) if device == "cuda" else _in_half(self.build)

        if device == "meta" and x.is_floating_point():
            x = x.bfloat16()
        return Case(name=self.name, build=build, batch=(x.to(device), y.to(device)), goal=math.inf)


def _in_half(build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def bert_base() -> nn.Module:
    return Transformer(tokens=30522, width=768, layers=12, heads=12, length=512, outputs=2, causal=False)


def gpt2_small() -> nn.Module:
    return Transformer(tokens=50257, width=768, layers=12, heads=12, length=1024, outputs=50257, causal=True)


MODELS = [
    Model(name="BERT-base, 128 tokens", build=bert_base, records=32, shape=(128,), classes=2, tokens=30522),
    Model(name="BERT-base, 512 tokens", build=bert_base, records=16, shape=(512,), classes=2, tokens=30522),
    Model(name="ViT-B/16", build=VisionTransformer, records=64, shape=(3, 224, 224), classes=1000),
    Model(
        name="GPT-2 small, 1024 tokens",
        build=gpt2_small,
        records=4,
        shape=(1024,),
        classes=50257,
        tokens=50257,
        causal=True,
    ),
    Model(
        name="WRN-28-10 with group normalization",
        build=lambda: WideResNet(blocks=4, width=10),
        records=64,
        shape=(3, 32, 32),
        classes=10,
    ),
    Model(
        name="1.1 billion parameters with adapters, 512 tokens",
        build=billion_with_adapters,
        records=8,
        shape=(512,),
        classes=32000,
        tokens=32000,
        causal=True,
    ),
]


# ----------------------------------------------------------------------------------------------------------------------
# The parts.
# ----------------------------------------------------------------------------------------------------------------------


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a wide linear layer": (lambda: nn.Linear(256, 192), (64, 256)),
    "a long linear layer": (lambda: nn.Linear(64, 48), (3000, 64)),
    "one position": (lambda: nn.Linear(256, 192), (256,)),
    "an adapter": (lambda: nn.Sequential(nn.Linear(256, 8, bias=False), nn.Linear(8, 256)), (200, 256)),
    "a convolution": (lambda: nn.Conv2d(32, 64, 3, padding=1), (32, 16, 16)),
    "a strided convolution": (lambda: nn.Conv2d(32, 64, 3, stride=2, dilation=2, groups=4), (32, 17, 17)),
    "a normalization": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), (100, 64)),
}
PRECISIONS = {
    "single": torch.float32,
    "TF32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# How far norms and sums may be from those of double precision, for inputs and gradients in the precision itself.
NORMS_APART, SUMS_APART = 1e-5, 1e-4


def exactness(device: str) -> list[dict[str, object]]:
    """Norms, sums and the largest contribution of single layers, whose gradients double precision gives exactly."""
    rows: list[dict[str, object]] = []
    for precision, dtype in PRECISIONS.items():
        for name, (build, shape) in SMALL.items():
            torch.manual_seed(0)
            model = build().to(device, dtype)
            if precision != "single" and len(list(model.children())) > 1:
                # What a first layer rounds gives the second another gradient.
                continue
            x = torch.randn(6, *shape, device=device).to(dtype)
            directions = torch.randn_like(model(x)).detach()
            with _tf32_allowed(precision == "TF32"):
                recording = GradientCapture(model)
                with recording.capturing(records=6):
                    (model(x) * directions).sum().backward()
                bounds, norms = recording.squared_norm_bounds(), recording.squared_norms()
                factors = FlatClipping().clip_factors(bounds, max_grad_norm=1.0)
                sums: dict[nn.Parameter, Tensor] = {}
                recording.add_weighted_sums(factors, sums)
                recording.detach()
            twin = copy.deepcopy(model).double()
            true = []
            for b in range(6):
                loss = (twin(x[b : b + 1].double()) * directions[b : b + 1].double()).sum()
                true.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))]))
            gradients = torch.stack(true)
            squares = gradients.square().sum(1)
            got = torch.cat([sums[p].flatten() for p in model.parameters()]).double()
            apart = float((got - factors @ gradients).norm() / got.norm())
            norms_apart = float((norms / squares - 1).abs().max())
            rows.append(
                {
                    "layer": name,
                    "precision": precision,
                    "norms apart": norms_apart,
                    "bounds below the norms": float((1 - bounds / squares).clamp(min=0).max()),
                    "bounds above the norms": float((bounds / squares).sqrt().max() - 1),
                    "sums apart": apart,
                    "right": norms_apart < NORMS_APART
                    and apart < SUMS_APART
                    and bool((bounds >= squares * (1 - NORMS_APART)).all()),
                }
            )
    return rows


@contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for backend, mode in zip(backends, before, strict=True):
            backend.fp32_precision = mode


def noise(device: str, count: int = 10_000_000) -> dict[str, object]:
    """The kernel's draws against torch's operations, and both moments against the normal distribution.

    Each statistic is a number of its own standard deviations; more than 5 is no normal distribution. A deviation that
    is 1 % off would show with more than 40.
    """
    kernel = device_noise._kernel(torch.device(device))
    total = torch.zeros(count, device=device)
    start = time.perf_counter()
    device_noise.add_device_normal_(total, bytes(range(32)), first=0, stddev=1.0)
    mean = float(total.mean(dtype=torch.float64))
    seconds = time.perf_counter() - start
    square, fourth = (float(total.double().pow(power).mean()) for power in (2, 4))
    tail = float((total.abs() > 4).double().mean())
    chance = math.erfc(4 / math.sqrt(2))
    return {
        "draws": count,
        "kernel": None if kernel is None else "Triton",
        "seconds with the first compilation": seconds,
        "mean": mean * math.sqrt(count),
        "variance": (square - 1) * math.sqrt(count / 2),
        "fourth moment": (fourth - 3) * math.sqrt(count / 96),
        "beyond 4": (tail - chance) / math.sqrt(chance / count),
    }


class CardLibrary(FitLibrary):
    """`fit` with the model on a card; what it gives is looked at on the processor."""

    def clipped_sum(
        self, model: nn.Module, batch: Batch, loss: ConformanceLoss, *, max_grad_norm: float
    ) -> list[Tensor]:
        sums = super().clipped_sum(model, batch, loss, max_grad_norm=max_grad_norm)
        model.to("cpu")
        return [value.cpu() for value in sums]


def conformance(device: str, until: float) -> dict[str, object]:
    """The cases that a clipped sum decides; what is left when time is over is left out."""
    library = CardLibrary(performance=PerformanceOptions(device=device), label=f"fit on {device}")
    results: list[CaseResult] = []
    for one in CASES.values():
        if time.monotonic() > until:
            break
        results.append(one.run(library))
    failed = {result.case: f"{result.verdict}: {result.description}" for result in results if not result.passed}
    verdicts = ("right", "refused", "wrong", "not offered")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in verdicts}
    return {"cases": len(CASES), "tried": len(results), **counts, "failed": failed}


def table(device: str, until: float) -> list[dict[str, object]]:
    """Time and peak memory of a step of each model, plain, private and by Opacus' modes."""
    rows: list[dict[str, object]] = []
    for model in MODELS:
        row: dict[str, object] = {"model": model.name, "records": model.records}
        rows.append(row)
        others = {name: way for name, way in peers().items() if name.startswith("Opacus")}
        ways: dict[str, Callable[[Case], Step]] = {"plain": plain_step, "private": private_step, **others}
        for name, way in ways.items():
            if time.monotonic() > until:
                row[name] = "no time left"
                continue
            try:
                row[name] = _measured(way, model.case(device))
            except Exception as error:
                row[name] = type(error).__name__
            torch.cuda.empty_cache()
        plain, private = row["plain"], row["private"]
        if isinstance(plain, dict) and isinstance(private, dict):
            row["ratio"] = private["ms"] / plain["ms"]
            row["memory ratio"] = private["peak MB"] / plain["peak MB"]
        print(json.dumps(row), flush=True)
    return rows


def _measured(way: Callable[[Case], Step], case: Case) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    step = way(case)
    for _ in range(2):
        step()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "peak MB": torch.cuda.max_memory_allocated() / 2**20}


# ----------------------------------------------------------------------------------------------------------------------
# Without a card: what a step would run, on tensors without values.
# ----------------------------------------------------------------------------------------------------------------------


# Operations that start no work on a device, besides views: they find a type, give memory, or only change a shape.
STARTS_NOTHING = {"device", "detach", "empty", "empty_like", "new_empty", "promote_types", "squeeze_", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Counts operations that start work on a device, and products among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += not func.is_view and name not in STARTS_NOTHING
        self.products += name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
        return func(*args, **(kwargs or {}))


def dry_run(models: Sequence[Model] = MODELS) -> list[dict[str, object]]:
    """Operations and products of a plain and of a private step of each model, noise left out; and looks at values."""
    rows: list[dict[str, object]] = []
    for model in models:
        case, row = model.case("meta"), {"model": model.name}
        rows.append(row)
        for name, way in (("plain", plain_step), ("private", lambda case: private_step(case, noise_multiplier=0.0))):
            with _without_values() as looks:
                step = way(case)
                with Operations() as operations:
                    step()
                row[name] = {"operations": operations.count, "products": operations.products, "looks": looks["looks"]}
    return rows


@contextmanager
def _without_values() -> Iterator[dict[str, int]]:
    """Every look at a value raises, but for the one at whether all records have weight."""
    looks = {"looks": 0}

    def holds(_condition: Tensor) -> bool:
        looks["looks"] += 1
        return True

    usual = captured_gradients.guard_holds, capture.check_hooks_present
    # Parameters without values are refused in training.
    captured_gradients.guard_holds, capture.check_hooks_present = holds, lambda _model: None
    try:
        yield looks
    finally:
        captured_gradients.guard_holds, capture.check_hooks_present = usual


def main() -> None:
    """All parts, or the dry run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on tensors without values; needs no card")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for gpu.json")
    parser.add_argument("--seconds", type=float, default=270.0, help="no model is begun after so long")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[str, object] = {"machine": machine(), "floors": FLOORS}

    def keep(part: str, value: object) -> None:
        found[part] = value
        (given.results / ("gpu-dry-run.json" if given.dry_run else "gpu.json")).write_text(json.dumps(found, indent=1))
        print(part, json.dumps(value, indent=1), flush=True)

    if given.dry_run:
        keep("steps without values", dry_run())
        return
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA device is needed, got none. Try --dry-run.")
    keep("exactness", exactness("cuda"))
    keep("noise", noise("cuda"))
    keep("conformance", conformance("cuda", started + min(60.0, given.seconds / 3)))
    keep("table", table("cuda", started + given.seconds))


if __name__ == "__main__":
    main()
