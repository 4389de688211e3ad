"""Names of units and of large numbers, and words that are neither."""

from __future__ import annotations

SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}

_NAMES = """
cm centimeter centimetre
mm millimeter millimetre
km kilometer kilometre
m meter metre
kg kilogram
g gram
l liter litre L
in inch inches
ft foot feet
yd yard
mi mile
lb lbs
oz ounce
h hour hr hrs
min minute mins
s second sec secs
dollar USD
euro EUR
pound GBP
degree deg
/ per
^2 square sq
^3 cubic
"""  # a unit, then its other names
_SHORT = """
cm mm km dm nm kg mg ml mL in ft yd mi lb lbs oz hr hrs min mins sec secs ms mph kph Hz kHz kW kJ
kPa Pa USD EUR GBP rad deg sq day per cup ton men inch
"""  # units of two and three letters
_OTHERS = """
and or to not more less fewer than minus plus times over mod modulo dozen half halves third thirds
quarter quarters fifths tenths squared cubed if for when where except but from into until divided
choose factorial with remainder power base sqrt score pairs pair above below
"""  # words after a number that change what it says

_UNIT_OF = {name: line.split()[0] for line in _NAMES.strip().splitlines() for name in line.split()}
_SHORT_UNITS = frozenset(_SHORT.split())
_NO_UNITS = frozenset(_OTHERS.split())


def unit(word: str, certain: bool, attached: bool) -> str | None:
    """Returns the canonical name of the unit that a word after a number is, or None.

    certain: the word is typeset as a text, so that it is no product of variables. attached: it
    follows a digit at once.
    """
    if word.lower() in _NO_UNITS or not (
        certain or word in _SHORT_UNITS or (len(word) > 3 and not attached)
    ):
        return None
    singular = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return _UNIT_OF.get(word) or _UNIT_OF.get(singular.lower(), singular)
