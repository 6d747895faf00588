"""Draws step time against bandwidth from the results of `benchmarks.step_time`.

python -m benchmarks.chart [--input benchmarks/results/step_time_bucket_view.json] [--output docs/images/step_time.png]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from benchmarks.report import RESULTS

MODELS = {"resnet18": "ResNet-18, batch 8", "lstm": "LSTM, 3 x 650", "neumf": "NeuMF", "gpt": "GPT, 0.28 million"}
LABELS = {
    "ddp_fp32": ("DDP, fp32", "0.15", "-"),
    "ddp_bf16": ("DDP, bf16 hook", "0.55", "-"),
    "powersgd_4": ("PowerSGD, rank 4", "tab:green", "-"),
    "top_k_0.001": ("Top-k, 0.1 %", "tab:orange", "-"),
    "hard_threshold_1": ("hard threshold, dense", "tab:blue", ":"),
    "hard_threshold_0.01": ("hard threshold, 1 %", "tab:blue", "--"),
    "hard_threshold_0.001": ("hard threshold, 0.1 %", "tab:blue", "-"),
    "drift_0.001": ("drift, 0.1 %", "tab:purple", "-"),
    "hard_threshold_0.0001": ("hard threshold, 0.01 %", "tab:cyan", "-"),
}
TICKS = [1, 1.5, 2, 3, 5, 10, 20, 50, 100]


def draw(content: dict[str, Any]) -> Figure:
    """Return axes for each model, with a line per method and a point per rate."""
    results = content["results"]
    models = list(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(1.5 + 5 * len(models), 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, model in zip(all_axes, models, strict=True):
        _lines(axes, [result for result in results if result["model"] == model])
        axes.set_title(MODELS.get(model, model), fontsize="medium")
    all_axes[0].set_ylabel("step time, relative to no exchange at all")
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    hardware = content["hardware"]
    source = f"{results[0]['hosts']} hosts, one core each ({hardware['processor']}), {content['date'][:10]}"
    figure.supxlabel(f"rate of each host's link\n{source}", fontsize="small")
    return figure


def _lines(axes: Axes, results: list[dict[str, Any]]) -> None:
    rates = [result["rate"] for result in results]
    highest = 1.0
    for method, (label, colour, style) in LABELS.items():
        ratios = [result["methods"].get(method, {}).get("ratio", float("nan")) for result in results]
        known = [ratio for ratio in ratios if ratio == ratio]
        if known:
            axes.plot(rates, ratios, color=colour, linestyle=style, marker="o", markersize=3.5, label=label)
            highest = max(highest, *known)
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_yscale("log")
    ticks = [tick for tick in TICKS if tick <= 1.4 * highest]
    axes.set_yticks(ticks, [f"{tick:g} x" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(rates)), [_rate_label(rate) for rate in rates])
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _rate_label(rate: str) -> str:
    return rate if rate == "unshaped" else f"{rate[:-4]} {rate[-4].upper()}bit/s"


def main() -> None:
    """Read the results and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, default=RESULTS / "step_time_bucket_view.json")
    parser.add_argument("--output", type=Path, default=Path("docs/images/step_time.png"))
    options = parser.parse_args()
    draw(json.loads(options.input.read_text())).savefig(options.output, dpi=130, facecolor="white")
    print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
