"""mcq.correct: shared cases, many ways to declare an option, many ways not to; shuffled options."""
# ruff: noqa: E501, RUF001  (tables of replies, in many scripts)

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo.rewards.mcq import correct, valid_option
from slmgrpo.rewards.shuffle import one_letter_baseline, shuffle_options

CASES = Path(__file__).parents[2] / "shared" / "cases" / "mcq_cases.jsonl"
CHOICES = ["sugar", "oxygen", "nitrogen", "carbon dioxide"]

# Rows where reasonable people differ, decided once. All others follow the case file.
POLICY = {
    "q023": (True, "a reply that is only a letter is an answer in either case"),
    "q037": (True, "the value of one option, boxed, can mean nothing else"),
    "q043": (True, "the longest option text that fits is what was said"),
    "q056": (True, "C is ruled out by name, so D alone is declared"),
    "q073": (True, "the last of two answers is the declared one, as with boxes"),
    "q087": (True, "an option's text behind a cue declares it"),
    "q101": (True, "a full-width letter is that letter"),
    "q108": (False, "ordinals do not name options: `Option 3` may be a text"),
}


def cases() -> list[dict]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not CASES.is_file(), reason="the shared case files are not on this machine")
@pytest.mark.parametrize("row", cases(), ids=lambda row: row["id"])
def test_shared_cases(row: dict) -> None:
    wanted = POLICY[row["id"]][0] if row.get("policy") else row["match"]
    verdict = correct(row["completion"], row["gold"], row["choices"])
    assert verdict.value == float(wanted), verdict


C = [
    "The answer is not B, it's C", "The correct option is (C) nitrogen", "Option C is correct.", "C is the correct answer.",
    "A is incorrect. C is correct.", "I choose C.", "I'd go with C", r"Therefore, the answer is $\boxed{\text{C}}$.",
    r"\boxed{C: nitrogen}", r"\boxed{(C)}", r"\boxed{\textbf{(C)}\ nitrogen}", r"\boxed{nitrogen}", "**Answer:** C", "Answer:\n\n**C**",
    "### Answer\nC", "Final Answer: The final answer is C. I hope it is correct.", 'The answer is "C"', "Answer: `C`", "Answer: [C]",
    "Answer - C", "Answer=C", "答案是C", "正确答案：C", "所以选C", "應選C", "答案：(C)", "Antwort: C", "Die richtige Antwort ist C.",
    "Réponse : C", "La respuesta correcta es la C", "Risposta: C", "Ответ: C", "정답은 C입니다", "答えはC", "正解：Ｃ", "الإجابة: ج", "উত্তর: ড",
    "(c)", "c)", "C.", "It is nitrogen.", "Answer: C. nitrogen", "Answer: A. Actually, answer: C", "<answer>C</answer>",
    "<answer>The answer is C</answer>", r"Answer: \(C\)", "So it must be nitrogen\n\nC", "The answer would be C", "C - nitrogen",
    "Answer: nitrogen, not oxygen", "Eliminating A and B, the answer is C", "The answer is C, because A, B and D are wrong",
    "The answer is C since A or B would not work", "Answer: C\n\nA: sugar is made, not taken in.",
]  # fmt: skip
NOT_C = [
    "The answer is either B or C", "The answer is C (or B)", "Answer: C, but B is also possible", "Answer: C/D", "Answer: A, B, C, or D",
    r"\boxed{C, D}", r"\boxed{A or C}", "答案是B或C", "只有选项C是错的", "Answer: C and D", "Answer: ABCD", "Answer: CD", "It is not nitrogen.",
    "It could be nitrogen or oxygen.", "A. sugar\nB. oxygen\nC. nitrogen", "the answer cannot be C", "the answer isn't C",
    "The answer is neither C nor D", "Answer: Z", "Answer: none", "<answer></answer>", "<answer>B or C</answer>", "<think>Answer: C",
    "Let's see. Carbon... I think it seems hard", "Answer: C\nWait. Answer: D", "", "Answer: [LETTER]", "C D A B",
]  # fmt: skip

# Ordinary declarations, with reasons that name other options, the words of doubt and the words of correction in them.
PLAIN = [
    "Therefore, C.", "Hence (C).", "Thus, option C.", "So the answer must be C.", "C!", ": C", "'C'",
    "The answer is 'C'.", '{"answer": "C"}', "{'answer': 'C'}", "Final answer C", "The answer, then, is C.",
    "The answer, of course, is C.", "The correct option among these is C.", "The best choice of the four is C.",
    "I now choose C.", "I therefore choose C.", "We choose C.", "We would pick C.", "I'm choosing C",
    "The answer isn't D, it's C.", "It isn't D; it is C.", "- A: wrong\n- B: wrong\n- C: right\n- D: wrong\n\nSo C.",
    "因此，选C", "选 C", "本题选C。", "C项正确", "C选项是正确的", "综上，C项正确。", "C가 정답입니다.", "C번이 정답이다.", "Somit ist C richtig.",
    "C ist die richtige Antwort.", "C est la bonne réponse.", "C es la respuesta correcta.", "C é a resposta correta.",
    "C è la risposta corretta.", "Cが正解です。", "C — правильный ответ.", "Правильный ответ: C.",
    "The answer is C. Nitrogen fills most of the air.", "The answer is C. No other option fits.",
    "The answer is C, not D.", "The answer is C rather than D.", "Answer: C. D is wrong because it is heavier.",
    "Answer: C. Many people think it is D, but it is not.", "Answer: C. Actually, A, B and D are all minor gases.",
    "The answer is C. Option D might seem right, but it is not.", "The answer is C, I think.",
    "I would say the answer is C.", "I think the answer is C.", "I believe it's C.",
    "There is no doubt that the answer is C.", "I have no doubt the answer is C.", "I'm sure the answer is C.",
    "If x = 2, then the answer is C.", "If we look at the table, the answer is C.", "Not B, so the answer is C.",
    "A and B are wrong, so the answer is C.", "It is not hard to see that the answer is C.",
    "The answer is C, since D would need more heat.", "Answer: C\n\nD is ruled out by the mass.",
    "Answer: C\n\nI hope this helps! No problem.", r"\boxed{C} since D is too heavy.",
    r"\boxed{C}. Wait, let me check: yes, C.", "The answer is C. Let me double check. Yes, it is C.",
    "Wait, no. The answer is C.", "At first I thought D. Actually, the answer is C.",
    "I thought the answer was D, but the answer is C.", "The answer is C: nitrogen.", "Answer: C) nitrogen",
    "Answer: C. Nitrogen is not a compound; oxygen is not either.",
    "The answer is C (nitrogen), not D (carbon dioxide).", "Answer: C. Oxygen is only a fifth of the air.",
    "The answer is nitrogen, C.", "The answer is C. What else could it be?",
    "The answer is C, even though D is common.", "Die Antwort ist C, nicht D.", "Die Antwort ist C, weil D falsch ist.",
    "La réponse est C, pas D.", "La respuesta es C porque D no es correcta.", "答案是C，不是D。", "答案选C。A项错误，B项错误，D项错误。",
    "정답은 C입니다. D는 틀렸습니다.", "答えはCです。Dではありません。", "Ответ: C, а не D.", "Given the data, the answer is C.",
    "As I said, the answer is C.", "The answer is C if we assume dry air.",
    "Answer: C\n\nOtherwise the plants would die.", "The answer is C. Or, in words, nitrogen.",
    "Question 3 asks for a gas. Answer: C", "To sum up: C", "**Final answer: C**", "The answer to question 5 is C.",
    "A is incorrect, B is incorrect, D is incorrect. Thus C is correct.", "Clearly, C is the answer.",
    "Answer: C. If it were D, the flame would go out.", "The answer is C; the others cannot be.",
    "Some say the answer is D, but the answer is C.",
    "The correct answer is C. This is because nitrogen, unlike D, is inert.",
    "Let me think step by step. A gas is needed, so not A. The answer is C.",
    "Since neither A nor B works, and D is out, I choose C.", "My choice would be C.", "Choice: (C)",
    "The answer is: **C. nitrogen**", "Answer: C, as A, B and D do not fit.",
    "The answer is C. You might think D, but no.", "The answer is C. I was tempted by D.",
    "The answer is C. It could not be D.", "Answer: C\nExplanation: A is solid. B burns. D is rare.",
    "Answer: C\nA) wrong\nB) wrong\nC) right\nD) wrong", "Answer: C. Hmm, that was easy.",
    "The answer is C. That is correct.", "The answer is C, that's for sure.", "It must be C.",
    "The correct answer is therefore C.", "The right answer is option C.", "The answer is C! Great question.",
    "The answer is definitely C", "Without a doubt, the answer is C.", "The answer can only be C.",
]  # fmt: skip
CORRECTED = [
    "The answer is C, no, wait, D.", "Answer: C. Sorry, D.", "Answer: C. Oops, it should be D.",
    "Answer: C. Hold on, it's D.", "Answer: C. I take that back, D.", "Answer: C. Make that D.",
    "Answer: C. Hmm, I change my answer to D.", "Answer: C — no, D.", "Answer: C; strike that: D", "Answer: C (no, D)",
    "Answer: C. Wait, I made an error; the right one is D.", "Answer: C\nEdit: D", "The answer is C. Actually, D.",
    "The answer is C... I mean D.", "I choose C. No, D!", r"\boxed{C} Actually, D.", "C\n\nWait, no, it's D.",
    "Answer: C. That's wrong.", "Answer: C. Wait, that is not right.", "The answer is C. No.",
    "The answer is C. Just kidding.", "Answer: C. Let me correct that: D", "Answer: C => D",
    "La réponse est C, non, D.", "La respuesta es C, no, D.", "Die Antwort ist C. Nein, doch D.", "Ответ: C. Нет, D.",
    "答えはC、いや、Dです", "정답은 C, 아니, D입니다", "The answer is C, no wait, D.", "Answer: C... no, D.",
    "Answer: C\n\nActually no. It should be D.", "Answer: C\nCorrection: D", "Answer: C -> D", "The answer is C? No.",
]  # fmt: skip
HEDGED = [
    "Answer: C. Alternatively D.", "Answer: C, if not D", "Answer: C, failing that D", "Answer: C. D is also correct.",
    "Answer: C. It might be D.", "Answer: C. It could also be D.", "Answer: C (D also possible)", "C or D",
    "Answer: C, possibly D", "Answer: C; D is equally likely", "The answer is C or else D.",
    "Answer: C. My second choice D.", "If n is odd the answer is C, otherwise the answer is D.",
    "The answer is C for odd n and D for even n.", "The answer is C when n is odd and D when n is even", r"\boxed{C?}",
    r"\boxed{C \vee D}", r"\boxed{C \text{ vs } D}", r"\boxed{C} or \boxed{D}", "The answer is C?",
    "The answer is C, right?", "Is it C?", "Die Antwort ist C oder vielleicht D.", "La respuesta es C o D.",
    "Odpowiedź: C lub D", "Cevap: C veya D", "Jawaban: C atau D", "答えはCまたはDです", "答案是C还是D", "答案是C或者D",
    "Đáp án: C hoặc D", "Answer: C\n(or D)", "The answer is C. Or maybe D?", "Answer: C is possible; D is possible",
    "Answer: C, otherwise D", "Answer: C unless D", r"\boxed{C \lor D}", "The answer is C if n is odd, D if even",
    "The answer is C only if D fails.",
]  # fmt: skip
DENIED = [
    "I do not believe the answer is C.", "I can't say the answer is C.", "I am not sure that the answer is C.",
    "I'm not convinced the answer is C.", "It is not true that the answer is C.",
    "It is unlikely that the answer is C.", "No one says the answer is C.", "You might say the answer is C.",
    "People think the answer is C.", "Assume the answer is C.", "Imagine the answer is C.",
    "Let us suppose that the answer is C.", "Even if the answer is C, who cares.",
    "Whether the answer is C is unclear.", "Unless the answer is C, we are lost.", "The answer is everything but C.",
    "The answer is nothing but trouble, not C.", "The answer is other than C.", "The answer is any option except C.",
    "The answer is unlikely to be C.", "The answer is by no means C.", "The answer is not really C.",
    "The answer is C? I doubt it.", "Answer: C is impossible", "I wonder if the answer is C.",
    "I thought the answer was C.", "It's not the case that the answer is C.",
    "Ich glaube nicht, dass die Antwort C ist.", "Die Antwort ist niemals C.", "Die Antwort ist alles außer C.",
    "Wenn die Antwort C ist, dann ist alles gut.", "Je ne pense pas que la réponse est C.",
    "La réponse n'est jamais C.", "Si la réponse est C, tant mieux.", "No creo que la respuesta sea C.",
    "La respuesta es todo menos C.", "Dudo que la respuesta sea C.", "La risposta è tutto tranne C.",
    "A resposta nunca é C.", "Não acho que a resposta é C.", "Ответ никак не C.", "Я не думаю, что ответ C.",
    "Ответ: всё кроме C.", "答案不会是C", "答案肯定不是C", "我不认为答案是C", "如果答案是C就好了", "不能选C", "答案是C是不可能的", "答えはCではない", "答えはCとは限らない",
    "答えはCですか？", "정답은 C일 리 없다", "정답은 C인가요?", "정답이 C라면 좋겠다", "Cevap C değil.", "Antwoord is niet C",
    "De antwoord is nooit C", "Svaret är inte C", "C est-elle la bonne réponse ?", "C가 정답이 아닙니다", "C项不正确", "C选项是正确的吗？",
    "Ist C richtig?", "I doubt the answer is C.", "It is false that the answer is C.", "Suppose the answer is C.",
    "If the answer is C then pigs fly.", "The answer is anything but C.", "The answer is far from C.",
    "The answer is the opposite of C.", "정답은 C가 아닙니다", "答えはCではありません", "答案是C吗？", "La respuesta nunca es C",
    "Ответ не C.",
]  # fmt: skip
PLAIN_TOO = [
    "The answer is C. Note: D is possible only at high pressure.",
    "Answer: C. One could argue for D, but C fits better.", "Answer: C. The answer D is a trap.",
    "Answer: C, and not D", "Answer: C (not D)", "Answer: C. I considered D, but no.",
    "Answer: C. Wait time is irrelevant here.", "Answer: C. No change in D is needed.",
    "Answer: C. Sorry for the long text.",
    "Answer: C\n\nReason: Option A: sugar is solid. Option B: oxygen burns. Option D: heavy.",
    "The answer is C. However, D is close.", "The answer is C, whereas D is heavier.", "I would choose C over D.",
    "My final choice is C.", "So, the correct answer is C.", "So the answer is (C) nitrogen.",
    "Hence option C is correct.", "Hence, the correct option is C.", "Option (C) is the correct answer.",
    "Thus, C is the best option.", "Final Answer: C. nitrogen", r"The final answer is $\boxed{C}$",
    r"The final answer is $\boxed{\text{C}}$. I hope it is correct.", r"$$\boxed{C}$$", r"\[\boxed{\text{(C)}}\]",
    "After eliminating A, B, and D, C remains, so the answer is C.", "Let's say x=3. Then the answer is C.",
    "Suppose x = 3. Then the answer is C.", "Assume that the gas is ideal. The answer is C.",
    "If the gas is ideal, C is correct.", "Is it D? No. The answer is C.", "Could it be D? No, the answer is C.",
    "Maybe D? No: the answer is C.", "We can say the answer is C.", "It follows that the answer is C.",
    "It is clear that the answer is C.", "It is obvious the answer is C.", "It is true that the answer is C.",
    "I am confident that the answer is C.", "I am not sure why, but the answer is C.",
    "I don't know the details, but the answer is C.", "I can't see any other option; the answer is C.",
    "I'm not an expert, but I believe the answer is C.", "This doesn't match A, B or D, so the answer is C.",
    "Not A. Not B. Not D. Answer: C", "None of the others work, so the answer is C.", "The only correct option is C.",
    "Which one is right? C is right.", "The answer to this problem is clearly C.",
    "Answer: (C), because 20 C is too cold.", "The temperature is 20 °C, so the answer is C.", "Answer is C :)",
    "Answer: C ✓", "**C**.", "C, because nitrogen is inert.", "C because nitrogen is inert.",
    "(C) because nitrogen is inert", "Option C", "option c", "The answer is option c.", "I'd say C.", "I say C",
    "I go with C.", "I'll go with option C.", "I will go with C", "My answer is C", "My answer: C",
    "Solution: The answer is C.", "Correct answer: C", "correct option: c", "Best answer: C.", "Ans: C", "Ans. C",
    "The answer is C).", "The answer is C, or nitrogen.", "The answer is C or, in words, nitrogen.",
    "Answer: C - nitrogen", "Answer: C — nitrogen", "Answer: C | nitrogen", "The answer is C and only C.",
    "The answer is C. Done. No doubt.", "The answer is C. It's that simple.", "The answer is C. It is a gas.",
    "The answer is C. That is a fact, D is not.", "The answer is C; it is D that burns.",
    "The answer is C. Actually it's quite simple.", "Actually, the answer is C.", "Hmm, so the answer is C.",
    "Wait. The answer is C.", "The answer is C. In fact, A and B are solids.",
    "The answer is C. In fact D is the least likely.", "The answer is C. But why not D? Because D is heavier.",
    "The answer is C. Why not D? It is heavier.", "The answer is C. What about D? No.",
    "The answer is C. If D were right, the flame would die.", "The answer is C, while D is not.",
    "The answer is C, unlike D.", "The answer is C, D being too heavy.", "The answer is C, followed by D in abundance.",
    "The answer is C, given that A, B, and D are false.", "答案是C。因为D不正确。", "答案是C，因为A、B、D都不对。",
    "答案：C。解析：A项错误；B项正确地描述了氧气，但不符合题意；D项错误。", "所以答案是C选项。", "因此答案为C。", "正确答案是（C）。", "我会选C。", "我选择C", "应选C项。", "故选：C",
    "故选C．", "故选 C 。", "因此正确选项是C", "本题答案为C。", "C是正确的。", "C是正确答案。", "C正确。", "只有C是正确的", "如果温度升高，答案是C", "如果x=2，则选C",
    "所以应该选C，而不是D", "D不对，所以选C", "Also ist die Antwort C.", "Die korrekte Antwort ist C, da D falsch ist.",
    "Ich wähle C.", "Meine Antwort ist C.", "Richtig ist C.", "Antwort: C, nicht B",
    "La bonne réponse est la réponse C.", "La réponse est C, car D est fausse.", "Je choisis C.",
    "Donc la réponse est C.", "La respuesta correcta es C.", "La respuesta es la opción C, no la D.",
    "Por lo tanto, la respuesta es C.", "Elijo C.", "La risposta giusta è la C.", "La risposta è C, non D.",
    "Quindi la risposta è C.", "A resposta correta é a C.", "A resposta é C, não D.", "Portanto, a resposta é C.",
    "Правильный ответ — C.", "Ответ: C, потому что D неверно.", "Ответ C.", "정답: C. 왜냐하면 D는 아니기 때문입니다.",
    "정답은 C이고 D는 오답입니다.", "따라서 답은 C", "答えはC。Dは間違いです。", "したがって、答えはCです。", "正解はCで、Dではない。", "Het antwoord is C.", "Svar: C",
    "Odpowiedź: C, nie D", "Doğru cevap C.", "Jawaban yang benar adalah C.", "Đáp án đúng là C.", "الإجابة هي ج",
    "सही उत्तर C है",
]  # fmt: skip
NOT_C_EITHER = [
    "The answer is C. Correction: the answer is D.", "Answer: C... or is it D?", "Answer: C. Hmm. D.",
    "Answer: C. Wait... D!", "Answer: C. Never mind, D.", "Answer: C. I changed my mind: D.",
    "Answer: C. Let's go with D instead.", "Answer: C. On reflection, D is better.", "Answer: C. Scratch that. D.",
    "C. No, D.", "C, no, D", "(C) ... wait, (D)", "Answer: C, er, D", "Answer: C. My mistake, it's D.",
    "Answer: C. That was a mistake; the correct one is D.", "Answer: C. Rather D.", "Answer: C, or rather D.",
    "Answer: C, I mean D", r"\boxed{C} no, \boxed{D}", r"\boxed{C}, sorry, D", r"\boxed{C} is wrong.",
    r"\boxed{C} is not the answer.", r"\boxed{C} or D", r"\boxed{C} (or D)", r"\boxed{C}, possibly D.", r"\boxed{C, D}",
    r"\boxed{C \text{ maybe } D}", r"\boxed{\text{maybe C or D}}", r"\boxed{\neg C}", r"\boxed{\lnot C}",
    r"\boxed{\text{anything but C}}", r"\boxed{\text{no C}}", "<answer>C. No, D</answer>", "<answer>C or D</answer>",
    "<answer>C?</answer>", "<answer>anything but C</answer>", "The answer is C, D, or both.",
    "Answer: C and possibly D", "Answer: C, but maybe D", "Answer: C, though D is possible",
    "Answer: C, although it could be D", "Answer: C; alternatively, D", "Answer: C; D as a backup",
    "Answer: C (60%), D (40%)", "Answer: C 50%, D 50%", "Answer: C first, D second",
    "The answer is C with D as second choice.", "If x > 0, C; otherwise D.", "If x > 0 the answer is C, else it is D.",
    "The answer depends: C or D", "The answer lies between C and D.", "I'm torn between C and D. Answer: C or D",
    "It may be C", "The answer may be C or D", "Not C.", "The answer is surely not C.", "The answer is not option C.",
    "The answer is not (C).", "The answer is none other but not C", "The answer will never be C.",
    "I'd never choose C.", "I would never say the answer is C.", "I refuse to say the answer is C.",
    "I highly doubt that the answer is C.", "There is no way the answer is C.", "It can't be that the answer is C.",
    "It is wrong to say the answer is C.", "Many would say the answer is C.", "Some students think the answer is C.",
    "A careless reader would say the answer is C.", "My friend claims the answer is C.", "He says the answer is C.",
    "What if the answer is C?", "Perhaps the answer is C?", "Could the answer be C?", "Is C correct?",
    "Is C the answer?", "If C is correct, then so is D.", "Had the answer been C, we would know.", "C is not correct.",
    "C isn't correct.", "I don't think C is correct.", "I doubt that C is correct.", "Option C is hardly correct.",
    "The answer is C, which is wrong.", "The answer is C. This is incorrect.", "The answer is C. False.",
    "The answer is C — wrong!", "The answer is C (wrong)", "The answer is C. Not.", "答案不太可能是C", "答案并非C", "答案绝对不是C",
    "答案是C或D", "答案是C，也可能是D", "答案可能是C也可能是D", "C是错的", "C不对", "C项错误", "我怀疑答案是C", "有人说答案是C", "也许答案是C？", "答案难道是C吗", "若选C则错",
    "不应该选C", "不选C", "除C外都对", "答案是C或者是D", "正解はCかD", "答えはC以外です", "Cは正解ではない", "正解はCではない", "答えはCじゃない", "答えはCでしょうか",
    "答えはCかもしれない", "정답은 C나 D입니다", "정답은 C이거나 D이다", "정답은 C가 아니에요", "정답은 C 혹은 D", "C는 정답이 아니다", "정답이 C일까요?", "C는 답이 아닙니다",
    "Die Antwort ist auf keinen Fall C.", "Die Antwort ist nicht etwa C, sondern D.",
    "Ich bezweifle, dass die Antwort C ist.", "Antwort: C oder D", "Die Antwort ist C? Nein.",
    "Die Antwort ist C, äh, D.", "C ist nicht richtig.", "C ist falsch.", "La réponse n'est point C.",
    "La réponse n'est sûrement pas C.", "La réponse est C ou bien D.", "C n'est pas la bonne réponse.",
    "La réponse est sauf C", "Je doute que la réponse soit C.", "La respuesta no es la C.", "La respuesta jamás es C.",
    "La respuesta es cualquiera menos C.", "C no es la respuesta correcta.", "Si la respuesta es C, entonces no.",
    "La risposta non è la C.", "La risposta è C o D.", "Dubito che la risposta sia C.", "A resposta não é a C.",
    "A resposta é C ou D.", "Duvido que a resposta seja C.", "Ответ: не C", "Ответ: C, нет, D", "Ответ: C либо D",
    "Ответ точно не C.", "Сомневаюсь, что ответ C.", "Odpowiedź to nie C.", "Het antwoord is niet C.",
    "Het antwoord is C of D.", "Svaret är C eller D.", "Jawaban: bukan C", "Đáp án không phải C", "الإجابة ليست ج",
    "उत्तर C नहीं है", "Cevap kesinlikle C değil", "Answer: C. sugar", r"\boxed{\text{C. sugar}}", r"\boxed{C}: oxygen",
    "The answer is C (carbon dioxide).", "The answer is C: oxygen.", "The correct option is (C) oxygen",
    "<answer>(C) oxygen</answer>", "(C) oxygen", "C. oxygen", "C: oxygen", "Carbon dioxide (C)",
    "The answer is sugar, i.e. C.", "Answer: oxygen, option C", "Answer:\nC. oxygen", "The answer is 12 C",
    r"\boxed{12\,C}", r"\boxed{12\ \text{C}}", "The answer is 3.5 C", "The answer is about 20 degrees C.",
    "The answer is 25 ºC", "The answer is −5 C", "答案是C，不对，应该是D", "答案是C。不，是D。",
]  # fmt: skip
# A letter and another option's text are two answers, and two answers are 0: reading either of them would pay a
# reply that names two options, whichever it meant.
CONTRADICTED = [
    r"\boxed{C: oxygen}", "Answer: (C) oxygen", "The answer is C, oxygen.", "The answer is C. Carbon dioxide",
    "The answer is oxygen (C).", "**C. oxygen**", "<answer>C. sugar</answer>", "Answer: C - sugar", "答案：C. oxygen",
]  # fmt: skip
UNITS = [
    "The answer is -5 C", "The answer is 20 degrees C", "The answer is 37.5°C.", r"\boxed{20^\circ C}",
    r"\boxed{5\,^{\circ}\text{C}}", r"\boxed{25 C}", "The answer is 300 °C, or so.", "The answer is vitamin C.",
    "The answer is C++.", "The answer is 5 °C", "The answer is 20 C.",
]  # fmt: skip


@pytest.mark.parametrize("reply", [*PLAIN, *PLAIN_TOO])
def test_ordinary_declarations_are_read(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 1.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize("reply", [*CORRECTED, *HEDGED, *DENIED, *CONTRADICTED, *UNITS, *NOT_C_EITHER])
def test_what_is_corrected_hedged_denied_or_contradicted_is_not_c(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 0.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize(
    "reply",
    ["Answer: C... no, D.", "The answer is C. On second thought it's D.", "Answer: C (scratch that, D)", "정답은 C가 아니라 D입니다",
     "The answer is not C but D.", "Everyone says the answer is C, but they are wrong; it's D.", "答えはCではなくDです"],
)  # fmt: skip
def test_a_correction_declares_its_own_option(reply: str) -> None:
    assert correct(reply, "D", CHOICES).value == 1.0, correct(reply, "D", CHOICES)


def test_a_missing_gold_cannot_be_judged_and_a_list_is_several_labels() -> None:
    choices = ["zero", "one", "None", "two"]
    assert correct(r"\boxed{C}", None, choices).status == "ungradeable"
    assert correct(r"\boxed{None}", None, choices).value is None
    assert correct("Answer: A and C", ["A", "C"], choices).value == 1.0
    assert correct("Answer: A", ["A", "C"], choices).value == 0.0
    assert correct("Answer: A", ["A", None], choices).status == "ungradeable"  # pyright: ignore[reportArgumentType]


def test_options_beyond_z_and_options_that_are_no_text() -> None:
    many = [f"option text {i}" for i in range(30)]
    assert correct("Answer: Z", "Z", many).value == 1.0
    assert correct("Answer: C", "option text 29", many).status == "ungradeable"
    numbers: list = [4, 8, 15]
    assert correct("Answer: 8", "B", numbers).value == 1.0
    assert correct("Answer: True", "A", [True, False]).value == 1.0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "part", ["(", ")", " ", "\n", "~", "C ", "A ", "C是", "it is C, ", "answer among ", "no, wait, ", "**", "\\boxed{"]
)
def test_a_hundred_thousand_characters_are_read_or_refused(part: str) -> None:
    assert correct("Answer: C" + part * (100_000 // len(part)) + " D", "C", CHOICES).value in (0.0, 1.0)


@pytest.mark.parametrize("reply", C)
def test_a_declared_option_is_read(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 1.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize("reply", NOT_C)
def test_lists_hedges_negations_and_silence_are_not_c(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 0.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize(
    ("reply", "gold", "choices"),
    [
        ("Answer: AB", "C", ["A", "B", "AB", "O"]),
        ("Answer: I and II", "C", ["I only", "II only", "I and II", "none", "a", "b", "c", "d", "e"]),
        (r"\boxed{0.5}", "B", [r"$\frac{1}{3}$", r"$\frac{1}{2}$"]),
        ("Answer: Vitamin A", "B", ["Vitamin B", "Vitamin A"]),
        ("Answer: C and A", "AC", CHOICES),
        ("Answer: B", "oxygen", CHOICES),
    ],
)
def test_texts_and_several_labels(reply: str, gold: str, choices: list[str]) -> None:
    assert correct(reply, gold, choices).value == 1.0


def test_a_gold_that_is_no_option_cannot_be_judged() -> None:
    assert correct("Answer: B", "E", CHOICES).status == "ungradeable"
    assert correct("no idea", "", CHOICES).value == 0.0


def test_a_valid_option_may_be_wrong_but_must_be_one() -> None:
    assert valid_option("Answer: A", CHOICES).value == 1.0
    assert valid_option("Answer: A or B", CHOICES).value == 0.0
    assert valid_option("Answer: E", CHOICES).value == 0.0


words = st.sampled_from(
    ["Answer:", "answer is", "A", "B", "C", "D", "not", "or", "and", "\\boxed{", "}", "<answer>", "</answer>", "答案", "选", "\n", ".",
     "(", ")", "**", "oxygen", "carbon dioxide", "is correct", "I", "n't", "$", "Ａ", "أ", "<think>", "</think>", "because", ","]
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(words, max_size=25).map(" ".join)), st.text(max_size=3))
def test_no_text_makes_a_rule_raise(text: str, gold: str) -> None:
    assert correct(text, gold, CHOICES).value in (0.0, 1.0, None)
    assert correct(text, "C").value in (0.0, 1.0)
    assert valid_option(text, CHOICES).value in (0.0, 1.0)


def row(**more: object) -> dict:
    return {"id": "r1", "choices": CHOICES, "answer": "D"} | more


def test_shuffled_options_keep_their_answer_and_record_their_order() -> None:
    seen = set()
    for member in range(8):
        shuffled = shuffle_options(row(), seed=7, member=member)
        assert shuffled["choices"]["ABCD".index(shuffled["answer"])] == "carbon dioxide"
        assert [CHOICES[i] for i in shuffled["option_order"]["order"]] == shuffled["choices"]
        assert shuffled == shuffle_options(row(), seed=7, member=member)
        seen.add(tuple(shuffled["choices"]))
    assert len(seen) > 1


@pytest.mark.parametrize("text", ["all of the above", "none of these", "both A and B", "A and C only"])
def test_options_that_speak_of_others_stay_in_place(text: str) -> None:
    choices = [*CHOICES[:3], text]
    assert all(shuffle_options(row(choices=choices), seed=s)["choices"] == choices for s in range(5))


def test_the_one_letter_baseline_is_the_most_frequent_answer() -> None:
    baseline = one_letter_baseline([{"answer": letter} for letter in "DABDCD"])
    assert (baseline.letter, baseline.share, baseline.rows) == ("D", 0.5, 6)
