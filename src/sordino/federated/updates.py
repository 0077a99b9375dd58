"""A client's update as named float tensors: what may leave a client, and nothing else.

Only trained floating-point parameters are on the list. Buffers, counts of examples, losses and batch statistics stay
where they are: no noise covers them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, PrivacyError
from sordino.events import Event, Gaussian, SelfComposed
from sordino.gradients.numerics import full_precision
from sordino.mechanisms import TensorGaussianMechanism
from sordino.randomness import KeyedRNG
from sordino.shapes import Float
from sordino.training.run_writer import require_unused_key

Update: TypeAlias = Mapping[str, Tensor]
"""Name of a shared parameter ↦ how far the client wants it moved, in the parameter's shape."""

GivenUpdate: TypeAlias = Mapping[str, npt.ArrayLike | Tensor] | Sequence[npt.ArrayLike | Tensor]
"""An update as transports carry it: by name, or a list in the order of the shared parameters; tensors, or arrays."""


def as_tensors(update: object, names: Collection[str]) -> dict[str, Tensor]:
    """An update with its numbers, whatever arrays hold them, as named tensors; their values are exact.

    Args:
        update: a mapping of names, or a list in the order of `names`; each entry a tensor, a NumPy array, anything
            that NumPy makes an array of numbers of, or None where the client gave nothing.
        names: of the shared parameters.

    Returns:
        The tensors. Empty for None, and for a list of another length: no update of the form that was asked for.

    Raises:
        InvalidArgument: the update or an entry is of a type that holds no real numbers. The message names the type.
    """
    if isinstance(update, list | tuple):
        update = dict(zip(names, update, strict=True)) if len(update) == len(names) else None
    if update is None:
        return {}
    if not isinstance(update, Mapping):
        raise InvalidArgument(
            "update must be a mapping of parameters' names to tensors or arrays, or a list of them, got "
            f"{type(update).__name__}. Convert it first."
        )
    return {name: _as_tensor(value) for name, value in update.items() if value is not None}


def _as_tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach().dequantize() if value.is_quantized else value.detach()
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # lists of different lengths
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise InvalidArgument(
                "update must hold tensors or arrays of real numbers, got "
                f"{type(value).__name__}. Convert its entries with torch.as_tensor or numpy.asarray."
            )
        # A copy in the machine's byte order, of a type that torch has.
        has_torch = array.dtype.kind == "f" and array.itemsize <= 8
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=") if has_torch else np.float64))
    if tensor.is_complex():
        raise InvalidArgument("update must hold real numbers, got complex ones. Send their parts.")
    # Types of eight bits hold numbers and have no arithmetic.
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.double()


def shared_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that clients train and send, by name: those that require gradients.

    Raises:
        InvalidArgument: there are none, or one is not of real floating-point numbers.
    """
    shared = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not shared:
        raise InvalidArgument(
            "model must have a parameter that requires gradients, got none. Unfreeze what is learned."
        )
    for name, parameter in shared.items():
        if not parameter.is_floating_point():
            raise InvalidArgument(f"{name} must be of floating-point numbers, got {parameter.dtype}. Freeze it.")
    return shared


def model_update(after: nn.Module, before: Update) -> dict[str, Tensor]:
    """How far the shared parameters of `after` are from `before`: the update that a client would send.

    Args:
        after: the client's model.
        before: the parameters that the server gave, by name.
    """
    trained = dict(after.named_parameters())
    return {name: (trained[name].detach() - value.detach()).to(value.dtype) for name, value in before.items()}


def clipped_update(update: Mapping[str, npt.ArrayLike | Tensor], *, max_update_norm: float) -> dict[str, Tensor]:
    """The update scaled down to ℓ2 norm `max_update_norm` over all its tensors; zero if an entry is not finite.

    When: on the client, so that nothing larger ever leaves it. The server clips again and relies only on that. Not
    with bounds that adapt: they count whose update is below the bound, and must see the norms.

    Args:
        update: named tensors or arrays.
        max_update_norm: > 0, in units of the parameters.

    Example:
        >>> clipped = clipped_update({"weight": torch.tensor([3.0, 4.0])}, max_update_norm=1.0)
        >>> [round(float(value), 3) for value in clipped["weight"]]
        [0.6, 0.8]
    """
    bound = checks.positive(max_update_norm=max_update_norm)
    update = as_tensors(update, tuple(update))
    largest = max((float(value.detach().abs().max()) for value in update.values() if value.numel()), default=0.0)
    if not all(bool(value.isfinite().all()) for value in update.values()):
        return {name: torch.zeros_like(value) for name, value in update.items()}
    if largest == 0:
        return dict(update)
    # Divided by the largest entry first, so that squares neither overflow nor vanish.
    squares = sum(float((value.detach().double() / largest).square().sum()) for value in update.values())
    norm = largest * squares**0.5
    if norm <= bound:
        return dict(update)
    # Rounding to the update's own type moves each entry by less than one part in 1/eps, or by less than the least
    # number of the type; both are taken off the bound.
    widths = [torch.finfo(value.dtype) for value in update.values()]
    numbers = sum(value.numel() for value in update.values())
    relative, least = max(info.eps for info in widths), max(info.tiny * info.eps for info in widths)
    room = max(0.0, bound - least * numbers**0.5) / (1 + 2 * relative)
    return {name: (value.double() * (room / norm)).to(value.dtype) for name, value in update.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Clients' updates in the place of per-record gradients: one update is one record's gradient.
#
# `training.PrivateStep` clips, sums and noises whatever has norms and weighted sums. A stack of updates has both, so
# every clipping method, schedule and correlated noise of a plan holds for clients as it does for records.
# ----------------------------------------------------------------------------------------------------------------------


class UpdateStack:
    """The updates of some clients, stacked.

    Guarantee: none of its own. An update that is not what was asked for (a name is missing or unknown, a shape differs,
    an entry is not finite) counts as not finite: it is clipped to exactly zero.

    Args:
        model: names the shared parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shared = shared_parameters(model)
        self.names = {parameter: name for name, parameter in self._shared.items()}
        self._rows: dict[nn.Parameter, Tensor] = {}
        self._groups: dict[nn.Parameter, int] = {}

    def trainable(self) -> list[nn.Parameter]:
        """The shared parameters, in the model's order."""
        return list(self._shared.values())

    def add_update(self, updates: Iterable[GivenUpdate]) -> int:
        """Stack `updates` in the place of what was there; the number of them is returned.

        Raises:
            InvalidArgument: an update is of a type that holds no numbers.
        """
        usable = [self._usable(update) for update in updates]
        self._rows = {
            parameter: torch.stack(
                [update[name].detach().to(parameter.device, _working(parameter)) for update in usable]
            )
            for name, parameter in self._shared.items()
            if usable
        }
        return len(usable)

    def _usable(self, given: GivenUpdate) -> Update:
        """`given`, or one that is nowhere finite in its place."""
        update = as_tensors(given, self.names.values())
        fits = set(update) == set(self._shared)
        fits = fits and all(_fits(update[name], parameter) for name, parameter in self._shared.items())
        return update if fits else {name: torch.full_like(p, torch.nan) for name, p in self._shared.items()}

    def squared_norm_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None) -> Float[Tensor, "*G B"]:
        """The squared norm of each update, over all parameters or for each group of them.

        Sums of squares of single-precision entries are taken in double precision; an update whose square overflows even
        that counts as not finite.
        """
        if groups is None:
            self._groups = {}
            return self._squares(self.trainable())
        self._groups = {parameter: number for number, group in enumerate(groups) for parameter in group}
        return torch.stack([self._squares(group) for group in groups])

    def _squares(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, " B"]:
        total = torch.zeros(0, dtype=torch.float64)
        for parameter in parameters:
            if parameter in self._rows:
                rows = self._rows[parameter].double().flatten(1).square().sum(1)
                total = rows if not len(total) else total + rows.to(total.device)
        return total

    def add_weighted_sums(
        self, weights: Float[Tensor, "*G B"], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add Σ_b weights[b] · update_b to `into`; with groups, row g of `weights` is for the g-th group."""
        del last
        for parameter, rows in self._rows.items():
            with full_precision(rows.device):
                self._add(weights, parameter, rows, into)

    def _add(
        self, weights: Float[Tensor, "*G B"], parameter: nn.Parameter, rows: Tensor, into: dict[nn.Parameter, Tensor]
    ) -> None:
        """Norms were taken of these very numbers, so no product may be rounded more coarsely."""
        factor = (weights if weights.dim() == 1 else weights[self._groups[parameter]]).to(rows)
        # A factor of zero must also remove what is not finite.
        kept = torch.where(factor.view(-1, *[1] * (rows.dim() - 1)) == 0, torch.zeros_like(rows), rows)
        total = torch.tensordot(factor, kept, dims=1)
        present = into.get(parameter)
        into[parameter] = total if present is None else present.add_(total)

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The stacked updates themselves, and the factor 1: for methods that must look at every entry."""
        if self._rows:
            yield dict(self._rows), 1.0

    def discard(self) -> None:
        """Forget the stacked updates."""
        self._rows = {}


def _fits(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether `value` lies in memory and has the parameter's shape."""
    return value.shape == parameter.shape and value.device.type != "meta"


def _working(parameter: nn.Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# Local differential privacy of updates: each client adds the noise itself and trusts no other party.
#
# Kept apart from `PrivateServer`, whose noise is added once for all: at the same ε the mean over n clients is noisier
# by a factor of about √n here.
#
# References:
#     Dwork, Roth 2014, section 12.1 (local model); Balle, Wang 2018, theorem 8 (analytic Gaussian).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LocalPrivacy:
    """Clips and noises one client's updates on the client.

    Guarantee: all updates that `privatize` returns, up to `rounds` of them, are together (epsilon, delta)-
    differentially private for everything that this client holds: any two of its datasets are neighbors. Two clipped
    updates are at most twice the bound apart, and that is the sensitivity; it can't be set to anything else.

    Args:
        epsilon: ε > 0 over all rounds, never exceeded.
        delta: δ in (0, 1).
        max_update_norm: clipping bound > 0 of one update.
        rounds: the most updates that this client will send, ≥ 1.
        rng: the client's own; a fresh key by default.

    Example:
        >>> import torch
        >>> local = LocalPrivacy(epsilon=8.0, delta=1e-5, max_update_norm=1.0, rounds=10)
        >>> sent = local.privatize({"weight": torch.zeros(3)})
        >>> sent["weight"].shape, local.sent
        (torch.Size([3]), 1)
    """

    epsilon: float
    delta: float
    max_update_norm: float
    rounds: int = 1
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False)
    sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require_unused_key(self.rng)
        checks.positive(epsilon=self.epsilon)
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.positive(max_update_norm=self.max_update_norm)
        checks.integer(1, rounds=self.rounds)
        multiplier = accounting.calibrate_noise_multiplier(
            lambda noise: _events(noise, self.rounds),
            target_epsilon=self.epsilon,
            delta=self.delta,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
        )
        self._mechanism = TensorGaussianMechanism(noise_multiplier=multiplier, l2_sensitivity=2 * self.max_update_norm)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on every entry of an update."""
        return self._mechanism.stddev

    def event(self) -> Event:
        """All that was sent so far, as one event."""
        return _events(self._mechanism.noise_multiplier, self.sent)

    def privatize(self, update: Update) -> dict[str, Tensor]:
        """The update as it may leave the client; one that is not finite counts as zero.

        Raises:
            PrivacyError: `rounds` updates were sent already; nothing is returned.
        """
        if self.sent >= self.rounds:
            raise PrivacyError(
                f"update must be one of the {self.rounds} that were declared, got one more. Declare more rounds before "
                "the first: each then gets more noise."
            )
        # In double precision before it is clipped: half precision rounds an update beyond its bound.
        given = as_tensors(update, tuple(update))
        exact = {name: value.double().clone() for name, value in given.items()}
        noisy = clipped_update(exact, max_update_norm=self.max_update_norm)
        self.sent += 1
        self._mechanism.add_noise_(list(noisy.values()), rng=self.rng, step=self.sent)
        return {name: value.to(given[name].dtype) for name, value in noisy.items()}

    def guarantee(self) -> Guarantee:
        """What was sent so far guarantees, for everything that this client holds."""
        return client_guarantee(
            self.event(),
            self.delta,
            NeighboringRelation.REPLACE_ONE,
            self.rng,
            "local: holds against the server too",
            "any two datasets of the client are neighbors",
        )


def client_guarantee(
    event: Event, delta: float, relation: NeighboringRelation, rng: KeyedRNG, *caveats: str
) -> Guarantee:
    """The guarantee for one client of an event that no sampling amplifies."""
    spent = accounting.epsilon(event, delta, neighboring_relation=relation)
    return Guarantee(
        epsilon=spent.upper,
        delta=delta,
        accountant=spent.accountant,
        sampler="none",
        neighboring_relation=relation,
        privacy_unit=PrivacyUnit.CLIENT,
        caveats=((FIXED_SEED_CAVEAT,) if rng.reproducible else ()) + caveats,
    )


def _events(noise_multiplier: float, count: int) -> Event:
    return SelfComposed(event=Gaussian(noise_multiplier=noise_multiplier), count=count)
