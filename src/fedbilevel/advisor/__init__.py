"""An advisor for step sizes: what to set them to, what the present ones cost, and values that are "auto"."""

from ._auto import Automatics, Change
from ._diagnose import Diagnosis, diagnose
from ._lanczos import Spectrum
from ._notes import notes_on
from ._values import BIAS, Advice

__all__ = ["BIAS", "Advice", "Automatics", "Change", "Diagnosis", "Spectrum", "diagnose", "notes_on"]
