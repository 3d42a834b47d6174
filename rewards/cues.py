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


def _compile(pattern: str) -> re.Pattern[str]:
    """With short gaps only: a long run of spaces costs no time."""
    for gap, short in ((r"\s*", r"\s{0,3}"), (r"\s+", r"\s{1,3}"), (r"\W*", r"\W{0,6}"), (r"\w*", r"\w{0,12}")):
        pattern = pattern.replace(gap, short)
    return re.compile(pattern, re.VERBOSE | re.IGNORECASE)


_ENGLISH = r"""(?<![a-z])(?:
    (?:final\s+|correct\s+|best\s+|right\s+){0,3}(?:answer|choice|option|solution|response|selection)(?![a-z])
      (?:\s+(?:choice|option|letter|here)){0,2}(?:\s+(?:to|among|of|from|in|for)\s[^.:\n]{0,60}?)?
      (?:\s+(?:choice|option|letter|here|should|would|must|will|can\s+only)){0,3}
      (?:,[^,.:\n]{1,40},)?\s*
      (?:(?:is|are|be|was)(?![a-z])(?:\s*:)?|["'`]?\s{0,2}[:=]|->|→|[-–—](?=\s))
  | (?:i|we)(?:'d|'ll|\s+(?:would|will|must|should|now|then|thus|hence|therefore|finally|also|have\s+to
        |\w{2,12}ly)(?![a-z])){0,4}
      \s+(?:choose|chose|pick|select|go\s+with|opt\s+for|say)(?![a-z])\s*:?
  | ans\s?[.:]
  | (?:i\s+am|i'm|we\s+are|we're)\s+(?:going\s+with|choosing|picking|selecting)(?![a-z])\s*:?
  )"""
_HAN = r"""(?:答案|正解|解答|答え|回答|正确选项|正確選項|故选|故選|应选|應選|应该选|應該選|选择|選擇
    |所以选|所以選|因此选|因此選|我选|我選|[选選](?=\s*\(?\s*[A-Z](?![A-Za-z])))
    (?:应该|應該|应|應|就|是|为|為|选项|選項|选|選|は|が|[:\s])*"""
_OTHERS = r"""(?<![^\W\d_])(?:ich\s+wähle|je\s+choisis|elijo|scelgo|escolho|выбираю|richtig\s+ist
    |antwort|lösung|réponse|reponse|respuesta|risposta|resposta|antwoord|svar(?:et)?|odpowiedź
    |ответ|відповідь|jawaban|jibu|cevap|yanıt|đáp\s+án|câu\s+trả\s+lời|정답|답변|답|الإجابة|الجواب|উত্তর|उत्तर|idahun|απάντηση)
    (?![^\W\d_]*[a-zäöü]\w)
    (?:\s*(?:ist|lautet|est|es|è|é|is|er|jest|la|die|richtige|correcta?|correcte|corretta|option|opción|opção
        |은|는|이|가|है|هي|هو)){0,5}
    \s*[:：=-]?"""
CUE = _compile(f"{_ENGLISH}|{_HAN}|{_OTHERS}")

_THAT = r"""(?:\s*,?\s*(?:that|que|qu'|che|dass|что|daß))?\s*
    (?:(?:the|my|our|your|this|its|la|le|el|il|die|der|das|a|o|l')[\s]*)?(?:\s*(?:correct|right|final|best|richtige|bonne))?\s*$"""
DENIED = _compile(
    rf"""(?<![a-z])(?:
      (?:\w+n't|not|cannot|never|hardly|nobody|no\s+one|none)(?:\s+(?:\w+ly|even|ever|for\s+a\s+moment|be|so))?\s+
        (?:think|thinks|believe|believes|say|says|claim|agree|mean|follow|feel|see|buy|accept|convinced|sure|certain|true|the\s+case
           |clear|right|correct|likely|possible|suppose|imagine)
      |(?<!no\s)(?<!not\s)(?<!n't\s)(?<!without\s)(?<!without\sa\s)(?:doubt|doubts|doubtful|disagree|deny|denies|dispute|reject)
      |(?:false|untrue|unlikely|wrong|incorrect|mistake|error|impossible|nonsense|absurd|myth)(?:\s+to\s+(?:say|think|claim|believe))?
      |no\s+way|unsure|uncertain|far\s+from\s+(?:sure|certain|clear)|refuse\s+to\s+(?:say|believe|think)|(?:can't|cannot)\s+be
      |(?:glaube|denke|meine)\s+(?:ich\s+)?nicht|bezweif\w+|zweifle|nicht\s+wahr|falsch|stimmt\s+nicht
      |(?:ne\s+|n')(?:pense|crois|est)\s+pas(?:\s+vrai)?|doute|faux
      |no\s+(?:creo|pienso|es\s+(?:cierto|verdad))|dudo|es\s+falso
      |não\s+(?:acho|acredito|creio|penso)|duvido|non\s+(?:credo|penso)|dubito
      |не\s+(?:думаю|считаю|верю)|сомневаюсь|неверно
      ){_THAT}
    |(?:不认为|不認為|不觉得|不覺得|怀疑|懷疑|不相信)[^。.,!?\n]{{0,6}}$
    |(?:不|别|別|勿|没|非)(?:能|应|應|该|該|要|可|会|會|建议|建議|应该|應該|可能|可以){{0,2}}\s*$""",
)
"""What takes back the declaration that it leads up to: I doubt that (the answer is C)."""
SUPPOSED = _compile(
    rf"""(?<![a-z])(?:
      (?:if|whether|unless|let|^\s*say|hypothetically,?|suppose|supposing|assume|assuming|imagine|pretend|let'?s\s+say|granted|given|provided|wonder|even\s+though|had|were
        |perhaps|maybe|asks?)
      |(?<!\bi\s)(?<!\bwe\s)(?:might|may|could|would)\s+(?:say|claim|argue|answer)
      |(?:might|may|could|would)\s+(?:\w+\s+)?(?:think|believe|guess|expect|suppose|assume|imagine|be\s+tempted\s+to\s+\w+)
      |(?:one|you|they|he|she|people|everyone|everybody|anyone|someone|some|many|most|others|students|who|model|book|friend|teacher)
        \s+(?:(?:\w+ly|people|might|may|could|would|will|can|often|often|all|who)\s+){{0,3}}
        (?:think|thinks|believe|believes|say|says|said|claim|claims|claimed|argue|argues|guess|expect|answer|wrote|assume)
      |(?:i|we|you|they|people|he|she)\s+(?:\w+\s+)?(?:thought|believed|assumed|guessed|expected|supposed|figured)
      |(?:tempting|easy|natural|common)\s+to\s+(?:think|say|believe|assume|guess)
      |wenn|falls|angenommen|ob|si|supongamos|suponiendo|supposons|se|supponiamo|suponha|если|допустим|предположим
      ){_THAT}
    |(?:有人说|有人认为|很多人说|如果|若是?|假如|假设|假設|要是|倘若|もし|만약|만일)[^。.,!?\n]{{0,4}}$""",
)
"""What makes a declaration a supposition or someone else's: if (the answer is C), many say."""
OTHERWISE = _compile(
    rf"""(?<![a-z])(?:otherwise|or(?:\s+(?:else|maybe|perhaps|possibly|that))?|else|alternatively|sonst|oder|sinon|ou|иначе|или)\W*
        (?:maybe\W*|perhaps\W*|possibly\W*)?{_THAT}
    |(?:否则|否則|或者?|也可以?|还可以?|또는)\s*$""",
)
"""What makes a declaration the second of two."""

_COPULAS = r"es|è|é|est|ist|is|jest|la|le|l'|el|il|die|der|das|de|a|o|opción|opção|opzione|por"
NEGATED_BEFORE = _compile(
    rf"""(?:\bnot(?!\s+only)|\bno(?=\s+$)|\\l?n(?:eg|ot)|¬|n't|\bcannot|\bnever|\bneither|\bnor|\brul(?:e|es|ed|ing)\s+out|\beliminat\w*|\bexclud\w*|\breject\w*
    |\binstead\s+of|\brather\s+than|\bexcept(?:\s+for)?|\b(?:wrong|incorrect|false)(?!\s*[,;])|\bunlike(?:ly)?|\bimpossible
    |\b(?:any|every|no)thing\s+but|\ball\s+but|\banyone\s+but|\bfar\s+from|\bhardly|\bscarcely|\bbarely|\bnowhere\s+near
    |\b(?:opposite|reverse|inverse)\s+(?:of|to)|\bleast\s+likely|\bother\s+than|\bdifferent\s+(?:from|to|than)|\bapart\s+from|\baside\s+from|\bbesides|\bby\s+no\s+means
    |\bno\s+longer|\bno\s+way|\bopposed\s+to|\bwithout|\bbut\s+not|\bminus
    |不是|并非|並非|不选|不選|排除|不可能是?|不太可能是?|不会是|不會是|不能是|不应是|绝非|絕非|除了|除去|除|而非|并不
    |\bnicht|\bkein\w*|\bnie(?:mals)?|\balles\s+(?:außer|ausser|andere\s+als)|\bniet|\bnooit|\binte|\bikke|\baldrig
    |\bpas\b|\bpoint\b|\bjamais|\btout\s+sauf|\bsauf|\bno\s+(?:es|era|puede\s+ser)|\bnunca|\bjamás|\b(?:menos|salvo|excepto)
    |\bnon\b(?!\s*[,;:!])|\bmai\b|\btranne|\bnão|\bexceto|\bне|\bникогда\s+не|\bкроме|\bnie\s+jest|\bbukan|\bkhông\s+phải|ليس\w*|ليست|غير)
    \W*(?:(?:be|the|an?|option|options|choice|choices|answer|either|both|for|to|or|and|nor|really|quite|even|just|actually|exactly
        |necessarily|at\s+all|in\s+fact|definitely|certainly|likely|fall|etwa|{_COPULAS}|(?-i:[A-Z]))(?![A-Za-z])\W*)*$
    """,
)
NEGATED_AFTER = _compile(
    r"""^\s*[)\]]?\s*(?:(?:or|and|nor)\s+[A-Z]\s+)?
    (?:(?:is|are|was|were|would\s+be|could\s+be|must\s+be|seems|looks)\s+
            (?:both\s+|also\s+|clearly\s+|simply\s+|all\s+|obviously\s+|definitely\s+|certainly\s+)?
        (?:not|wrong|incorrect|false|out|never|hardly|unlikely|impossible|doubtful|n't|ruled\s+out|eliminated|excluded
           |a\s+(?:trap|distractor|mistake))\b
     |[:=-]?\s*(?:wrong|incorrect|false|isn't|aren't|can't|cannot|doesn't|don't|wasn't|won't|fails|ruled\s+out|eliminated
        |(?:can|could|must|should)\s+be\s+(?:ruled\s+out|eliminated|excluded|rejected))\b
     |(?:ist|wäre)\s+(?:nicht|falsch|keine)|scheidet\s+aus|n'est\s+pas|est\s+(?:fauss?e?|incorrecte?|exclue?)\b
     |no\s+es\b|es\s+(?:incorrect|fals)|non\s+è|è\s+(?:sbagliat|errat|fals)|não\s+é|é\s+(?:errad|incorret|fals)
     |(?:[-–—]\s*)?(?:это\s+)?не(?:верн|правильн|\s)|değil|नहीं
     |(?:选项|選項|项|項)?(?:是|也|都|并|並|明显|明顯|肯定|绝对)*(?:错|錯|不对|不對|不正确|不正確|不可能|不成立|不是|以外|之外|除外)
     |(?:だ|で|と|は|が|の|も|じゃ|です)*(?:ない|なく|ありません|思わ|思いま|限ら|違|誤|間違|以外)
     |(?:번|이|가|은|는|일|라고|를|을|도)*\s*(?:아니|아닙|아님|아닐|틀[린렸]|제외|리\s*(?:가\s*)?없|수\s*(?:는\s*)?없|오답)
     |이?라면|(?:だった)?なら|だとすれ)""",
)
_OR = r"""or|oder|ou|o|eller|of|или|либо|lub|albo|veya|ya\s+da|hoặc|atau|أو|या|或者?|还是|還是
    |また?は|もしくは|か|또는|혹은
    |아니면|versus|vs\.?|else|otherwise|unless|if\s+not|\\l?or|\\vee|\\l?and|\\wedge|alternatively|plus"""
TIES = _compile(
    rf"""^(?:[\s,;/&)(\]\[.|+-]|->|→|=>|⇒|∨|∧
    |(?:{_OR}|and|und|et|y|e|и|but|also|even|then|maybe|possibly|perhaps|probably|either|both|as\s+well\s+as|not\s+only
       |vielleicht|peut-être|quizás|tal\s+vez|forse|talvez|может\s+быть|возможно|也?可能是?|也是|或者?是|[이]?거나|나|ou\s+bien
       |could\s+be|might\s+be|option|choice|is|the|it|和|以及|及|과|와|と|번|이나)(?![a-z]))*$""",
)
"""What stands between the members of a list or a hedge: `B, but C`; not between a label and its reasons."""

QUESTION = _compile(
    r"""^[)\]"']{0,3}(?:[ ,)]{1,3}(?!why|how|what|which)[^\W\d_]{1,12}(?:'\w{1,2})?){0,3}\s?[?]
        (?!\s*(?:yes|correct|indeed|right|exactly|ja|oui|sí))
    |^\s*(?:[吗嗎]|[呢か]\s*[?]|ですか|でしょうか|かもしれ|입니까|인가|일까|일지도)""",
)
"""What makes a label a question: C?, C, right?"""

_MARKERS = r"""no(?=\s*[,.:;!…—–-]|\s+(?:wait|sorry|actually|it|hold)(?!\w)|\s*\n)|nope|äh+m?|euh+
    |(?:let's|let\s+us|i'll|i'd)\s+(?:go|say|pick|choose)|wait|hold\s+on|h+m+|er+|u[mh]+|actually|correction|corrected|scratch\s+that|strike\s+that
    |on\s+reflection
    |upon\s+reflection|but\s+now|well|(?:thinking|looking)\s+again|i\s+misread[^.\n]{0,20}|i\s+now|now
    |(?:up)?on\s+(?:second|further|closer)\s+(?:thoughts?|reflection|look|inspection)
    |(?:i\s+am\s+|i'm\s+|i\s+was\s+)?(?:just\s+|only\s+)?(?:kidding|joking)
    |jk|sorry|oops|whoops|ah|oh|my\s+(?:bad|mistake)|apologies|rather|i\s+mean|i\s+meant|i\s+take\s+(?:that|it)\s+back
    |let\s+me\s+(?:correct|rephrase|revise|fix)\s+(?:that|this|it|myself)|instead|make\s+(?:that|it)|edit|update|never\s*mind|in\s+fact
    |i\s+(?:was|am)\s+(?:wrong|mistaken)|that(?:'s|\s+is|\s+was)\s+(?:wrong|incorrect|not\s+right|a\s+mistake)|(?:i\s+)?chang(?:e|ed|ing)
    |revised|or\s+rather|nein|vielmehr|genauer\s+gesagt|doch|quatsch
    |non|plutôt|en\s+fait|pardon|en\s+realidad|mejor\s+dicho|perdón
    |anzi|in\s+realtà|não|aliás|na\s+verdade|нет|точнее|вернее|不|不对|不對|等等|更正|其实|其實|訂正|いや|いいえ|やっぱり|아니|아니요|정정"""
_FILLERS = rf"""{_MARKERS}|it's|it|that's|that|this|should|must|would|has|to|be|is|was|the
    |correct|right|actual|real|true|final|answer
    |option|choice|letter|i'd|i'll|i|we|think|believe|say|choose|pick|select|go|going|with|now|so|really|but|then|my|let's|let|me|mind|for|instead
    |es|ist|est|die|la|le|sondern|antwort|réponse|respuesta|应该|應該|应|是|为|選|选|答案|正解|は"""
_START = r"(?:^|[.!?;,:(\n…—–>-]|(?<=\s)(?=[^\W\d_]))[ \t\"'(*]{0,4}"
_SENTENCE_START = r"(?:^|[.!?;(\n…])[ \t\"'(*]{0,4}"


@functools.lru_cache(maxsize=64)
def _ends(labels: str) -> str:
    """What may follow a label that is named as an answer: the end of its clause."""
    others = rf"""\s*(?:[{labels}](?![A-Za-z])|while|though|although|which|being|like|too|unlike|however|for|on|by
        |in|and|or)(?!\w)"""
    return rf"""\)?(?:(?=\s*(?:[.;!?:)\]\n…]|$|[-–—]\s|입|です|だ|,(?!{others})))
        |(?=\s+(?:is|was|would\s+be|seems|looks)\s+(?:the\s+(?:right|correct|answer|best|one|true)|right|correct|better|best|true|it)
            (?![a-z])(?!\s+(?:wrong|opposite)))
        |(?=\s+(?:instead|rather|because|since|after\s+all)(?![a-z])))"""


@functools.lru_cache(maxsize=64)
def corrections(labels: str) -> re.Pattern[str]:
    """No wait, D; on second thought it should be D."""
    strong = r"""no|wait|hold\s+on|scratch\s+that|correction|oops|sorry|on\s+second\s+thoughts?
        |i\s+was\s+(?:wrong|mistaken)|nein|non|нет"""
    return _compile(
        rf"""{_START}(?:(?:{_MARKERS})(?!(?-i:[a-z]))\W{{0,6}}(?:(?:{_FILLERS})(?!(?-i:[a-z]))\W{{0,6}}){{0,12}}
            |(?:{strong})(?![a-z])[^\n]{{0,100}}?(?:should\s+be|must\s+be|has\s+to\s+be|it's|it\s+is|one\s+is)\s+(?:option\s+|the\s+)?\(?)
        {standing(labels).pattern}{_ends(labels)}""",
    )


TAKEN_BACK = _compile(
    r"""^[^\w\n]{0,8}\n{0,3}[^\w\n]{0,4}
    (?:(?:but|no|wait|h+m+|actually|oh|sorry|oops|hold\s+on|not|and|well)(?![a-z])\W{1,4}){0,4}
    (?:(?:that|this|it|which)(?:'s|\s+(?:answer\s+)?(?:is|was|can't\s+be|cannot\s+be|seems|looks|isn't|wasn't))\s+(?:of\s+course\s+|clearly\s+)?
        (?:not\s+)?(?:wrong|incorrect|false|a\s+mistake|impossible|nonsense|(?:(?<=not\s)|(?<=n't\s))(?:right|correct|true|it|the\s+answer))(?![a-z])
      |(?:i\s+was\s+(?:wrong|mistaken|joking|kidding)|just\s+kidding|scratch\s+that|never\s*mind)\s*(?:[.!]|$)
      |(?<=[?.!,\s(])(?:no|nope|not|wrong|false|nein|non|нет)[.!)]{0,2}\s*(?:\n|$))""",
)
"""What withdraws the label just before it and puts none in its place."""


@functools.lru_cache(maxsize=64)
def hedges(labels: str) -> re.Pattern[str]:
    """Or D; it could also be D; D is possible."""
    label, ends = standing(labels).pattern, _ends(labels)
    tail = rf"(?:{ends}|(?=\s+(?:if|when|too|also|as\s+well|is\s+possible|could|might|works)(?![a-z])))"
    no_but = r"(?!\)?[\s,]*(?:but|however|yet)(?![a-z]))"
    return _compile(
        rf"""^[^\w\n]{{0,6}}\n{{0,2}}[^\w\n]{{0,4}}
            (?:(?:although|though|and|but)\s+)?(?:{_OR}|failing\s+that|(?:along|together)\s+with|maybe|perhaps|possibly|(?:my\s+)?second\s+(?:choice|guess)|backup|fallback
              |then\s+again)(?![a-z])\W{{0,4}}(?:(?:maybe|perhaps|possibly|probably|even|also|else|it|is|be|could|might|the|option|then|failing|that)(?![a-z])
              \W{{0,4}}){{0,5}}{label}{tail}
        |{_START}(?:(?:but|and|although|though)\s+)?(?:(?:it|this|that|the\s+answer)\s+)?(?:could|might|may|can)\s+
            (?:(?:just\s+as|also|equally|well|possibly|easily|perhaps)\s+){{0,3}}be\s+(?:option\s+)?\(?{label}{no_but}{ends}
        |{_SENTENCE_START}(?:but\s+)?it(?:'s|\s+(?:is|should\s+be|must\s+be|has\s+to\s+be))\s+(?:option\s+)?\(?{label}{ends}
        |^\W{{0,3}}\d{{1,3}}\s?\\?%[^\n]{{0,12}}?{label}
        |{label}\s+(?:as\s+(?:a\s+|my\s+|the\s+)?)?(?:second\s+(?:choice|guess|best)|second(?=\s*(?:[.,;!]|$))|backup|fallback|alternative)(?![a-z])
        |{_SENTENCE_START}alternatively\W{{0,3}}(?:option\s+)?{label}{tail}
        |{label}\)?\s+(?:is|seems|(?:could|might|may|would)\s+(?:also\s+)?be)\s+(?:(?:also|equally|just\s+as)\s+)?(?:possible|plausible)
            (?!\s+(?:only|if|in|but|when)(?![a-z]))
        |{label}\)?\s+(?:is|seems|works|fits|would\s+be)\s+(?:also|equally|just\s+as|too)(?:\s+(?:possible|right|correct|valid|good|likely|true|acceptable)
            |(?=\s*[.!]|$))""",
    )


@functools.lru_cache(maxsize=64)
def conditions(labels: str) -> re.Pattern[str]:
    """C if n is odd, D if even; C unless D; C only if D fails."""
    label = standing(labels).pattern
    return _compile(
        rf"""^[ ,)]{{0,3}}(?:only\s+)?(?:if|when|wenn|falls|si|se|если|for|in\s+case|provided|assuming)
            (?![a-z])[^.\n]{{1,100}}?
            (?:(?:otherwise|else|sonst|sinon|иначе)\W{{0,3}}{label}|{label}\s+(?:if|when|for|otherwi
                se|else|in\s+case|wenn|si|se|если)(?![a-z]))
        |^[ ,;)]{{0,3}}(?:\.{{3}}|…)?[ ]{{0,2}}(?:unless|only\s+(?:if|when)
                |assuming|provided|if(?=\s+(?:not\s+)?{label}))(?![a-z])
            [^.\n]{{0,60}}?{label}""",
    )


UNIT = _compile(
    r"""(?:\d|°|º|\\circ|\^|\bdegrees?|\bdeg|\b(?:vitamin|hepatitis|appendix|schedule|section|class|grade|type|plan
        |exhibit))(?:[\ \t}~]|\\[,;:!\ ])*$""",
)
"""What makes the letter behind it a unit or a name: 20 C, 5 °C, vitamin C."""

GOES_ON = frozenset({
    "because", "since", "as", "is", "was", "for", "which", "that", "and", "or", "but", "not", "so", "given", "due",
    "by", "with", "would", "will", "in", "hence",
})  # fmt: skip
"""Words that may follow the label A or I; before any other word they are an article and a pronoun."""
SENTENCE = re.compile(r"(?<=[^.])[.!?;](?=\s|$)")

_IS_RIGHT = r"""\s*\)?\s*(?:is|was|must\s+be|would\s+be|has\s+to\s+be)\s+
    (?:definitely\s+|clearly\s+|indeed\s+|therefore\s+|thus\s+)?(?:the\s+)?(?:only\s+)?
    (?:correct|right|best|true|answer)(?![a-z])"""
_THEREFORE = r"""therefore|hence|thus|so|consequently|accordingly|ergo|in\s+conclusion
    |to\s+sum\s+up|in\s+(?:summary|short)|overall|finally|in\s+the\s+end|daher|somit|donc|ainsi
    |por\s+(?:lo\s+)?tanto|así\s+que|portanto|quindi|dunque|значит|следовательно|因此|所以|よって|したがって|따라서"""


@functools.lru_cache(maxsize=64)
def standing(labels: str) -> re.Pattern[str]:
    """A label that stands alone; not C++, C^2."""
    return re.compile(rf"(?<![A-Za-z0-9_\\])(?<![A-Za-z]')((?-i:[{labels}]))(?![A-Za-z0-9_^#]|\+\+|'[a-z])")


@functools.lru_cache(maxsize=64)
def called_right(labels: str) -> re.Pattern[str]:
    """C is correct, 只有选项B是对的, C est la bonne réponse, C가 정답입니다."""
    label = standing(labels).pattern
    return _compile(
        rf"""(?:(?<![A-Za-z])(?:option|choice|answer)\s*)?\(?{label}{_IS_RIGHT}
        |(?:只有|选项|選項|答案){{1,3}}\s*((?-i:[{labels}]))\s*(?:选项|選項|项|項)?\s*(?:是|为|為)?\s*(?:对|對|正确|正確)
        |{label}\s*(?:选项|選項|项|項)?\s*(?:是|为|為)?\s*(?:最)?(?:对的|對的|正确|正確|正解)(?:的|答案|选项)?(?=\s*(?:[.,;!]|$|\n))
        |{label}\)?\s*(?:번)?\s*[이가은는]\s*(?:정답|답|맞|옳)(?!\S{{0,2}}\s*아[니닙님])(?!\S{{0,2}}\s*지\s*않)
        |{label}\s*[がは]\s*(?:正解|正しい|答え)(?!\s*(?:では|じゃ|とは|わけ|か))
        |(?<![a-zäöü])(?:ist|wäre)\s+(?:Option\s+|Antwort\s+)?{label}\s+(?:richtig|korrekt|die\s+(?:richtige\s+)?(?:antwort|lösung))
        |{label}\s+ist\s+(?:somit\s+|daher\s+|also\s+)?(?:richtig|korrekt|die\s+(?:richtige|korrekte)\s)
        |{label}\s+est\s+(?:donc\s+)?(?:la\s+)?(?:bonne|correcte|juste|exacte|vraie|réponse)
        |{label}\s+es\s+(?:la\s+)?(?:respuesta\s+|opción\s+)?correct[ao]
        |{label}\s+é\s+(?:a\s+)?(?:resposta\s+|opção\s+|alternativa\s+)?(?:corret|cert)a
        |{label}\s+è\s+(?:la\s+)?(?:risposta\s+|opzione\s+)?(?:corretta|giusta|esatta)
        |{label}\s*(?:[-–—]\s*)?(?:это\s+)?(?:правильн|верн)ый\s+(?:ответ|вариант)
        |(?<![a-z])(?:{_THEREFORE})(?![a-z])[,:]?\s{{0,3}}(?:(?:it's|it|is|must|be|the|answer|option|choice|letter|has|to|should)\s){{0,5}}
            \(?{label}\)?(?=\s{{0,3}}(?:[.!]|$|\n|,\s{{0,3}}(?:because|since|as|given)(?![a-z])))""",
    )


@functools.lru_cache(maxsize=64)
def pointed_at(labels: str) -> re.Pattern[str]:
    """It's C: weaker than a cue, for it may speak of something else."""
    return _compile(
        rf"""(?<![A-Za-z'])(?:it|this|that)(?:'s|\s+(?:is|must\s+be|should\s+be|has\s+to\s+be|can\s+only\s+be))\s+
        (?:(?:definitely|clearly|option|choice|the|letter|answer|therefore|thus|actually|really|probably)\s+){{0,3}}
        \(?{standing(labels).pattern}{_ends(labels)}""",
    )


@functools.lru_cache(maxsize=64)
def label_first(labels: str) -> re.Pattern[str]:
    """(C), c), option C, final answer C: at the start."""
    return _compile(
        rf"(?:(?:my\s+|the\s+)?(?:final\s+|correct\s+|right\s+)?(?:option|choice|answer))?\s*[(\[]?\s*([{labels}{labels.lower()}])\s*[)\].:,]*",
    )
