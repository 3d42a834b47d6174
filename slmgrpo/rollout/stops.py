"""Ends a completion behind one of several texts, wherever token borders fall."""

from __future__ import annotations

from typing import Any


class StopTexts:
    """Tells after each token whether a stop text has just been completed.

    Only a token that holds some stop text's last character (or a part of a character) can complete one, so the text is
    looked at after those alone, and only as far back as the longest stop text can reach.
    """

    def __init__(self, texts: list[str], tokenizer: Any) -> None:
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        ends = {text[-1] for text in texts} | {"\ufffd"}
        decoded = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=False)
        self._candidates = frozenset(i for i, text in enumerate(decoded) if ends.intersection(text))
        # A token is at least a byte, or nothing (an added token that decodes to ""): eight to spare.
        self._reach = max(len(text.encode()) for text in texts) + 8

    def ended(self, token_ids: list[int]) -> bool:
        """Whether the last of these tokens completes a stop text."""
        if token_ids[-1] not in self._candidates:
            return False
        text = self._tokenizer.decode(token_ids[-self._reach :], skip_special_tokens=False)
        return any(stop in text for stop in self._texts)
