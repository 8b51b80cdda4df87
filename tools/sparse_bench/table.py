"""Rows: what is known of a run, and how it is shown. Does not know: how it was measured."""

from typing import Any

from minserve.kernels.fp8 import FP8

from .drive import Measured, Point
from .sizes import Sizes

Row = dict[str, Any]
OURS = "minserve"
"""How the side of a row begins that is not a rival's."""

COLUMNS = (
    ("requests", 8, "{:d}"),
    ("context", 7, "{:d}"),
    ("drafts", 7, "{}"),
    ("drift", 8, "{}"),
    ("step_ms", 8, "{:.2f}"),
    ("tokens_s", 8, "{:.0f}"),
    ("tokens_step", 11, "{:.2f}"),
    ("link_gb_s", 9, "{:.1f}"),
    ("exposed_ms", 10, "{:.2f}"),
    ("hit_rate", 8, "{:.3f}"),
    ("caps_full", 9, "{:.1%}"),
    ("launch_share", 12, "{:.1%}"),
    ("idle", 6, "{:.1%}"),
    ("late", 4, "{:d}"),
    ("side", 8, "{}"),
)


def line(row: Row | None) -> str:
    """A row of the table; None: its head."""
    cells = []
    for name, width, form in COLUMNS:
        value = name.replace("_", " ") if row is None else row.get(name)
        cells.append(("-" if value is None else value if row is None else form.format(value)).rjust(width))
    return "  ".join(cells)


def row_of(point: Point, measured: Measured, sizes: Sizes, without_ms: float | None) -> Row:
    """without_ms: of a step that fetches nothing."""
    tokens_a_step = point.requests * measured.tokens_step
    link_bytes = measured.pieces_step * sizes.piece_bytes
    return {
        "side": OURS + ", fp8 host" * (sizes.host_dtype == FP8),
        "host_dtype": str(sizes.host_dtype).removeprefix("torch."),
        "requests": point.requests,
        "context": point.context,
        "drafts": str(point.drafts),
        "drift": point.drift,
        "fixed": point.is_fixed,
        "cap": point.cap,
        "slots": sizes.num_slots,
        "step_ms": measured.step_ms,
        "tokens_s": measured.tokens_s,
        "tokens_step": measured.tokens_step,
        "link_gb_s": measured.link_bytes_s / 1e9,
        "exposed_ms": None if without_ms is None else measured.step_ms - without_ms,
        "hit_rate": measured.hit_rate,
        "caps_full": measured.full_caps,
        "launch_share": measured.launch_share,
        "late": measured.late,
        "pieces_step": measured.pieces_step,
        "memory_bytes": sizes.memory(point.requests),
        "link_bytes_token": link_bytes / tokens_a_step,
        "read_bytes_token": sizes.read_bytes(point.requests) / tokens_a_step,
    }
