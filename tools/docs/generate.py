"""What of docs/ is made from something else and kept in the repository, so that it can be read there.

    python -m tools.docs.generate      # writes it anew; tests/docs/test_site.py demands that it is current

The configuration reference comes from the dataclasses, drawings from drawings.py, plots from benchmarks/results. The
recorded timelines (docs/img/timeline_*.png) are measurements: benchmarks/timelines makes them.
"""

from __future__ import annotations

import pathlib

from benchmarks.plots import figures
from tools.docs import configuration, drawings

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def generated() -> dict[str, str]:
    """The text of every generated file, by its path below docs/."""
    images = {**drawings.all_drawings(), **{f"{name}.svg": plot for name, plot in figures.kept_plots().items()}}
    return {"configuration.md": configuration.page(), **{f"img/{name}": image for name, image in images.items()}}


def main() -> None:
    for name, text in generated().items():
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name}")


if __name__ == "__main__":
    main()
