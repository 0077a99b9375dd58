"""How a session and the capture of its model get along (floor 3).

A forward in evaluation mode between a training forward and its backward must not be captured, and neither must the
made-up records of the probe: the recording is put aside meanwhile. And the session's hooks lie outside the capture's.
"""

from torch import nn
from torch.utils.hooks import RemovableHandle

from sordino.gradients import GradientCapture

__all__ = ["set_aside", "surround", "take_back"]


def set_aside(capture: GradientCapture) -> object:
    """Stop capturing without ending the recording; returns what `take_back` needs."""
    recording = vars(capture)["_recording"]
    vars(capture)["_recording"] = None
    return recording


def take_back(capture: GradientCapture, recording: object) -> None:
    """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
    capture.discard()
    vars(capture)["_recording"] = recording


def surround(capture: GradientCapture, root: nn.Module, first: RemovableHandle, last: RemovableHandle) -> None:
    """Tell the capture that the outermost hooks of `root` are known and do nothing when it runs `root` again."""
    own = vars(capture)["_hook_ids"]
    if root in own:
        own[root] = (first.id, last.id)
