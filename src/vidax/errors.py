"""The one exception for what a user can put right, and how it names what was meant."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A sentence for the user: the value, the rule it breaks and the way out. The command line prints it and exits with
    2.
    """


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The words `did you mean 'NEAREST'? `, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""
