"""A picture for each question. Owns: what is drawn on which axis. Needs matplotlib, which nothing else here does."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(question: str, rows: Sequence[Row], path: Path) -> bool:
    """Write a PNG. False: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _DRAWN[question](axes, rows)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return True


def _loss(axes: "Axes", rows: Sequence[Row]) -> None:
    for cap in dict.fromkeys(row["cap"] for row in rows):
        own = [row for row in rows if row["cap"] == cap]
        values = [row["above_dense"] for row in own]
        errors = [row["error"] or 0.0 for row in own]
        label = "uncapped" if cap is None else f"cap {cap}"
        axes.errorbar([row["K"] for row in own], values, yerr=errors, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="K, blocks for each KV head", ylabel="loss above dense, nats a token")
    axes.legend()


def _agreement(axes: "Axes", rows: Sequence[Row]) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for row in rows:
        style = "-" if row["text"] == "own" else ":"
        color = f"C{policies.index(row['policy'])}"
        axes.plot(row["by_layer"], style, color=color, label=f"{row['policy']}, {row['text']} text")
    axes.set(xlabel="layer", ylabel="agreement with what the next step wants")
    axes.legend(fontsize="small", ncols=2)


def _speed(axes: "Axes", rows: Sequence[Row]) -> None:
    for text, marker in (("own", "o"), ("given", "x")):
        own = [row for row in rows if row["text"] == text and row["policy"] != "perfect"]
        axes.scatter([row["tokens_per_step"] for row in own], [row["agreement"] for row in own], marker=marker)
        for row in own:
            place = (row["tokens_per_step"], row["agreement"])
            axes.annotate(f"{row['policy']}, {text}", place, (4, 4), textcoords="offset points", fontsize="small")
    axes.set(xlabel="tokens a step", ylabel="agreement with what the next step wants")


def _traffic(axes: "Axes", rows: Sequence[Row]) -> None:
    left = [0.0] * len(rows)
    names = [row["policy"] for row in rows]
    for part in ("fetched", "cut"):
        values = [row[part] for row in rows]
        axes.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.plot([row["surprises"] for row in rows], names, "kd", label="surprises")
    axes.set(xlabel="blocks of a KV head and step")
    axes.invert_yaxis()
    axes.legend()


def _scores(axes: "Axes", rows: Sequence[Row]) -> None:
    for row in rows:
        label = f"{row['policy']}: {row['score']:.2f} of {row['trials']}"
        axes.plot(row["depths"], row["by_depth"], marker="o", alpha=0.8, label=label)
    axes.set(xlabel="depth in the text", ylabel="score", ylim=(-0.05, 1.05))
    axes.legend(fontsize="small")


_DRAWN = {
    "loss": _loss,
    "agreement": _agreement,
    "speed": _speed,
    "traffic": _traffic,
    "needles": _scores,
    "copy": _scores,
}
