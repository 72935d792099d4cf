"""Whole models: another mechanism in place of their attention, and an analysis of what it is given."""

from __future__ import annotations

from .analysis import Analysis, analyze
from .conversion import Conversion, Converted, convert

__all__ = ["Analysis", "Conversion", "Converted", "analyze", "convert"]
