"""Formulas, `$...$` in a line and `$$...$$` in a paragraph, as MathML, which browsers draw without a script."""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor


class _Formula(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, display: str) -> None:
        super().__init__(pattern, md)
        self._display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:
        made: Any = convert(m[1].strip(), display=self._display)
        return self.md.htmlStash.store(made), m.start(0), m.end(0)


class Formulas(Extension):
    """A dollar sign is money if a space follows it, or if the next has a space before, or a digit after it."""

    def extendMarkdown(self, md: Markdown) -> None:
        block = _Formula(r"(?s)\$\$(.+?)\$\$", md, "block")
        inline = _Formula(r"(?<![\\$])\$(?![\s$])([^$\n]+?)(?<!\s)\$(?!\d)", md, "inline")
        md.inlinePatterns.register(block, "formula-block", 186)  # after code spans, before everything else
        md.inlinePatterns.register(inline, "formula", 185)
