"""A component's config from its `config.json` and from what the shapes of its tensors say."""

from collections.abc import Mapping
from typing import Any

from vidax.errors import UserError

NOTHING: Mapping[str, Any] = {}


def merge(
    config: Mapping[str, Any],
    keys: Mapping[str, str],
    fixed: Mapping[str, tuple[Any, ...]],
    file: str,
    numbers: Mapping[str, Any],
    model: str,
) -> dict[str, Any]:
    """Fields of a config from a `config.json` and from the tensors, which must agree.

    keys: the file's to our fields. fixed: what the file must say where it says anything, the usual value first. file:
    what errors call it. numbers: fields that are known from the tensors. model: what needs what is fixed.
    """
    for key, wanted in fixed.items():
        if (value := config.get(key, wanted[0])) not in wanted:
            raise UserError(f"{file}: {key} is {value!r}; {model} needs {' or '.join(map(repr, wanted))}")
    values = dict(numbers)
    for key, field in keys.items():
        if (value := config.get(key)) is None:
            continue
        value = tuple(value) if isinstance(value, list) else value
        if values.setdefault(field, value) != value:
            raise UserError(
                f"{file}: {key} is {value}, but the tensors beside it have {values[field]}; take both from one model"
            )
    return values
