"""How replies announce, refuse and list options: the patterns behind `letters.py`, in many languages."""
# ruff: noqa: RUF001  (look-alike characters are what is mapped here)

from __future__ import annotations

import functools
import re

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
PLAIN = _WIDE | str.maketrans(
    {"。": ". ", "、": ",", "【": "(", "】": ")", "「": "(", "」": ")", "’": "'", "“": '"', "”": '"'}
)
NATIVE = str.maketrans({"أ": "A", "ب": "B", "ج": "C", "د": "D", "অ": "A", "ব": "B", "ড": "C", "ঢ": "D"})
"""Option letters of Arabic and Bengali."""
NATIVE_LETTER = re.compile(r"\W*[أبجدঅবডঢ](?!\w)")

MARKUP = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|boxed|fbox)\s*(?=\{)|\\[()\[\]]|[*$`{}\"]|(?<!\w)_+|_+(?!\w)|</?\w+>|~"
)

_ENGLISH = r"""(?<![a-z])(?:
    (?:final\s+|correct\s+|best\s+|right\s+)*(?:answer|choice|option|solution|response|selection)(?![a-z])
      (?:\s+(?:choice|option|letter|here|should|would|must|will|can\s+only|to\s[^.:\n]{0,60}?))*\s*
      (?:(?:is|are|be|was)(?![a-z])(?:\s*:)?|[:=]|->|→|[-–—](?=\s))
  | (?:i(?:'d|'ll|\s+would|\s+will)?\s+)(?:choose|chose|pick|select|go\s+with|opt\s+for|say)(?![a-z])\s*:?
  | (?:i\s+am|i'm)\s+going\s+with(?![a-z])\s*:?
  )"""
_HAN = r"""(?:答案|正解|解答|答え|回答|正确选项|正確選項|故选|故選|应选|應選|应该选|應該選|选择|選擇
    |所以选|所以選|因此选|因此選|我选|我選)
    (?:应该|應該|应|應|就|是|为|為|选项|選項|选|選|は|が|[:\s])*"""
_OTHERS = r"""(?<![^\W\d_])(?:antwort|lösung|réponse|reponse|respuesta|risposta|resposta|antwoord|svaret?|odpowiedź
    |ответ|відповідь|jawaban|jibu|cevap|yanıt|đáp\s+án|câu\s+trả\s+lời|정답|답변|답|الإجابة|الجواب|উত্তর|उत्तर|idahun|απάντηση)
    (?![^\W\d_]*[a-zäöü]\w)
    (?:\s*(?:ist|lautet|est|es|è|é|is|er|jest|la|die|richtige|correcta?|correcte|corretta|option|opción|opção
        |은|는|이|가|है|هي|هو))*
    \s*[:：=-]?"""
CUE = re.compile(f"{_ENGLISH}|{_HAN}|{_OTHERS}", re.IGNORECASE | re.VERBOSE)

NEGATED_BEFORE = re.compile(
    r"""(?:\bnot|n't|\bcannot|\bnever|\bneither|\bnor|\brul(?:e|es|ed|ing)\s+out|\beliminat\w*|\bexclud\w*|\breject\w*
    |\binstead\s+of|\brather\s+than|\bexcept|\bwrong|\bincorrect|\bfalse|\bunlike
    |不是|并非|不选|不選|排除|\bnicht|\bkein\w*|\bpas\b|\bno\s+es)
    \W*(?:(?:be|the|an?|option|options|choice|choices|answer|either|both|for|to|or|and|nor|(?-i:[A-Z]))(?![A-Za-z])\W*)*$
    """,
    re.VERBOSE | re.IGNORECASE,
)
NEGATED_AFTER = re.compile(
    r"""^\s*[)\]]?\s*(?:(?:or|and|nor)\s+[A-Z]\s+)?
    (?:(?:is|are|was|were|would\s+be|seems)\s+(?:both\s+|also\s+|clearly\s+|simply\s+|all\s+)?
        (?:not|wrong|incorrect|false|out)\b
     |[:=-]?\s*(?:wrong|incorrect|false|isn't|aren't|can't|cannot|doesn't|don't|ruled\s+out|eliminated)\b
     |(?:是)?(?:错|錯|不对|不對))""",
    re.VERBOSE | re.IGNORECASE,
)
TIES = re.compile(
    r"""^(?:[\s,;/&)(\]\[.|+-]
    |(?:and|or|und|oder|et|ou|y|o|but|also|even|then|maybe|possibly|perhaps|probably|either|both|as\s+well\s+as
       |could\s+be|might\s+be|option|choice|is|the|it|和|或|或者|以及|及)(?![a-z]))*$""",
    re.VERBOSE | re.IGNORECASE,
)
"""What stands between the members of a list or a hedge: `B, but C`; not between a label and its reasons."""

GOES_ON = frozenset({
    "because", "since", "as", "is", "was", "for", "which", "that", "and", "or", "but", "not", "so", "given", "due",
    "by", "with", "would", "will", "in", "hence",
})  # fmt: skip
"""Words that may follow the label A or I; before any other word they are an article and a pronoun."""
SENTENCE = re.compile(r"(?<=[^.])[.!?;](?=\s|$)")

_IS_RIGHT = r"""\s*\)?\s*(?:is|was|must\s+be|would\s+be|has\s+to\s+be)\s+
    (?:definitely\s+|clearly\s+|indeed\s+)?(?:the\s+)?(?:only\s+)?(?:correct|right|best|true|answer)(?![a-z])"""


@functools.lru_cache(maxsize=64)
def standing(labels: str) -> re.Pattern[str]:
    """A label that stands alone."""
    return re.compile(rf"(?<![A-Za-z0-9'_\\])([{labels}])(?![A-Za-z0-9_]|'[a-z])")


@functools.lru_cache(maxsize=64)
def called_right(labels: str) -> re.Pattern[str]:
    """C is correct, 只有选项B是对的."""
    return re.compile(
        rf"""(?:(?<![A-Za-z])(?:option|choice|answer)\s*)?\(?{standing(labels).pattern}{_IS_RIGHT}
        |(?:只有|选项|選項|答案){{1,3}}\s*([{labels}])\s*(?:选项|選項|项|項)?\s*(?:是|为|為)?\s*(?:对|對|正确|正確)""",
        re.VERBOSE,
    )


@functools.lru_cache(maxsize=64)
def label_first(labels: str) -> re.Pattern[str]:
    """(C), c), option C: at the start."""
    return re.compile(rf"(?:option|choice|answer)?\s*[(\[]?\s*([{labels}{labels.lower()}])\s*[)\].:,]*", re.IGNORECASE)
