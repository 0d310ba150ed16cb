"""Petastorm on ranks: as it is, and through sparkring's adapter."""

from __future__ import annotations
