"""How the operands of attention lie on the mesh in force, outside and inside."""

from typing import Literal, NamedTuple

from jax.sharding import PartitionSpec as P

from vidax.parallel.rules import RULES, fitting, in_force, partition, product

Split = Literal["tokens", "queries", "heads", "pixels"]


class Placement(NamedTuple):
    """outside: where queries and the result lie before and after; queries and keys (also of the values): where each
    device has what it attends with on its own. `words` says it to people.
    """

    outside: P
    queries: P
    keys: P
    words: str


def place(split: Split, batch: int, length: int, heads: int) -> Placement:
    """The placement of [B L N K] queries and their keys.

    tokens:  self-attention over tokens that are split. DeepSpeed-Ulysses (arXiv:2309.14509) where the heads divide by
             the devices: each gets all tokens of some heads. Else each keeps its queries and gathers keys and values.
    queries: the queries are split as in `tokens`, and every device has the keys and values of its heads.
    heads:   a tower's heads over all devices.
    pixels:  the queries over all devices, which have all keys.
    """
    sizes, shape = in_force(), (batch, length, heads, 1)
    if split == "heads":
        own = partition((None, None, ("tower", heads), None), shape, sizes)
        return Placement(own, own, own, f"heads over {product(own[2], sizes)} devices")
    if split == "pixels":
        own = partition((None, "space", None, None), shape, sizes)
        return Placement(own, own, P(None, None, None, None), f"queries over {product(own[1], sizes)} devices")
    outside = partition(("batch", "tokens", "heads", None), shape, sizes)
    gathered = P(outside[0], None, outside[2], None)
    seq, tensor = sizes["seq"], sizes["tensor"]
    words = [f"heads over tensor={tensor}"] if outside[2] else []
    if tensor > 1 and not outside[2]:
        words.append(f"repeated on tensor={tensor}: it does not divide {heads} heads")
    if split == "queries" or seq == 1:
        return Placement(outside, outside, gathered, ", ".join(words))
    if heads % (seq * tensor) == 0:
        within = P(outside[0], None, fitting(RULES["attention_heads"], heads, sizes), None)
        return Placement(outside, within, within, ", ".join([*words, f"Ulysses over seq={seq}"]))
    words.append(f"keys gathered over seq={seq}: {seq * tensor} does not divide {heads} heads")
    return Placement(outside, outside, gathered, ", ".join(words))
