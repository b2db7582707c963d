"""Pieces of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments` is JSON text; further pieces may continue it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Arguments:
    """More text of the last call's arguments."""

    text: str


Piece = Content | Reasoning | Call | Arguments
