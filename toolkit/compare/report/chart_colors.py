"""The colors of the plot and of the page, distinguishable with red-green color blindness."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Color:
    """One color, as it reads on a white page and on a dark one."""

    light: str
    dark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Color):
    """The color of a part of the model states, or of a step.

    >>> [part.name for part in PARTS]
    ['parameters', 'gradients', 'optimizer']
    """

    name: str
    key: str
    """The key of its bytes in a row, or of its lane in a timeline."""


# Hues of Okabe and Ito (https://jfly.uni-koeln.de/color/), darker or lighter for contrast with the page.
PARTS = (
    Part(name="parameters", key="parameter_bytes", light="#0072B2", dark="#4AA3DF"),
    Part(name="gradients", key="gradient_bytes", light="#E69F00", dark="#E8B04A"),
    Part(name="optimizer", key="optimizer_bytes", light="#009E73", dark="#3CC79D"),
)
REST = Color(light="#C7B5DA", dark="#8F7BA8")
LANES = (
    Part(name="compute", key="compute", light="#0072B2", dark="#4AA3DF"),
    Part(name="waiting for data", key="data_wait", light="#E69F00", dark="#E8B04A"),
    Part(name="communication (lower line)", key="communication", light="#CC79A7", dark="#DF9CC2"),
)
SPEED = Color(light="#4A6FA5", dark="#7C9FD3")
MUTED = Color(light="#6B7280", dark="#9AA3AF")
CURVES = (
    Color(light="#BBBBBB", dark="#6B7280"),
    Color(light="#E69F00", dark="#E8B04A"),
    Color(light="#0072B2", dark="#4AA3DF"),
    Color(light="#CC79A7", dark="#DF9CC2"),
    Color(light="#009E73", dark="#3CC79D"),
    Color(light="#D55E00", dark="#F08A45"),
    Color(light="#222222", dark="#F3F4F6"),
)
# Page, ink, line, band and alarm.
PAGE = {
    "page": Color(light="#ffffff", dark="#14171a"),
    "ink": Color(light="#1f2328", dark="#e6e8ea"),
    "line": Color(light="#d8dee4", dark="#363c43"),
    "band": Color(light="#f3f5f7", dark="#20252a"),
    "alarm": Color(light="#b42318", dark="#ff8a7a"),
}
CSS_VARIABLES: dict[str, Color] = {
    **{f"p{index}": part for index, part in enumerate(PARTS)},
    **{f"c{index}": color for index, color in enumerate(CURVES)},
    "speed": SPEED,
    "muted": MUTED,
    "rest": REST,
    **{lane.key: lane for lane in LANES},
    **PAGE,
}
"""Every color of the page by the name of its CSS variable."""
# In points, of a curve under all others.
WIDEST_CURVE = 9.0


def curve_widths(count: int) -> list[float]:
    """Return line widths from wide to narrow, in points: a curve drawn on an equal one leaves its edges visible."""
    step = min(1.6, WIDEST_CURVE / max(count, 1))
    return [1.4 + step * (count - 1 - index) for index in range(count)]
