"""What a completion answers: its last integer, its last number, what stands in its last tag. Pure text, linear
time.

Digits are ASCII digits only; one beside a digit of another script is part of no number. A minus (``-`` or U+2212) is
a sign when it touches the number and nothing wordlike or closing stands before it: "7-4" ends in 4, "= -4" in -4.
Commas that cut a number into exact thousands belong to it: "1,234" is 1234, but "1,23" is 1 and then 23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_RUN = re.compile(
    r"(?P<sign>(?<![\w)\]}\-−])[-−])?"
    r"(?:(?<!\d)(?<!\d\.)(?P<whole>[0-9]++(?:,[0-9]++)*+)(?P<decimals>\.[0-9]++)?|(?<![\d.])(?P<fraction>\.[0-9]++))"
    r"(?P<exponent>[eE][+\-−]?[0-9]++)?"
)
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_INTEGER = re.compile(r"[-+−]?[0-9]+|[-+−]?[0-9]{1,3}(?:,[0-9]{3})+")


def numbers_in(text: str) -> Iterator[str]:
    """Every number of ``text`` in order, as Python writes it: no separators, ``-`` for a minus."""
    for match in _RUN.finditer(text):
        sign = "-" if match["sign"] else ""
        tail = (match["decimals"] or "") + (match["exponent"] or "").replace("−", "-")
        if match["fraction"]:
            pieces = [f"{sign}0{match['fraction']}{tail}"]
        elif _THOUSANDS.fullmatch(match["whole"]):
            pieces = [f"{sign}{match['whole'].replace(',', '')}{tail}"]
        else:
            pieces = match["whole"].split(",")
            pieces[0] = sign + pieces[0]
            pieces[-1] += tail
        if text[match.end() : match.end() + 1].isdecimal():
            pieces.pop()
        yield from pieces


def last_integer(text: str) -> str | None:
    """The last integer of ``text`` in canonical form ("-7", "0"), or None; decimals and exponents make none."""
    found = None
    for number in numbers_in(text):
        if number.lstrip("-").isdigit():
            found = number
    return None if found is None else canonical_integer(found)


def last_number(text: str) -> str | None:
    """The last number of ``text``, as ``float`` reads it, or None."""
    found = None
    for number in numbers_in(text):
        found = number
    return found


def canonical_integer(text: str) -> str | None:
    """An integer's text without leading zeros, plus sign and separators; None when ``text`` is something else.

    Integers are compared as text, so their length is not limited.
    """
    stripped = text.strip()
    if not _INTEGER.fullmatch(stripped):
        return None
    digits = stripped.lstrip("-+−").replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if stripped[0] in "-−" and digits != "0" else digits


def last_tag(text: str, tag: str) -> str | None:
    """What stands in the last complete ``<tag>...</tag>``, stripped, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()
