"""What pages say in plain text, set for a browser: powers and indices of formulas, numbers of tables, pictures.

Formulas are written as one types them, `e^{λ(ε−L)}`, `w_P`: they can be read in a terminal, where `sordino explain`
shows the same pages, and need no script that sets them.
"""

import re

__all__ = ["break_names", "link_pictures", "set_formulas", "set_numbers"]

_TAG = re.compile(r"(<[^>]+>)")
_LITERAL = ("code", "pre", "script", "style", "svg")
_LETTER = r"[A-Za-zΑ-Ωα-ωℓℝℤ]"
# What may stand behind ^ or _ without braces: a letter with its marks, a number, a star, infinity.
_SHORT = rf"[−-]?(?:{_LETTER}[\u0300-\u036f′₀-₉]*|\d+|[*∞½⅓⅔¼¾])"
_INDEXED = re.compile(
    rf"(?:(?<![\w_.])(?:{_LETTER}[\u0300-\u036f′]*|max|min|sup|inf|log)|[)\]|∫Σ‖])_(?={{|{_SHORT}(?![a-z0-9_]))"
)
_RAISED = re.compile(rf"\^(?={{|\(|{_SHORT})")


def _argument(text: str, start: int) -> tuple[str, int] | None:
    """What stands at `start`, without its braces or parentheses, and where it ends."""
    opening = text[start]
    if opening not in "{(":
        found = re.compile(_SHORT).match(text, start)
        return (found[0], found.end()) if found else None
    closing, depth = {"{": "}", "(": ")"}[opening], 0
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if not depth:
            return text[start + 1 : position], position + 1
    return None


def _set(text: str) -> str:
    for sign, mark in ((_RAISED, "sup"), (_INDEXED, "sub")):
        done, position = [], 0
        while found := sign.search(text, position):
            argument = _argument(text, found.end())
            if argument is None:
                done.append(text[position : found.end()])
                position = found.end()
                continue
            inner, end = argument
            done += [text[position : found.end() - 1], f"<{mark}>{_set(inner)}</{mark}>"]
            position = end
        text = "".join([*done, text[position:]])
    return text


def set_formulas(html: str) -> str:
    """Powers and indices outside of code as such.

    Example:
        >>> set_formulas("<p>E_P[e^{sL}] ≤ e^ε₁, <code>a_b^2</code>, max_grad_norm</p>")
        '<p>E<sub>P</sub>[e<sup>sL</sup>] ≤ e<sup>ε₁</sup>, <code>a_b^2</code>, max_grad_norm</p>'
    """
    literal, parts = 0, []
    for part in _TAG.split(html):
        if not part.startswith("<"):
            parts.append(part if literal else _set(part))
            continue
        name = re.match(r"</?(\w*)", part)
        if name and name[1] in _LITERAL and not part.endswith("/>"):
            literal += -1 if part.startswith("</") else 1
        parts.append(part)
    return "".join(parts)


_CELL = re.compile(r"<td([^>]*)>((?:(?!</td>).)*)</td>", flags=re.DOTALL)


def set_numbers(html: str) -> str:
    """Cells with a number and little else, such as 84.9 ± 0.1 (3 seeds), on one line.

    Example:
        >>> set_numbers("<td>84.9 ± 0.1</td><td>words of a cell</td>")
        '<td class="number">84.9 ± 0.1</td><td>words of a cell</td>'
    """

    def cell(found: re.Match[str]) -> str:
        text = _TAG.sub("", found[2])
        is_number = len(text) <= 24 and re.match(r"[^A-Za-z]*\d", text)
        return f'<td{found[1]} class="number">{found[2]}</td>' if is_number and "class=" not in found[1] else found[0]

    return _CELL.sub(cell, html)


_PICTURE = re.compile(r'(<a\b[^>]*>\s*)?(<img\b[^>]*\bsrc="([^"]+)"[^>]*>)')


def link_pictures(html: str) -> str:
    """A picture leads to itself at its full size: one of several panels is small on a phone.

    Example:
        >>> link_pictures('<p><img alt="a" src="a.png" /></p>')
        '<p><a href="a.png"><img alt="a" src="a.png" /></a></p>'
    """
    return _PICTURE.sub(
        lambda found: found[0] if found[1] else f'<a href="{found[3]}">{found[2]}</a>',
        html,
    )


_NAME = re.compile(r"(?<=[a-z0-9])([._])(?=[a-z])")


def break_names(html: str) -> str:
    """Long names in cells may break behind a dot or an underscore, where a phone has no room for them.

    Example:
        >>> break_names("<td><code>sordino.integrations.accelerate</code></td><td><code>a.b</code></td>")
        '<td><code>sordino.<wbr>integrations.<wbr>accelerate</code></td><td><code>a.b</code></td>'
    """

    def name(found: re.Match[str]) -> str:
        return _NAME.sub(r"\1<wbr>", found[0]) if len(found[1]) > 16 else found[0]

    return _CELL.sub(lambda cell: re.sub(r"<code>([^<]*)</code>", name, cell[0]), html)
