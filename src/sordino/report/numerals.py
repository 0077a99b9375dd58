"""How a report writes its numbers."""

from sordino.definitions import round_up

__all__ = ["epsilon_words", "percent_up", "power_of_ten", "scientific", "shown"]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scientific(value: float) -> tuple[str, str]:
    """A small probability as the part before the power of ten, and the exponent (empty when there is none).

    Example:
        >>> scientific(1e-5), scientific(3.2e-6), scientific(0.25)
        (('10', '-5'), ('3.2 × 10', '-6'), ('0.25', ''))
    """
    if value >= 0.01 or value == 0:
        return f"{value:g}", ""
    mantissa, exponent = f"{value:.2e}".split("e")
    head = f"{float(mantissa):g}"
    return ("10" if head == "1" else f"{head} × 10"), str(int(exponent))


def power_of_ten(value: float) -> str:
    """The same as one text.

    Example:
        >>> power_of_ten(1e-5), power_of_ten(3.2e-6)
        ('10⁻⁵', '3.2 × 10⁻⁶')
    """
    head, exponent = scientific(value)
    return head + exponent.translate(_SUPERSCRIPTS)


def percent_up(value: float) -> str:
    """A share in percent, never rounded below itself: what an attacker may reach must not be understated.

    Example:
        >>> percent_up(0.02719), percent_up(0.00238), percent_up(0.001), percent_up(1.0)
        ('2.8 %', '0.24 %', '0.1 %', '100 %')
    """
    share = round(100 * value, 9)
    text = round_up(share, 1 if share >= 1 else 2)
    return f"{text.rstrip('0').removesuffix('.')} %"


def shown(value: object) -> str:
    """A value from a run folder as text: yes and no, whole numbers with separators, few digits.

    Example:
        >>> shown(True), shown(30162), shown(0.0625), shown([1, 2.5])
        ('yes', '30,162', '0.0625', '1, 2.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)


def epsilon_words(value: float) -> str:
    """An ε for people, rounded up; four digits are enough for large ones.

    Example:
        >>> epsilon_words(0.99999), epsilon_words(1189.7767), epsilon_words(0.00012)
        ('1.00', '1,190', '0.00012')
    """
    if value == float("inf"):
        return "∞"
    if value >= 1000:
        return f"{int(-(-value // 1)):,}"
    if 0 < value < 0.01:
        return round_up(value, 5)
    return round_up(value)
