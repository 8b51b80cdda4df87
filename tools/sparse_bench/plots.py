"""Two pictures of the rows. Owns: what is drawn on which axis. Needs matplotlib, which may not be there."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .drive import MEASURED, NONE, WORST
from .sizes import LINK_BYTES_S, READ_BYTES_S
from .table import OURS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {WORST: "-", MEASURED: "--", NONE: ":"}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the PNGs. Empty: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    paths = []
    for name, draw_on in (("bench_sparse_roofline", _roofline), ("bench_sparse_requests", _requests)):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        draw_on(axes, rows)
        axes.set_title(" / ".join(dict.fromkeys(row["side"] for row in rows)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _is_ours(row: Row) -> bool:
    return bool(row["side"].startswith(OURS))


def _roofline(axes: "Axes", rows: Sequence[Row]) -> None:
    """Over the bytes that a token moves: what memory and link allow, and what was reached."""
    moved = [row[name] for row in rows for name in ("read_bytes_token", "link_bytes_token") if row.get(name)]
    ends = [min(moved, default=1e6) / 2, max(moved, default=1e10) * 2]
    axes.plot(ends, [READ_BYTES_S / each for each in ends], "k-", label=f"memory, {READ_BYTES_S / 1e12:g} TB/s")
    axes.plot(ends, [LINK_BYTES_S / each for each in ends], "k--", label=f"link, {LINK_BYTES_S / 1e9:g} GB/s")
    contexts = sorted({row["context"] for row in rows})
    for number, context in enumerate(contexts):
        own = [row for row in rows if row["context"] == context and _is_ours(row) and row["drift"] == WORST]
        color, label = f"C{number}", f"{context // 1024}K"
        for name, marker, what in (("read_bytes_token", "o", "of memory"), ("link_bytes_token", "^", "over the link")):
            x, y = [row[name] for row in own], [row["tokens_s"] for row in own]
            axes.plot(x, y, marker, color=color, alpha=0.8, label=f"{label}, bytes {what}")
        rival = [row for row in rows if row["context"] == context and not _is_ours(row)]
        x, y = [row["read_bytes_token"] for row in rival], [row["tokens_s"] for row in rival]
        if rival:
            axes.plot(x, y, "s", color=color, mec="k", label=f"{label}, vLLM, bytes of memory")
    axes.set(xscale="log", yscale="log", xlabel="bytes moved for a token", ylabel="tokens a second")


def _requests(axes: "Axes", rows: Sequence[Row]) -> None:
    """Over the requests that run at once."""
    contexts = sorted({row["context"] for row in rows})
    lines = dict.fromkeys((row["context"], row["drift"], row["drafts"]) for row in rows if _is_ours(row))
    markers = dict(zip(dict.fromkeys(drafts for _, _, drafts in lines), "o^vDs", strict=False))
    for context, drift, drafts in lines:
        own = [row for row in rows if _is_ours(row)]
        own = [row for row in own if (row["context"], row["drift"], row["drafts"]) == (context, drift, drafts)]
        own = sorted(own, key=lambda row: row["requests"])
        color, label = f"C{contexts.index(context)}", f"{context // 1024}K, {drafts}, {drift}"
        x, y = [row["requests"] for row in own], [row["tokens_s"] for row in own]
        axes.plot(x, y, STYLES[drift], marker=markers.get(drafts, "o"), color=color, label=label)
    for row in rows:
        if not _is_ours(row):
            label = f"{row['context'] // 1024}K, {row['side']}"
            color = f"C{contexts.index(row['context'])}"
            axes.plot([row["requests"]], [row["tokens_s"]], "X", color=color, mec="k", ms=9, label=label)
    axes.set(xlabel="requests", ylabel="tokens a second", ylim=(0, None))
