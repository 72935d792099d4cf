"""Whole models: another mechanism in place of their attention, what brings them back to what they did, and an analysis of what attention
is given."""

from __future__ import annotations

from .analysis import Analysis, analyze
from .conversion import Conversion, Converted, convert
from .distillation import Distillation, Losses, distill

__all__ = ["Analysis", "Conversion", "Converted", "Distillation", "Losses", "analyze", "convert", "distill"]
