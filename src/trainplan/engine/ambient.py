"""What a user's own loop may not have around a step: it would change what runs, and nothing would know."""

from __future__ import annotations

import torch

from trainplan.errors import RunError


def refuse_autocast(device: torch.device) -> None:
    """Operators under autocast make tensors of other types than were captured: ranks that wait for a stage's results
    would read them as what they are not. Inside of a model's forward it is captured with the rest."""
    if torch.is_autocast_enabled(device.type):
        why = "the model was captured without it, and what ranks send each other has the types that were captured"
        instead = f"with torch.autocast({device.type!r}, ...) inside of the model's forward"
        raise RunError("a step under autocast", why, instead)
