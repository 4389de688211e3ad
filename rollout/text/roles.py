"""Tells roles of messages that chat templates do not name."""

from __future__ import annotations

import difflib

from rollout.text.interface import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CLOSE = 0.6
"""Similarity from which a role counts as a misspelt one: `usr`, `User` and `assitant`, not
`human`."""


def misspelt(role: str) -> str | None:
    """Returns the role that this one was meant to be, or None if it is no misspelt role."""
    close = difflib.get_close_matches(role.strip().lower(), ROLES, n=1, cutoff=_CLOSE)
    return close[0] if close and role not in ROLES else None


def unusual_role(role: str, tokenizer: Tokenizer) -> str | None:
    """Returns what is wrong with a role that neither ROLES nor the chat template of the tokenizer
    names, or None."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
        return None
    nearest = misspelt(role)
    hint = f"nearest: {nearest}" if nearest else f"usual: {', '.join(ROLES)}"
    return f"the chat template names no role {role!r} ({hint})"
