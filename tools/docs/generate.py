"""Makes the generated parts of docs/ and the README, which the repository keeps so that they can be read there.

    python -m tools.docs.generate      # writes it anew; tests/docs/test_site.py demands that it is current

The configuration reference comes from the dataclasses, drawings from drawings.py, plots and figures from
benchmarks/results, and what works on a GPU from tables/places.py. The recorded timelines
(docs/img/timeline_*.png) are measurements: benchmarks.timelines makes them.
"""

from __future__ import annotations

from benchmarks.plots import figures as plots
from tools.docs import configuration, drawings, figure_tables, figures, headlines, places, quality, queue
from tools.docs.figures import ROOT


def generated() -> dict[str, str]:
    """The text of every generated file, and of every page with generated blocks, by its path in the repository."""
    images = {**drawings.all_drawings(), **{f"{name}.svg": plot for name, plot in plots.kept_plots().items()}}
    return {
        "docs/configuration.md": configuration.page(),
        **{f"docs/img/{name}": image for name, image in images.items()},
        **_pages_with_figures(),
    }


def _pages_with_figures() -> dict[str, str]:
    results = figures.load()
    blocks = {
        "README.md": {
            "why": figures.points(headlines.WHY, results),
            "figures": "\n".join(figures.table(headlines.HEADLINES, results)),
        },
        "docs/gpu.md": {"places": places.block()},
        "docs/schedules.md": {"quality": quality.block(results.values)},
        "docs/topology.md": {"queue": queue.block(results.values)},
        "docs/benchmarks.md": {
            "figures": figures.themed(figure_tables.THEMES, results),
            "losses": figures.points(headlines.LOSSES, results),
        },
    }
    return {page: figures.filled((ROOT / page).read_text(encoding="utf-8"), of) for page, of in blocks.items()}


def main() -> None:
    for name, text in generated().items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
