from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from byte_tokenizer import CHATML, tokenizer_with
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo import prompts
from slmgrpo.errors import RecipeError
from slmgrpo.prompts import Parts, parts, render, render_all
from slmgrpo.recipe import Example, Model, Prompt

ROW = {"id": "r1", "question": "What is 2+2?", "answer": "4"}
MCQ = {"id": "m1", "question": "Which is even?", "choices": ["one", "two"], "answer": "B"}
CODE = {"id": "c1", "question": "Add.", "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}

WITH_BOS = "{{ bos_token }}" + CHATML
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SWITCHED = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
DEAF_TO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
FOR_IMAGES = CHATML.replace("m.content", "m.content.text")
CUTTING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


def trl_template(name: str) -> str:
    """A model family's own template, from the installed TRL."""
    spec = find_spec("trl")
    path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja" if spec and spec.origin else None
    if path is None or not path.exists():
        pytest.skip(f"no {name} template in the installed TRL")
    return path.read_text()


def test_a_prompt_is_the_chat_template_around_system_examples_and_question() -> None:
    prompt = Prompt(system="Be brief.", examples=[Example(user="1+1?", assistant="\\boxed{2}")], user="Q: {question}")
    rendered = render(ROW, prompt, tokenizer_with(CHATML))
    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n\\boxed{2}<|im_end|>\n"
        "<|im_start|>user\nQ: What is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (rendered.prefill, rendered.system_in_user) == ("", False)


def test_token_ids_are_the_text_and_nothing_else() -> None:
    tokenizer = tokenizer_with(CHATML)
    rendered = render(ROW, Prompt(prefill="Let me"), tokenizer)
    assert tokenizer.decode(rendered.ids) == rendered.text
    assert rendered.text.endswith("assistant\nLet me")
    assert rendered.prefill == "Let me"


@pytest.mark.parametrize(("template", "count"), [(WITH_BOS, 1), (CHATML, 0)])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_template_alone_writes_the_first_token(template: str, count: int, adds_bos: bool) -> None:
    tokenizer = tokenizer_with(template, adds_bos=adds_bos)
    assert render(ROW, Prompt(system="x"), tokenizer).ids.count(tokenizer.bos_token_id) == count


def test_many_rows_render_as_each_alone() -> None:
    tokenizer = tokenizer_with(CHATML)
    rows = [ROW | {"id": str(n), "question": "x" * n} for n in range(1, 6)]
    assert render_all(rows, Prompt(), tokenizer) == [render(row, Prompt(), tokenizer) for row in rows]
    assert render_all([], Prompt(), tokenizer) == []


def test_a_question_with_choices_gets_lettered_options() -> None:
    rendered = render(MCQ, Prompt(), tokenizer_with(CHATML))
    assert "Which is even?\n\nA. one\nB. two<|im_end|>" in rendered.text


@pytest.mark.parametrize("style", ["{}) {}", "{}. {}", "({}) {}", "{}: {}"])
def test_options_that_the_question_lists_itself_are_not_repeated(style: str) -> None:
    listed = MCQ | {"question": "Which is even?\n" + style.format("A", "one") + "\n" + style.format("B", "two")}
    assert prompts.question(listed) == listed["question"]


def test_the_recipe_can_place_the_options_itself() -> None:
    rendered = render(MCQ, Prompt(user="{choices}\nof these: {question}"), tokenizer_with(CHATML))
    assert "user\nA. one\nB. two\nof these: Which is even?<|im_end|>" in rendered.text


def test_one_test_can_be_shown_and_the_others_stay_hidden() -> None:
    prompt = Prompt(user="{question} It must pass: {first_test}")
    text = render(CODE, prompt, tokenizer_with(CHATML)).text
    assert "Add. It must pass: assert add(1, 2) == 3<" in text
    assert "add(0, 0)" not in text
    stdio = CODE | {"tests": [{"input": "1 2", "output": "3"}]}
    assert "input:\n1 2\noutput:\n3" in render(stdio, prompt, tokenizer_with(CHATML)).text


def test_zero_and_false_are_values_of_a_column() -> None:
    assert prompts._fill("{a}, {b}, {c}", ROW | {"a": 0, "b": False, "c": 0.0}) == "0, False, 0.0"


def test_braces_that_are_no_column_name_stay_as_they_are() -> None:
    user = r"{question} Answer in \boxed{} as {{answer}} or \frac{1}{2}, set {1, 2}."
    assert (
        r"in \boxed{} as {answer} or \frac{1}{2}, set {1, 2}."
        in render(ROW, Prompt(user=user), tokenizer_with(CHATML)).text
    )


@given(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(str.strip))
def test_any_question_arrives_unchanged(question: str) -> None:
    assert prompts._fill("{question}", ROW | {"question": question}) == question


@pytest.mark.parametrize(
    ("template", "prompt", "prefill"),
    [
        (THINKING, Prompt(), "<think>\n"),
        (THINKING, Prompt(prefill="First,"), "<think>\nFirst,"),
        (CHATML, Prompt(prefill="<think>\n"), "<think>\n"),
        (SWITCHED, Prompt(enable_thinking=False), "<think>\n\n</think>\n\n"),
        (SWITCHED, Prompt(enable_thinking=True), ""),
        (SWITCHED, Prompt(), ""),
    ],
)
def test_what_is_in_the_models_turn_already_is_known(template: str, prompt: Prompt, prefill: str) -> None:
    rendered = render(ROW, prompt, tokenizer_with(template))
    assert rendered.prefill == prefill
    assert rendered.text.endswith("assistant\n" + prefill)


def test_a_think_tag_in_the_question_is_not_the_models() -> None:
    assert render(ROW | {"question": "What does <think> do?"}, Prompt(), tokenizer_with(CHATML)).prefill == ""


@pytest.mark.parametrize("template", [NO_SYSTEM, DEAF_TO_SYSTEM])
def test_without_a_system_role_the_text_starts_the_first_user_turn(template: str) -> None:
    prompt = Prompt(system="Be brief.", examples=[Example(user="1+1?", assistant="2")])
    rendered = render(ROW, prompt, tokenizer_with(template))
    assert rendered.text.startswith("<|im_start|>user\nBe brief.\n\n1+1?<|im_end|>")
    assert rendered.system_in_user
    assert rendered.text.count("Be brief.") == 1


def test_a_template_that_writes_the_date_gives_the_same_prompt_every_day() -> None:
    assert render(ROW, Prompt(), tokenizer_with(DATED)).text.startswith("26 Jul 2024\n")


@pytest.mark.parametrize(
    ("template", "prompt", "message"),
    [
        (CHATML, Prompt(user="Solve {problem}"), "prompt.user: r1 has no `problem`, it has id, question; for the text"),
        (CHATML, Prompt(user=r"\boxed{answer}"), "{answer} would show the model what it is graded by; for the text"),
        (CHATML, Prompt(user="{question} {tests}"), "prompt.user: {tests} would show the model what it is graded by"),
        (CHATML, Prompt(user="{choices} {question}"), "prompt.user: r1 has no `choices`"),
        (CHATML, Prompt(enable_thinking=True), "prompt.enable_thinking: the model's chat template does not know it"),
        (THINKING, Prompt(prefill="<think>"), "prompt.prefill: the model's chat template writes <think> itself"),
        (FOR_IMAGES, Prompt(), "chat template leaves the question out; set model.chat_template"),
        ("{{ nothing.there }}", Prompt(), "chat template fails on this prompt: 'nothing' is undefined"),
        ("{% if %}", Prompt(), "chat template fails on this prompt: "),
        (
            CUTTING,
            Prompt(examples=[Example(user="1?", assistant="<think>one</think>1")]),
            "prompt.examples.0.assistant: the model's chat template cuts a part of it",
        ),
    ],
)
def test_a_prompt_that_cannot_work_says_why(template: str, prompt: Prompt, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        render(ROW, prompt, tokenizer_with(template))
    assert message in str(error.value)


def test_columns_that_a_prompt_reads_are_known() -> None:
    prompt = Prompt(user="{question} {hint} {choices} {first_test} {{answer}} {1}")
    assert prompts.columns(prompt) == {"question", "hint", "choices", "tests"}


@pytest.mark.parametrize(
    ("family", "system_in_user", "prefill"),
    [
        ("qwen2_5", False, ""),
        ("qwen3", False, ""),
        ("qwen3_5_think", False, "<think>\n"),
        ("llama3_2", False, ""),
        ("gemma", True, ""),
        ("gemma3", False, ""),
        ("phi3", False, ""),
        ("deepseek_r1_distill", False, "<think>\n"),
    ],
)
def test_real_families_render(family: str, system_in_user: bool, prefill: str) -> None:
    tokenizer = tokenizer_with(trl_template(family), adds_bos=True)
    prompt = Prompt(system="Be brief.", examples=[Example(user="1+1?", assistant="\\boxed{2}")])
    rendered = render(ROW, prompt, tokenizer)
    assert (rendered.system_in_user, rendered.prefill) == (system_in_user, prefill)
    assert rendered.ids.count(tokenizer.bos_token_id) <= 1
    for part in ("Be brief.", "1+1?", "\\boxed{2}", "What is 2+2?"):
        assert rendered.text.count(part) == 1


def test_qwen3_without_thinking_starts_behind_an_empty_think_block() -> None:
    rendered = render(ROW, Prompt(enable_thinking=False), tokenizer_with(trl_template("qwen3")))
    assert rendered.prefill == "<think>\n\n</think>\n\n"
    assert parts("\\boxed{4}", rendered.prefill) == Parts("", "\\boxed{4}", True)


def test_llama_3_2_does_not_change_overnight() -> None:
    assert "Today Date: 26 Jul 2024" in render(ROW, Prompt(), tokenizer_with(trl_template("llama3_2"))).text


@pytest.mark.parametrize(
    ("text", "prefill", "expected"),
    [
        ("4", "", Parts("", "4", True)),
        ("<think>two and two</think> 4", "", Parts("two and two", "4", True)),
        ("two and two\n</think>\n\n4", "<think>\n", Parts("two and two", "4", True)),
        ("two and two</think>4", "", Parts("two and two", "4", True)),
        ("<think>two and", "", Parts("two and", "", False)),
        ("two and", "<think>\n", Parts("two and", "", False)),
        ("<think>a</think>5<think>b</think>4", "", Parts("a\n5\nb", "4", True)),
        ("<think>a</think>4 <think>hm", "", Parts("a\nhm", "4", False)),
        ("4 <think>hm", "", Parts("hm", "4", False)),
        ("", "", Parts("", "", True)),
        ("4", "<think>\n\n</think>\n\n", Parts("", "4", True)),
    ],
)
def test_a_completion_comes_apart_into_reasoning_and_answer(text: str, prefill: str, expected: Parts) -> None:
    assert parts(text, prefill) == expected


@given(st.text(alphabet="ab<>/ think", max_size=30), st.text(alphabet="ab 1", max_size=10))
def test_what_follows_the_last_closed_block_is_the_answer(reasoning: str, answer: str) -> None:
    assert parts(f"<think>{reasoning}</think>{answer}").answer == answer.strip()


def test_a_base_model_without_a_template_is_refused_or_takes_the_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        prompts.set_chat_template(tokenizer_with(None), Model(id="some/base"))
    assert "model.id: some/base has no chat template; set model.chat_template" in str(error.value)
    tokenizer = tokenizer_with(None)
    prompts.set_chat_template(tokenizer, Model(id="some/base", chat_template=CHATML))
    assert render(ROW, Prompt(), tokenizer).text.startswith("<|im_start|>user")
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenizer = tokenizer_with(None)
    prompts.set_chat_template(tokenizer, Model(id="some/base", chat_template="chat.jinja"), tmp_path)
    assert tokenizer.chat_template == CHATML
    with pytest.raises(RecipeError) as error:
        prompts.set_chat_template(tokenizer, Model(id="some/base", chat_template="chat.jinj"), tmp_path)
    assert "model.chat_template: no file chat.jinj" in str(error.value)


def test_a_models_own_template_stays(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML, adds_bos=True)
    prompts.set_chat_template(tokenizer, Model(id="some/instruct"))
    assert tokenizer.chat_template == CHATML


def test_a_recipes_template_begins_as_the_tokenizer_begins_texts() -> None:
    for template, adds_bos, count in ((CHATML, True, 1), (WITH_BOS, True, 1), (CHATML, False, 0)):
        tokenizer = tokenizer_with(None, adds_bos=adds_bos)
        prompts.set_chat_template(tokenizer, Model(id="some/base", chat_template=template))
        assert render(ROW, Prompt(), tokenizer).ids.count(tokenizer.bos_token_id) == count


def test_the_tiny_model_gets_every_task(tmp_path: Path) -> None:
    from slmgrpo import tiny

    if not (tiny.path() / "tokenizer.json").exists():
        pytest.skip("the embedded model is not built")
    from transformers import AutoTokenizer

    from slmgrpo.data import load_sources
    from slmgrpo.recipe import Source

    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    rows = load_sources([Source(source=f"tiny:{task}", limit=20) for task in ("math", "mcq", "code")], base=tmp_path)
    for row, rendered in zip(rows, render_all(rows, Prompt(), tokenizer), strict=True):
        assert rendered.text.count(row["question"]) == 1
        assert len(rendered.ids) < 200
