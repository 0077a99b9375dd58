"""How a report writes its numbers."""

from sordino.definitions import round_up

__all__ = ["percent_up", "power_of_ten", "scientific"]

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
        >>> percent_up(0.02719), percent_up(0.001), percent_up(1.0)
        ('2.8 %', '0.1 %', '100 %')
    """
    text = round_up(round(100 * value, 9), 1)
    return f"{text.removesuffix('.0')} %"
