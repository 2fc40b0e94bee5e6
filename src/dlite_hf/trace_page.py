# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""A [`Trace`] as one HTML page that loads nothing."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .trace import TokenProbability, Trace, TracedToken


_MARKS = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
_PARTS_TOGGLE = '<label><input type="checkbox" data-hides="parts-hidden" checked> parts of characters</label>'


def render_page(trace: "Trace") -> str:
    """The page: the text of the generated tokens stands in it as it is, a character an element's text."""
    statistics = trace.statistics
    num_accepted = sum(statistics.accepted_per_position)
    longest = max(map(len, trace.drafts), default=0)
    lengths = Counter(token.round for token in trace.tokens if token.round)
    per_length = Counter(lengths.values())
    template = Template(resources.files(__package__).joinpath("templates", "trace.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{trace.target} with {trace.drafter}"),
        target=escape(trace.target),
        drafter=escape(trace.drafter),
        tau="–" if math.isnan(statistics.tau) else f"{statistics.tau:.2f}",
        num_tokens=len(trace.tokens),
        num_rounds=statistics.num_rounds,
        num_drafted=statistics.num_drafted_tokens,
        num_accepted=num_accepted,
        accepted=_percent(num_accepted / statistics.num_drafted_tokens) if statistics.num_drafted_tokens else "–",
        accepted_bars=_bars((str(j), share, _percent(share)) for j, share in enumerate(trace.accepted_shares, 1)),
        round_bars=_bars(
            (str(n), per_length[n] / max(per_length.values(), default=1), str(per_length[n]))
            for n in range(1, longest + 2)
        ),
        ramp="".join(f'<i style="--a:{_strength(j, longest)}">{j}</i>' for j in range(1, longest + 1)),
        settings=_definitions(trace.settings),
        versions=_definitions(trace.versions),
        prompt=""
        if trace.prompt is None
        else f'<details class="card"><summary>Prompt</summary><div class="text">{_text(trace.prompt)}</div></details>',
        parts_toggle="" if all(token.text for token in trace.tokens) else _PARTS_TOGGLE,
        tokens=_tokens(trace, longest),
        # In a script element only `<` could end it.
        data=json.dumps(_data(trace), ensure_ascii=False).replace("<", "\\u003c"),
    )


def visible(text: str) -> str:
    """A token's text in one line, with a mark for every space, line break and tab; others as escapes."""
    return "".join(
        _MARKS.get(character) or (character if character.isprintable() else ascii(character)[1:-1])
        for character in text
    )


def _text(text: str) -> str:
    """Escaped so that a browser reads the same characters; it cannot be given a null, so that becomes its picture."""
    return escape(text).replace("\r", "&#13;").replace("\0", "␀")


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{100 * share:.0f}%" if share in (0, 1) else f"{100 * share:.1f}%"


def _strength(position: int, longest: int) -> float:
    return round(position / longest, 2)


def _bars(bars: Iterable[tuple[str, float, str]]) -> str:
    """Columns of `(label, height between 0 and 1, value)`."""
    return "".join(
        f'<li><b>{escape(value)}</b><i style="--h:{height:.3f}"></i><span>{label}</span></li>'
        for label, height, value in bars
    )


def _definitions(values: dict[str, Any]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in values.items()
    )


def _tokens(trace: "Trace", longest: int) -> str:
    parts: list[str] = []
    last = None
    for i, token in enumerate(trace.tokens):
        if token.round != last:
            parts.append(f'{"</span>" if i else ""}<span class="round" data-round="{token.round}">')
            last = token.round
        parts.append(_token(i, token, longest))
    return "".join([*parts, "</span>"])


def _token(index: int, token: "TracedToken", longest: int) -> str:
    """What is shown beside the text is drawn from attributes by the style, so that it is no part of the text."""
    partial = "" if token.text else " partial"
    attributes = f'class="token {token.origin}{partial}" data-i="{index}" tabindex="{-1 if index else 0}"'
    marks = "".join(_MARKS[character] for character in token.text if character in "\n\r\t")
    if marks:
        attributes += f' data-marks="{marks}"'
    if token.position:
        attributes += f' data-position="{token.position}" style="--a:{_strength(token.position, longest)}"'
    proposed = ""
    if token.origin == "corrected" and token.proposed is not None:
        proposed = f'<s data-text="{escape(visible(token.proposed.text))}"></s>'
    return f'<span role="button" {attributes}>{proposed}{_text(token.text)}</span>'


def _data(trace: "Trace") -> dict[str, Any]:
    """What the page's script shows of a token; probabilities as text."""

    def top(candidates: list["TokenProbability"]) -> list[list[Any]]:
        return [[visible(each.text), round(each.probability, 4), _percent(each.probability)] for each in candidates]

    return {
        "tokens": [
            {
                "name": visible(token.name),
                "id": token.token_id,
                "partial": not token.text,
                "round": token.round,
                "origin": token.origin,
                "position": token.position,
                "proposed": token.proposed and visible(token.proposed.text),
                "target": _percent(token.target_probability),
                "drafter": None if token.drafter_probability is None else _percent(token.drafter_probability),
                "targetTop": top(token.target_top),
                "drafterTop": top(token.drafter_top),
            }
            for token in trace.tokens
        ],
        "rounds": [
            {
                "draft": [visible(each.text) for each in draft],
                "accepted": sum(token.round == i and token.position > 0 for token in trace.tokens),
                "emitted": sum(token.round == i for token in trace.tokens),
            }
            for i, draft in enumerate(trace.drafts, start=1)
        ],
    }
