"""The README's table of plans: every model on a few slices, as `generate` would run it with its card's settings.

python benchmarks/plan_cards.py            # prints it; about half a minute a row where nothing was planned before
python benchmarks/plan_cards.py --write    # and puts it into README.md
"""

import argparse
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

from vidax.models.registry import CARDS
from vidax.planner.command import Wanted, plans
from vidax.planner.show import gb, number

SLICES = ("v4-8", "v5e-8", "v6e-1")
README = Path(__file__).parents[1] / "README.md"
MARKS = "<!-- plans: benchmarks/plan_cards.py --write -->\n", "<!-- end of plans -->\n"


def lines() -> list[str]:
    found = [
        "| model | slice | mesh | layers | fits | GB of each device | seconds a step | seconds a clip |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for card in CARDS:
        wanted = Wanted(model=card, fields={}, topologies=SLICES, search=False)
        for made in plans(wanted, lambda sentence: print(sentence, file=sys.stderr)):
            mesh = re.sub(r"\b\w+=1\b,?", "", made["mesh"]).strip(",") or "one device"
            fits = "yes" if made["fits"] else "no"
            cells = (
                f"{card}, {made['size']}, {made['frames']} frames",
                made["topology"],
                mesh,
                made["residency"],
                fits,
                f"{gb(made['peak_device_gb'])} of {gb(made['limit_gb'])}",
                number(made["step_seconds"]),
                number(made["total_seconds"]),
            )
            found.append(f"| {' | '.join(cells)} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table = "\n".join(lines()) + "\n"
    print(table, end="")
    if arguments.write:
        before, _, rest = README.read_text().partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        README.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
