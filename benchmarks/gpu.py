"""One graphics card, in five minutes and with nothing to download: is it right there, and what does a step cost?

Four parts, each kept in the same JSON file as soon as it is there: captured gradients against autograd, one record at a
time in double precision, in single precision, TF32, half precision; the noise kernel against torch's operations and
against the normal distribution; the conformance cases of clipped sums, by `fit` on the card; and the table of models:
time and peak memory of a private step, of the plain step and of Opacus' best mode, where that is installed.

    sh benchmarks/gpu.sh [FOLDER]

Two ways need no card. With `--dry-run` the models are built on the meta device, where tensors have no values, and what
a step would run is counted: it shows that no step waits in between or mixes devices, and nothing about speed. With
`--device cpu` all parts run with tiny models, and the processor is taken for another device, so that every branch for
one runs: it shows that the script works, and nothing about a card.
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
from sordino.gradients import GradientCapture, capture, captured_gradients, numerics
from sordino.mechanisms import device_noise
from sordino.training import PerformanceOptions

RESULTS = Path(__file__).parent / "results"

# A step cannot cost less: forward, gradients by inputs and by weights are a third each, norms of all weights come on
# top where there are many positions, and half precision takes the weighted product in two parts.
FLOORS = {"short sequences, adapters": 1.1, "all weights at 512 positions and more": 1.33}


# ----------------------------------------------------------------------------------------------------------------------
# What is asked of a card, and of nothing else here.
# ----------------------------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Until the device has done what was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    """Give unused memory back, and measure the peak from here on."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_megabytes(device: str) -> float | None:
    """The peak since then; on the processor it is not measured."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """A block in which products in single precision may go to TF32, or may not."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for backend, mode in zip(backends, before, strict=True):
            backend.fp32_precision = mode


# ----------------------------------------------------------------------------------------------------------------------
# The models.
# ----------------------------------------------------------------------------------------------------------------------


class VisionTransformer(nn.Module):
    """ViT-B/16 by default: patches of 16 pixels, a class token, 12 blocks of width 768."""

    def __init__(self, *, side: int = 224, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1 + (side // 16) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

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


def with_adapters(*, tokens: int, width: int, layers: int, heads: int) -> nn.Module:
    """Frozen causal blocks with adapters of rank 8 on queries and values."""
    model = Transformer(
        tokens=tokens, width=width, layers=layers, heads=heads, length=1024, outputs=tokens, causal=True
    )
    for parameter in model.parameters():
        parameter.requires_grad = False
    for block in model.blocks:
        block.query, block.value = Adapted(block.query, 8), Adapted(block.value, 8)
    return model


class InHalf(nn.Module):
    """A model under autocast in bfloat16."""

    def __init__(self, inner: nn.Module, device: str) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
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
                return _in_half(self.build) if device == "meta" else InHalf(self.build(), device)

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


def models(*, tiny: bool = False) -> list[Model]:
    """The rows of the table; `tiny` ones are of the same kinds, and a step of each takes milliseconds."""
    width, layers, heads, side = (16, 1, 2, 32) if tiny else (768, 12, 12, 224)
    words, pieces, long, many = (50, 60, 24, 3) if tiny else (30522, 50257, 1024, 64)

    def bert() -> nn.Module:
        return Transformer(tokens=words, width=width, layers=layers, heads=heads, length=512, outputs=2, causal=False)

    def gpt2() -> nn.Module:
        return Transformer(
            tokens=pieces, width=width, layers=layers, heads=heads, length=1024, outputs=pieces, causal=True
        )

    def adapted() -> nn.Module:
        if tiny:
            return with_adapters(tokens=words, width=16, layers=1, heads=2)
        return with_adapters(tokens=32000, width=2048, layers=20, heads=16)

    of_adapted = words if tiny else 32000
    return [
        Model(
            name="BERT-base, 128 tokens",
            build=bert,
            records=3 if tiny else 32,
            shape=(8 if tiny else 128,),
            classes=2,
            tokens=words,
        ),
        Model(
            name="BERT-base, 512 tokens",
            build=bert,
            records=3 if tiny else 16,
            shape=(long if tiny else 512,),
            classes=2,
            tokens=words,
        ),
        Model(
            name="ViT-B/16",
            build=lambda: VisionTransformer(side=side, width=width, layers=layers, heads=heads),
            records=many,
            shape=(3, side, side),
            classes=1000,
        ),
        Model(
            name="GPT-2 small, 1024 tokens",
            build=gpt2,
            records=3 if tiny else 4,
            shape=(long,),
            classes=pieces,
            tokens=pieces,
            causal=True,
        ),
        Model(
            name="WRN-28-10 with group normalization",
            build=lambda: WideResNet(blocks=1 if tiny else 4, width=1 if tiny else 10),
            records=many,
            shape=(3, 8, 8) if tiny else (3, 32, 32),
            classes=10,
        ),
        Model(
            name="1.1 billion parameters with adapters, 512 tokens",
            build=adapted,
            records=3 if tiny else 8,
            shape=(long if tiny else 512,),
            classes=of_adapted,
            tokens=of_adapted,
            causal=True,
        ),
    ]


MODELS = models()


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
# How far squared norms and sums may be from those of double precision, for inputs and gradients in the precision.
# Emulated matrix units, which cut off what single precision can't hold, come to 7e-6 and 3e-6.
NORMS_APART, SUMS_APART = 5e-5, 1e-4


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
            with tf32_allowed(precision == "TF32"):
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
        try:
            sums = super().clipped_sum(model, batch, loss, max_grad_norm=max_grad_norm)
        finally:
            model.to("cpu")
        return [value.cpu() for value in sums]


def conformance(device: str, until: float) -> dict[str, object]:
    """The cases that a clipped sum decides; what is left when time is over is left out."""
    library = CardLibrary(performance=PerformanceOptions(device=device), label=f"fit on {device}")
    results: list[CaseResult] = []
    # The right sum is computed in double precision on the processor.
    with tf32_allowed(False):
        for one in CASES.values():
            if time.monotonic() > until:
                break
            results.append(one.run(library))
    failed = {result.case: f"{result.verdict}: {result.description}" for result in results if not result.passed}
    verdicts = ("right", "refused", "wrong", "not offered")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in verdicts}
    return {"cases": len(CASES), "tried": len(results), **counts, "failed": failed}


def table(device: str, until: float, models: Sequence[Model] = MODELS) -> list[dict[str, object]]:
    """Time and peak memory of a step of each model, plain, private and by Opacus' modes."""
    rows: list[dict[str, object]] = []
    for model in models:
        row: dict[str, object] = {"model": model.name, "records": model.records}
        rows.append(row)
        others = {name: way for name, way in peers().items() if name.startswith("Opacus")}
        ways: dict[str, Callable[[Case], Step]] = {"plain": plain_step, "private": private_step, **others}
        for name, way in ways.items():
            if time.monotonic() > until:
                row[name] = "no time left"
                continue
            try:
                row[name] = _measured(way, model.case(device), device)
            except Exception as error:
                row[name] = f"{type(error).__name__}: {str(error)[:200]}"
        plain, private = row["plain"], row["private"]
        if isinstance(plain, dict) and isinstance(private, dict):
            row["ratio"] = private["ms"] / plain["ms"]
            if device == "cuda":
                row["memory ratio"] = private["peak MB"] / plain["peak MB"]
        print(json.dumps(row), flush=True)
    return rows


def _measured(way: Callable[[Case], Step], case: Case, device: str) -> dict[str, float | None]:
    forget_peak(device)
    step = way(case)
    for _ in range(2):
        step()
    times = []
    for _ in range(7):
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "peak MB": peak_megabytes(device)}


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


@contextmanager
def _taken_for_a_card(device: str) -> Iterator[None]:
    """The processor runs what another device would."""
    usual = numerics._HOST
    numerics._HOST = "none" if device == "cpu" else usual
    try:
        yield
    finally:
        numerics._HOST = usual


def main() -> None:
    """All parts, or the dry run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on tensors without values; needs no card")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for gpu.json")
    parser.add_argument("--seconds", type=float, default=270.0, help="no model is begun after so long")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[str, object] = {"machine": machine(), "floors": FLOORS}
    device, on_card = given.device, given.device == "cuda"
    file = "gpu-dry-run.json" if given.dry_run else "gpu.json" if on_card else "gpu-cpu.json"

    def keep(part: str, value: object) -> None:
        found[part] = value
        (given.results / file).write_text(json.dumps(found, indent=1))
        print(part, json.dumps(value, indent=1), flush=True)

    if given.dry_run:
        keep("steps without values", dry_run())
        return
    if on_card and not torch.cuda.is_available():
        raise SystemExit("a CUDA device is needed, got none. Try --dry-run or --device cpu.")
    with _taken_for_a_card(device):
        keep("exactness", exactness(device))
        keep("noise", noise(device, 10_000_000 if on_card else 100_000))
        keep("conformance", conformance(device, started + min(60.0, given.seconds / 3)))
        keep("table", table(device, started + given.seconds, models(tiny=not on_card)))


if __name__ == "__main__":
    main()
