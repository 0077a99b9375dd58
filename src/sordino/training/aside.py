"""Keeps a recording while the same model is called for something else (floor 3).

A forward in evaluation mode between a training forward and its backward must not be captured, and neither must the
made-up records of the probe.
"""

from sordino.gradients import GradientCapture

__all__ = ["set_aside", "take_back"]


def set_aside(capture: GradientCapture) -> object:
    """Stop capturing without ending the recording; returns what `take_back` needs."""
    recording = vars(capture)["_recording"]
    vars(capture)["_recording"] = None
    return recording


def take_back(capture: GradientCapture, recording: object) -> None:
    """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
    capture.discard()
    vars(capture)["_recording"] = recording
