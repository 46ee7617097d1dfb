"""The colours of the plot and of the page, told apart by people who see red and green alike.

>>> [part.name for part in PARTS]
['parameters', 'gradients', 'optimizer']
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Colour:
    """One colour, as it reads on a white page and on a dark one."""

    light: str
    dark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Colour):
    """A part of the model states, or of a step, and its colour."""

    name: str
    key: str
    """The row's key that holds its bytes, or the lane's in a timeline."""


# Hues of Okabe and Ito (https://jfly.uni-koeln.de/color/), darker or lighter for contrast with the page.
PARTS = (
    Part(name="parameters", key="parameter_bytes", light="#0072B2", dark="#4AA3DF"),
    Part(name="gradients", key="gradient_bytes", light="#E69F00", dark="#E8B04A"),
    Part(name="optimizer", key="optimizer_bytes", light="#009E73", dark="#3CC79D"),
)
REST = Colour(light="#C7B5DA", dark="#8F7BA8")
LANES = (
    Part(name="compute", key="compute", light="#0072B2", dark="#4AA3DF"),
    Part(name="waiting for data", key="data_wait", light="#E69F00", dark="#E8B04A"),
    Part(name="communication (lower line)", key="communication", light="#CC79A7", dark="#DF9CC2"),
)
SPEED = Colour(light="#4A6FA5", dark="#7C9FD3")
MUTED = Colour(light="#6B7280", dark="#9AA3AF")
CURVES = (
    Colour(light="#BBBBBB", dark="#6B7280"),
    Colour(light="#E69F00", dark="#E8B04A"),
    Colour(light="#0072B2", dark="#4AA3DF"),
    Colour(light="#CC79A7", dark="#DF9CC2"),
    Colour(light="#009E73", dark="#3CC79D"),
    Colour(light="#D55E00", dark="#F08A45"),
    Colour(light="#222222", dark="#F3F4F6"),
)


WIDEST = 9.0
"""Of a curve under all others, in points."""


def curve_widths(count: int) -> list[float]:
    """From wide to narrow, in points: a curve drawn on an equal one leaves its edges in sight."""
    step = min(1.6, WIDEST / max(count, 1))
    return [1.4 + step * (count - 1 - index) for index in range(count)]
