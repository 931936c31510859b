"""What MkDocs runs while it builds the site: generated tables, code that was run, formulas.

Formulas are written in LaTeX between dollars and become MathML here, which browsers draw by
themselves: the pages need no script and no network for them.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

from blocks import PageError, with_outputs
from tables import expanded

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# In formulas dy is one name, not d times y.
_NAME = re.compile(r"(?<![\\a-zA-Z])(d(?:x|y|a|b|W|out))(?![a-zA-Z])")
_LETTERS = re.compile(r'(?:<mi mathvariant="italic">\w</mi>)+')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Run the page's blocks, then fill in what is generated."""
    try:
        return expanded(with_outputs(markdown, page.file.src_uri))
    except (PageError, KeyError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML."""
    text = _INLINE.sub(lambda found: _mathml(found[1], "inline"), html)
    return _DISPLAY.sub(
        lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', text
    )


def _mathml(latex: str, display: str) -> str:
    named = _NAME.sub(r"\\mathit{\1}", html.unescape(latex).strip())

    def joined(found: re.Match[str]) -> str:
        return f'<mi class="name">{re.sub("<[^>]*>", "", found[0])}</mi>'

    return _LETTERS.sub(joined, convert(named, display=display))
