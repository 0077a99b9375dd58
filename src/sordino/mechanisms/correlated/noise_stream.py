"""The stream of correlated noise on tensors, and its state in a checkpoint.

The buffers are secret: together with the released gradients they give the clipped sums away. A checkpoint that holds
them belongs with the private data, not with the released model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InvalidArgument, PrivacyError
from sordino.mechanisms.base import observable_release
from sordino.mechanisms.correlated.strategies import FloatArray, Recurrence
from sordino.mechanisms.tensor_noise import standard_normal
from sordino.randomness import KeyedRNG

if TYPE_CHECKING:
    from sordino.mechanisms.correlated.mechanism import CorrelatedGaussianMechanism

_NAME = "correlated_noise.{}"


@dataclass
class _Lane:
    """The tensors of one type on one device, laid end to end, and their buffers."""

    positions: list[int]
    buffers: Tensor


class CorrelatedNoiseStream:
    """Noise for one run, step by step, in order.

    Guarantee: when every step from 0 on is given to `add_noise_` or `skip_step`, with this object or one that took
    over its state, the noises are C⁻¹Z of the mechanism, in floating point. Fresh draws come from a name that no
    other object has, so going on from a state never repeats one.

    Memory is `strategy.buffers` copies of the tensors. Made by `CorrelatedGaussianMechanism.start`.
    """

    def __init__(self, mechanism: "CorrelatedGaussianMechanism") -> None:
        self.mechanism = mechanism
        self._next = 0
        self._lanes: list[_Lane] | None = None
        self._layout: list[tuple[int, torch.dtype]] | None = None
        self._name: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "CorrelatedNoise can't be pickled or copied: a copy would repeat its draws. Use state_tensors()."
        )

    @property
    def next_step(self) -> int:
        """The step whose noise comes next."""
        return self._next

    @observable_release
    def add_noise_(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int, rank: int = 0) -> None:
        """Add the noise of `step` to `tensors` in place.

        Args:
            tensors: the clipped sums, the same number, sizes and types in every step.
            rng: source of the fresh draws.
            step: `next_step`.
            rank: number of the process.

        Raises:
            PrivacyError: `step` is not `next_step`. Going on without the earlier steps' state, or giving a step's noise
                twice, would undo the correlation that the guarantee rests on.
            InvalidArgument: the tensors changed, or the run is longer than the strategy.
        """
        for lane, noise in self._drawn(tensors, rng, step, rank):
            if noise is not None:
                sizes = [tensors[position].numel() for position in lane.positions]
                for position, part in zip(lane.positions, noise.split(sizes), strict=True):
                    tensors[position].add_(part.view(tensors[position].shape).to(tensors[position].dtype))

    def skip_step(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int, rank: int = 0) -> None:
        """Bring the stream past a step whose sum was thrown away; `tensors` only tell sizes and types."""
        self._drawn(tensors, rng, step, rank)

    def state_tensors(self) -> dict[str, Tensor]:
        """The buffers by name, ready for safetensors. Secret."""
        lanes = self._lanes or []
        return {_NAME.format(number): lane.buffers.clone() for number, lane in enumerate(lanes)}

    def state_json(self) -> str:
        """What goes with the buffers: the step, the sizes, and the mechanism they belong to."""
        layout = [[size, str(dtype).removeprefix("torch.")] for size, dtype in self._layout or []]
        return json.dumps(
            {"schema": 1, "mechanism": self.mechanism.fingerprint, "next_step": self._next, "layout": layout}
        )

    def load_state_dict(self, tensors: Mapping[str, Tensor], text: str) -> None:
        """Go on where another object of the same mechanism stood.

        Raises:
            PrivacyError: this object has given noise already, or the state belongs to another mechanism.
            InvalidArgument: the state is damaged.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or set(body) != {"schema", "mechanism", "next_step", "layout"}:
            raise InvalidArgument("state must be what state_json wrote, got other fields. Check the checkpoint.")
        if self._next or self._lanes is not None:
            raise PrivacyError("noise must not have been given when a state is loaded. Start a new stream, then load.")
        if body["schema"] != 1 or body["mechanism"] != self.mechanism.fingerprint:
            raise PrivacyError("state must belong to this mechanism: same strategy, participation, noise and bound.")
        next_step = checks.integer(0, next_step=body["next_step"])
        layout = [(checks.integer(0, size=size), getattr(torch, name)) for size, name in body["layout"]]
        if next_step == 0:
            return
        lanes = _lanes(layout, [torch.device("cpu")] * len(layout), self.mechanism.strategy.buffers)
        for number, lane in enumerate(lanes):
            given = tensors.get(_NAME.format(number))
            if given is None or given.shape != lane.buffers.shape or given.dtype != lane.buffers.dtype:
                raise InvalidArgument(
                    f"buffers {_NAME.format(number)} must be a tensor of shape {tuple(lane.buffers.shape)}, got "
                    "another or none. Without the buffers the run can't go on: start a new one and charge it."
                )
            lane.buffers = given.clone()
        self._next, self._layout, self._lanes = next_step, layout, lanes

    def _drawn(
        self, tensors: Sequence[Tensor], rng: KeyedRNG, step: int, rank: int
    ) -> list[tuple[_Lane, Tensor | None]]:
        """The noise of `step` for every lane; brings the buffers forward."""
        strategy, stddev = self.mechanism.strategy, self.mechanism.stddev
        if step != self._next:
            raise PrivacyError(
                f"step must be {self._next}, got {step}. Correlated noise goes on from its own state: load the state "
                "of the step before, give an abandoned step to skip_step, and never go back."
            )
        if step >= strategy.steps:
            raise InvalidArgument(f"step must be below {strategy.steps}, got {step}. The strategy ends there.")
        lanes = self._fitted(tensors)
        if self._name is None:
            self._name = "correlated gaussian " + rng.new_stream("correlated gaussian").integers64(2).tobytes().hex()
        self._next += 1
        if stddev == 0:
            return [(lane, None) for lane in lanes]
        rule, stream = strategy.recurrence(step), rng.stream(self._name, step=step, rank=rank)
        noises: list[tuple[_Lane, Tensor | None]] = []
        for lane in lanes:
            held = lane.buffers
            draw = standard_normal(held.shape[1], stream, dtype=held.dtype, device=held.device).mul_(stddev)
            noises.append((lane, _advanced(held, draw, rule)))
        return noises

    def _fitted(self, tensors: Sequence[Tensor]) -> list[_Lane]:
        """The lanes for `tensors`, made in the first step and unchanged after it, on the tensors' devices."""
        layout = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        devices = [tensor.device for tensor in tensors]
        if self._lanes is None:
            self._lanes, self._layout = _lanes(layout, devices, self.mechanism.strategy.buffers), layout
        elif layout != self._layout:
            raise InvalidArgument(
                "tensors must have the sizes and types of the steps before, got others. The noise of a parameter "
                "goes on over the whole run: don't freeze or unfreeze parameters in it."
            )
        for lane in self._lanes:
            if lane.buffers.device != devices[lane.positions[0]]:
                lane.buffers = lane.buffers.to(devices[lane.positions[0]])
        return self._lanes


@torch.no_grad()
def _advanced(buffers: Tensor, draw: Tensor, rule: Recurrence) -> Tensor:
    """The step's noise; `buffers` are brought forward in place, `draw` may be overwritten.

    Elementwise sums in the buffers' own type: matrix products may be done in fewer bits, by autocast for instance.
    """
    noise = draw.mul(rule.gain) if rule.keep == "draw" else draw.mul_(rule.gain)
    _add_weighted_(noise, buffers, rule.read)
    if rule.decay is not None:
        for decay, buffer in zip(rule.decay.tolist(), buffers, strict=True):
            torch.add(noise, buffer, alpha=decay, out=buffer)
    elif rule.slot is not None:
        kept = noise if rule.keep == "noise" else draw
        if rule.carry is not None:
            kept = _add_weighted_(kept.clone(), buffers, rule.carry)
        buffers[rule.slot].copy_(kept)
    return noise


def _add_weighted_(total: Tensor, buffers: Tensor, weights: FloatArray) -> Tensor:
    for weight, buffer in zip(weights.tolist(), buffers, strict=True):
        if weight:
            total.add_(buffer, alpha=weight)
    return total


def _lanes(layout: list[tuple[int, torch.dtype]], devices: list[torch.device], buffers: int) -> list[_Lane]:
    """One lane for each working type, in order of first appearance."""
    positions: dict[torch.dtype, list[int]] = {}
    for position, (_, dtype) in enumerate(layout):
        positions.setdefault(torch.float64 if dtype == torch.float64 else torch.float32, []).append(position)
    lanes = []
    for dtype, members in positions.items():
        if len({devices[position] for position in members}) > 1:
            raise InvalidArgument("tensors must be on one device, got several. Move the model to one device.")
        size = sum(layout[position][0] for position in members)
        lanes.append(
            _Lane(positions=members, buffers=torch.zeros(buffers, size, dtype=dtype, device=devices[members[0]]))
        )
    return lanes
