"""Draw the pictures of fsdp2.md: python docs/explanation/draw.py [FOLDER]

The background is transparent and the text grey, so that they read on light and on dark pages.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

GREY = "#808080"
RANKS = ["#3f87d9", "#e0813a", "#3fa66b", "#b065c9"]
COMPUTE, GATHER, REDUCE = "#3f87d9", "#3fa66b", "#e0813a"
LAYERS = 4
plt.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "fsdp2",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
}


def main(folder: Path) -> None:
    drawings = {"shards": shards, "step": step, "memory": memory, "hsdp": hsdp}
    sizes = {"shards": (8, 3.1), "step": (8, 3.2), "memory": (8, 3.4), "hsdp": (8, 3.0)}
    for name, draw in drawings.items():
        figure, ax = plt.subplots(figsize=sizes[name], layout="constrained")
        draw(ax)
        figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def box(ax: Axes, x: float, y: float, w: float, h: float, colour: str, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=0.8))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", color="white", fontsize=9)


def arrow(ax: Axes, x: float, to: float, y: float, text: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "color": GREY}
    ax.add_patch(FancyArrowPatch((x, y), (to, y), **style))
    ax.text((x + to) / 2, y + 0.25, text, ha="center", fontsize=9)


def bare(ax: Axes, right: float, top: float, bottom: float = 0.0) -> None:
    ax.set(xlim=(0, right), ylim=(bottom, top))
    ax.axis("off")


def shards(ax: Axes) -> None:
    """One matrix over a step: sharded, gathered, its gradient reduced and sharded."""
    bare(ax, 16, 6.2)
    for rank, colour in enumerate(RANKS):
        y = 4 - 1.1 * rank
        ax.text(0.0, y + 0.45, f"rank {rank}", fontsize=9, va="center")
        box(ax, 1.5, y, 1.6, 0.9, colour, f"rows {rank}")
        for part, other in enumerate(RANKS):
            box(ax, 5.6 + 0.55 * part, y, 0.55, 0.9, other)
            box(ax, 9.6 + 0.55 * part, y, 0.55, 0.9, GREY)
        box(ax, 13.9, y, 1.6, 0.9, colour, f"grad {rank}")
    for x, text in ((2.3, "between uses"), (6.7, "while it computes"), (10.7, "its gradient")):
        ax.text(x, 5.3, text, ha="center")
    ax.text(14.7, 5.3, "for the optimizer", ha="center")
    arrow(ax, 3.3, 5.4, 2.25, "all-gather")
    arrow(ax, 8.0, 9.4, 2.25, "backward")
    arrow(ax, 12.0, 13.7, 2.25, "reduce-\nscatter")


def step(ax: Axes) -> None:
    """Two lanes over time: what computes, and what is sent meanwhile."""
    bare(ax, 33, 5.4, -0.6)
    for y, text in ((3.2, "computing"), (1.4, "sending")):
        ax.text(0, y + 0.45, text, va="center")
    at = 5.0
    for layer in range(LAYERS):
        begin = at + 1.7 * layer
        box(ax, begin, 3.2, 1.6, 0.9, COMPUTE, f"F{layer}")
        box(ax, begin - 1.7, 1.9, 1.3, 0.6, GATHER, f"{layer}")
    at += 1.7 * LAYERS
    box(ax, at, 3.2, 1.2, 0.9, COMPUTE, "loss")
    box(ax, at - 0.2, 1.9, 1.3, 0.6, GATHER, f"{LAYERS - 1}")
    at += 1.3
    for place, layer in enumerate(reversed(range(LAYERS))):
        begin = at + 3.4 * place
        box(ax, begin, 3.2, 3.3, 0.9, COMPUTE, f"B{layer}")
        if layer:
            box(ax, begin + 0.2, 1.9, 1.3, 0.6, GATHER, f"{layer - 1}")
        box(ax, begin + 3.4, 1.2, 1.6, 0.6, REDUCE, f"{layer}")
    at += 3.4 * LAYERS
    box(ax, at + 1.8, 3.2, 2.6, 0.9, RANKS[3], "AdamW")
    ax.text(8.4, 4.5, "forward", ha="center")
    ax.text(19.9, 4.5, "backward", ha="center")
    for x, colour, text in ((5, GATHER, "all-gather"), (12, REDUCE, "reduce-scatter")):
        ax.add_patch(Rectangle((x, -0.3), 0.8, 0.5, facecolor=colour))
        ax.text(x + 1.1, -0.05, f"{text} of layer n", va="center", fontsize=9)


def memory(ax: Axes) -> None:
    """What a rank holds over a step, with and without recomputation (one unit: a layer's shard)."""
    always, gathered, kept, inputs = 3.0 * LAYERS, 4.0, 6.0, 0.8
    for full, style in ((False, "-"), (True, "--")):
        of_layer = inputs if full else kept
        xs, ys = [0.0], [always]
        for layer in range(LAYERS):  # forward: activations pile up
            xs += [layer, layer + 0.9]
            ys += [always + gathered + layer * of_layer, always + gathered + (layer + 1) * of_layer]
        for place in range(LAYERS):  # backward: they go, gradients of the shard come
            left = LAYERS - 1 - place
            begin, again = LAYERS + 1.6 * place, kept if full else 0.0
            base = always + 2 * gathered + place
            xs += [begin, begin + 0.4, begin + 1.5]
            ys += [base + (left + 1) * of_layer, base + (left + 1) * of_layer + again]
            ys += [base + 1 + left * of_layer]
        end = LAYERS + 1.6 * LAYERS
        xs += [end, end + 1.2, end + 1.2, end + 1.6]
        ys += [always + LAYERS, always + LAYERS, always, always]
        name = "recomputed" if full else "all activations kept"
        ax.plot(xs, ys, style, color=RANKS[1] if full else RANKS[0], linewidth=2, label=name)
    ax.fill_between([0, end + 1.6], 0, always, color=GREY, alpha=0.25, linewidth=0)
    ax.text(end / 2, always / 2, "shards of parameters and optimizer state", ha="center")
    for x, text in ((LAYERS / 2, "forward"), (LAYERS + 3.2, "backward"), (end + 0.7, "AdamW")):
        ax.text(x, 50, text, ha="center")
    for x in (LAYERS - 0.05, end):
        ax.axvline(x, color=GREY, linewidth=0.6)
    ax.set(ylim=(0, 54), xlim=(0, end + 1.6), xticks=[], yticks=[])
    ax.set(xlabel="time", ylabel="memory of a rank")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper right", bbox_to_anchor=(0.88, 0.92), labelcolor=GREY)


def hsdp(ax: Axes) -> None:
    """Two nodes of four ranks: shards inside of a node, replicas across."""
    bare(ax, 16, 6.0)
    for node, y in enumerate((3.5, 0.6)):
        ax.add_patch(Rectangle((2.6, y - 0.3), 13, 1.9, fill=False, edgecolor=GREY))
        ax.text(0.1, y + 0.65, f"node {node}\n(replica {node})", va="center")
        for rank, colour in enumerate(RANKS):
            box(ax, 3.0 + 3.2 * rank, y, 2.4, 1.3, colour, f"rank {4 * node + rank}\nshard {rank}")
    for rank in range(4):
        style = {"arrowstyle": "<|-|>", "mutation_scale": 12, "color": GREY}
        ax.add_patch(FancyArrowPatch((4.2 + 3.2 * rank, 1.95), (4.2 + 3.2 * rank, 3.45), **style))
    ax.text(9.0, 2.7, "all-reduce of\ngradient shards", ha="center", va="center", fontsize=9)
    ax.text(9.0, 5.35, "all-gather and reduce-scatter stay inside of a node", ha="center")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
