"""The README's table of plans: every model on a few slices, as `generate` would run it with its card's settings.

python benchmarks/plan_cards.py                          # prints it; a minute or two a row that was not planned before
python benchmarks/plan_cards.py --write                  # and puts it into README.md
python benchmarks/plan_cards.py wan2.2-ti2v-5b --write   # rows of this model alone; the others stay as they are
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
HEAD = (
    "| model | slice | mesh | layers | fits | GB of each device | seconds a step | seconds a clip |",
    "|---|---|---|---|---|---|---|---|",
)

Rows = dict[tuple[str, str], str]  # by card and slice


def planned(cards: list[str], slices: list[str]) -> Rows:
    found = {}
    for card in cards:
        wanted = Wanted(model=card, fields={}, topologies=tuple(slices), search=False)
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
            found[card, made["topology"]] = f"| {' | '.join(cells)} |"
            print(found[card, made["topology"]], flush=True)
    return found


def written(table: str) -> Rows:
    """The rows of a table, of cards that there are."""
    cells = [(line, [cell.strip() for cell in line.split("|")]) for line in table.splitlines()[len(HEAD) :]]
    rows = {(row[1].partition(",")[0], row[2]): line for line, row in cells}
    return {key: line for key, line in rows.items() if key[0] in CARDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="*", metavar="MODEL", help="(all)")
    parser.add_argument("--slices", nargs="+", default=list(SLICES), help=f"({' '.join(SLICES)})")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = planned(arguments.cards or list(CARDS), arguments.slices)
    if arguments.write:
        before, _, rest = README.read_text().partition(MARKS[0])
        table, _, after = rest.partition(MARKS[1])
        rows = written(table) | rows
        order = sorted(rows, key=lambda row: (list(CARDS).index(row[0]), row[1]))
        table = "".join(f"{line}\n" for line in (*HEAD, *(rows[row] for row in order)))
        README.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
